"""Time as a seam: every room takes a `Clock`, so tests own every millisecond."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from typing import Final, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


_SLEW_MS: Final = 1000
"""A wall clock that is ahead by so little more was slewed, and not set."""
_LEADS_MAX: Final = 64


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
        self._lock = threading.Lock()
        self._leads = deque([(self._start_s, 0)])
        """How far wall time was ahead of steady time, each with the last moment it was so; both ascend."""

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def steady_ms(self) -> int:
        """Milliseconds that never go back and never jump, comparable with wall time until that is set."""
        return self._start_ms + round((self._clock.monotonic() - self._start_s) * 1000)

    def cautious_ms(self, age_ms: float = math.inf) -> int:
        """A time by which nothing stamped is `age_ms` old that is younger, to compare with wall stamps.

        A clock that is set forward makes nothing older than it is: what counts is the least that wall time
        was ahead of steady time within the last `age_ms`. What was stamped before a step is that old when the
        step is, so a clock that was wrong at the start of the process delays nothing for longer. A clock that
        is set back delays what waits for an age by at most the step.
        """
        with self._lock:
            now_s, lead_ms, leads = self._clock.monotonic(), self.now_ms() - self.steady_ms(), self._leads
            leads[-1] = (now_s, leads[-1][1])  # it was so until a moment ago
            while leads and leads[-1][1] >= lead_ms:
                leads.pop()
            if leads and lead_ms - leads[-1][1] <= _SLEW_MS:
                lead_ms = leads.pop()[1]
            leads.append((now_s, lead_ms))
            if len(leads) > _LEADS_MAX:
                leads[1] = (leads[1][0], leads.popleft()[1])
            least_ms = next(one for last_s, one in leads if last_s >= now_s - age_ms / 1000)
        return self.steady_ms() + min(least_ms, lead_ms)

    def to_wall_ms(self, steady_ms: int) -> int:
        """The wall time, as the wall clock is set now, of a moment of `steady_ms`."""
        return steady_ms + self._clock.now_ms() - self.steady_ms()
