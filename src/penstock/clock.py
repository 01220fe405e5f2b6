"""Time as a dependency: every component receives a `Clock`, so that tests control it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from typing import Final, Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


_SLEW_MS: Final = 1000
"""A wall clock that gained at most this much was slewed, not set."""
_LEADS_MAX: Final = 64


class Clock(Protocol):
    """Wall time for stamps, monotonic time for intervals, and a way to wait."""

    def now_ms(self) -> int:
        """Wall-clock milliseconds since the Unix epoch. May jump; never use it for intervals."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start. Never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        ...


class SystemClock:
    """The system clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


class SteadyClock:
    """A clock with an additional time that ignores steps of the wall clock.

    `steady_ms` starts at the wall time of construction and then follows the monotonic clock. It measures
    deadlines, leases and ages within one process. Stored and displayed times are wall time; see
    `to_wall_ms`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ms = clock.now_ms()
        self._start_s = clock.monotonic()
        self._lock = threading.Lock()
        self._leads = deque([(self._start_s, 0)])
        """By how much the wall clock led steady time, each with the last moment of that lead. Both ascend."""

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def steady_ms(self) -> int:
        """Return milliseconds that never jump or go back; equal to wall time until the wall clock is set."""
        return self._start_ms + round((self._clock.monotonic() - self._start_s) * 1000)

    def cautious_ms(self, age_ms: float = math.inf) -> int:
        """Return a wall time by which no stamp looks `age_ms` old before it is.

        If the wall clock is set forward, nothing ages faster: the result uses the smallest lead over steady
        time within the last `age_ms`. A stamp from before a step counts as `age_ms` old once the step itself
        is that old, so a clock that was wrong when the process started causes no longer delay. If the clock
        is set back, actions that wait for an age are delayed by at most the size of the step.
        """
        with self._lock:
            now_s, lead_ms, leads = self._clock.monotonic(), self.now_ms() - self.steady_ms(), self._leads
            leads[-1] = (now_s, leads[-1][1])  # the last lead held until now
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
        """Convert `steady_ms` to wall time, using the current setting of the wall clock."""
        return steady_ms + self._clock.now_ms() - self.steady_ms()
