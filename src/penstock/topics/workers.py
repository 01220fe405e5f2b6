"""Where blocking work goes: one thread that tidies up, a few that read from the cold tier.

They are kept apart so that a slow cold store never holds up a checkpoint, and neither holds up the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

__all__ = ["ThreadWorkers", "Workers"]

T = TypeVar("T")

_COLD_READS = 4


class Workers(Protocol):
    """Runs blocking calls for the event loop."""

    async def tidy(self, work: Callable[[], T]) -> T:
        """One after the other, in the order of the calls."""
        ...

    async def fetch(self, work: Callable[[], T]) -> T:
        """A few at a time."""
        ...

    def close(self) -> None:
        """Wait for what is running; not to be used afterwards."""
        ...


class ThreadWorkers:
    """`Workers` with threads of their own."""

    def __init__(self) -> None:
        self._tidy = ThreadPoolExecutor(1, thread_name_prefix="topics-tidy")
        self._fetch = ThreadPoolExecutor(_COLD_READS, thread_name_prefix="topics-cold")

    async def tidy(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tidy, work)

    async def fetch(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._fetch, work)

    def close(self) -> None:
        self._tidy.shutdown()
        self._fetch.shutdown()
