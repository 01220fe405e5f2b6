"""Things that are to be done a little later."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from penstock.clock import Clock

__all__ = ["Delays"]

T = TypeVar("T")

_SLACK_S: Final = 0.001
"""What is due so soon comes back with what is due now."""


class Delays(Generic[T]):
    """Items that come back when their time is over, each held at most once. One task for all of them.

    `back` is called with each; it must not raise, and may hold the item again.
    """

    def __init__(self, clock: Clock, back: Callable[[T], None]) -> None:
        self._clock = clock
        self._back = back
        self._held: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._waiting: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, item: T, due_s: float) -> None:
        """Give it back at this time; what is held already comes when it would have come.

        Who is due before all others may have to wait for the first of them.
        """
        if item in self._held:
            return
        self._held[item] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), item))
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def discard(self, item: T) -> None:
        """It need not come back."""
        self._held.pop(item, None)

    def close(self) -> None:
        """Nothing comes back any more."""
        self._held.clear()
        self._heap.clear()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def _wait(self) -> None:
        while self._heap:
            await self._clock.sleep(max(self._heap[0][0] - self._clock.monotonic(), _SLACK_S))
            now_s = self._clock.monotonic() + _SLACK_S
            while self._heap and self._heap[0][0] <= now_s:
                due_s, _, item = heapq.heappop(self._heap)
                if self._held.get(item) == due_s:
                    del self._held[item]
                    self._back(item)
        self._waiting = None
