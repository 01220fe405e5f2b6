"""A clock whose time changes only when a test advances it."""

from __future__ import annotations

import asyncio
import heapq

__all__ = ["ManualClock"]

_NS = 1_000_000_000
_TURNS_MAX = 10_000
_TURNS_BLIND = 64


class ManualClock:
    """A `penstock.clock.Clock` whose time moves only by `advance`.

    It works on any event loop. Sleepers wake in the order of their deadlines, and those with the same
    deadline in the order in which they began to sleep. Time is kept in whole nanoseconds, so ten steps of
    0.1 s are exactly one second.
    """

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = start_ms
        self._elapsed_ns = 0
        self._ordinal = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        return self._start_ms + self._elapsed_ns // 1_000_000

    def monotonic(self) -> float:
        return self._elapsed_ns / _NS

    async def sleep(self, seconds: float) -> None:
        delay_ns = round(seconds * _NS)
        if delay_ns <= 0:
            await asyncio.sleep(0)
            return
        wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ordinal += 1
        heapq.heappush(self._sleepers, (self._elapsed_ns + delay_ns, self._ordinal, wakeup))
        await wakeup

    @property
    def sleeping(self) -> int:
        """The number of sleeping tasks."""
        return sum(not wakeup.done() for _, _, wakeup in self._sleepers)

    def jump_wall(self, milliseconds: int) -> None:
        """Set the wall clock forward or back, as an operator or NTP would. Intervals do not change."""
        self._start_ms += milliseconds

    async def advance(self, seconds: float) -> None:
        """Advance the time by `seconds`. Stop at every deadline until the woken tasks are idle.

        A sleep that a woken task begins counts from the instant at which the task woke. Work in threads is
        not waited for. Raise `RuntimeError` if the tasks do not become idle.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        target_ns = self._elapsed_ns + round(seconds * _NS)
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= target_ns:
            deadline_ns, _, wakeup = heapq.heappop(self._sleepers)
            if wakeup.done():
                continue
            self._elapsed_ns = max(self._elapsed_ns, deadline_ns)
            wakeup.set_result(None)
            await self._settle()
        self._elapsed_ns = max(self._elapsed_ns, target_ns)

    async def _settle(self) -> None:
        """Yield until no other callback is ready to run."""
        # The standard loops keep their runnable callbacks in `_ready`. Other loops get a fixed number of
        # turns instead.
        loop = asyncio.get_running_loop()
        blind = not hasattr(loop, "_ready")
        for turn in range(_TURNS_MAX):
            await asyncio.sleep(0)
            if (blind and turn >= _TURNS_BLIND) or (not blind and not getattr(loop, "_ready", ())):
                return
        raise RuntimeError(f"tasks are still busy after {_TURNS_MAX} turns of the event loop")
