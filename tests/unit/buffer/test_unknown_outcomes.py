"""Every append with an unknown outcome is counted, whatever the reason."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.buffer.doubles import MANIFEST, Queue, once

from penstock import errors
from penstock.buffer import OutcomeUnknown


async def test_an_append_still_open_at_the_deadline_is_counted_as_unresolved(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1s")
    q.store.before = once(errors.OutcomeUnknown("timed out"), "cas", MANIFEST, times=10_000)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(3)
    with pytest.raises(OutcomeUnknown):
        await flushing
    assert q.value("append_unknown_total", resolved="false") == 1
