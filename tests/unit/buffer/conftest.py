from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.buffer.doubles import Queue, queue


@pytest.fixture
async def q() -> AsyncIterator[Queue]:
    async with queue() as made:
        yield made
