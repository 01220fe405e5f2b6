"""Time as a seam: every room takes a `Clock`, so tests own every millisecond."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


class Clock(Protocol):
    """Wall time for stamps, monotonic time for intervals, and a way to wait."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since the Unix epoch. May jump; never use it for intervals."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


class SteadyClock:
    """A clock that also counts milliseconds which no step of the wall clock changes.

    `steady_ms` starts at the wall time of construction and then follows the monotonic clock. Deadlines,
    leases and ages within one process are measured with it. What is stored or shown is wall time; see
    `to_wall_ms`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ms = clock.now_ms()
        self._start_s = clock.monotonic()

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def steady_ms(self) -> int:
        """Milliseconds that never go back and never jump, comparable with wall time until that is set."""
        return self._start_ms + round((self._clock.monotonic() - self._start_s) * 1000)

    def cautious_ms(self) -> int:
        """The earlier of wall time and steady time, to compare with stamps of an earlier process.

        A clock that is set forward makes nothing older than it is. One that is set back delays what waits for
        an age by at most the step.
        """
        return min(self._clock.now_ms(), self.steady_ms())

    def to_wall_ms(self, steady_ms: int) -> int:
        """The wall time, as the wall clock is set now, of a moment of `steady_ms`."""
        return steady_ms + self._clock.now_ms() - self.steady_ms()
