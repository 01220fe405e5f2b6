"""Pollers, which read a source at intervals while there are viewers, and rates of its counters.

Each source has its own poller and time limit. The state of a source that hangs is unknown, with the reason
and the time. It does not delay others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import httpx

from penstock.clock import Clock
from penstock.errors import PenstockError, public_text

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_STALE_S: Final = 15.0
"""The age from which a reading is ignored, because it may no longer be true."""
_SHARE: Final = 1 / 200
"""Limit of the share of a source's time that its poller uses, if it may poll less often."""
_REMEMBERED: Final = 5
_SPAN_S: Final = 10.0
"""The window of a rate: long enough to be steady, short enough to follow changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[T]):
    """The last reading of a source. While it is unknown, `value` is None and `error` has the reason."""

    value: T | None
    at_ms: int | None
    error: str | None
    failing_since_ms: int | None


class Pollable(Protocol):
    """The interface of all pollers."""

    def watched(self) -> AbstractContextManager[None]:
        """Poll at intervals inside this context."""
        ...

    async def renew(self, wait_s: float) -> None:
        """Poll if the last reading is older than the interval. Wait at most `wait_s`."""
        ...


def reason_of(error: BaseException) -> str:
    """Return an error as one line for display."""
    if isinstance(error, TimeoutError):
        return "it did not respond in time"
    if isinstance(error, httpx.HTTPError):
        return f"it cannot be reached: {public_text(error) or type(error).__name__}"
    return public_text(error).partition("\n")[0][:500] or type(error).__name__


class Poller(Generic[T]):
    """Polls one source. Not thread-safe: one event loop owns it.

    A slow source is polled less often, but at least every `interval_max_s`.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[T]],
        clock: Clock,
        *,
        interval_s: float,
        timeout_s: float,
        interval_max_s: float | None = None,
    ) -> None:
        self._look = look
        self._clock = clock
        self._least_s = interval_s
        self._most_s = interval_s if interval_max_s is None else interval_max_s
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._timeout_s = timeout_s
        self._watching = 0
        self._polling: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._reading: Reading[T] = Reading(value=None, at_ms=None, error=None, failing_since_ms=None)
        self._looked_s: float | None = None
        """When the last poll ended, with or without success."""
        self._answered_s = 0.0

    @property
    def reading(self) -> Reading[T]:
        """The last reading, unless it is too old."""
        known = self._reading
        if known.value is not None and self._clock.monotonic() - self._answered_s > self._stale_s:
            why = known.error or "it has not been polled recently"
            return Reading(value=None, at_ms=known.at_ms, error=why, failing_since_ms=known.failing_since_ms)
        return known

    @property
    def _interval_s(self) -> float:
        """The interval, from the shortest of the last polls, because the longer ones include waits."""
        return max(self._least_s, min(self._most_s, min(self._took_s, default=0.0) / _SHARE))

    @property
    def _stale_s(self) -> float:
        return max(_STALE_S, 3 * self._interval_s + self._timeout_s)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Poll at intervals inside this context."""
        self._watching += 1
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield
        finally:
            self._watching -= 1
            if not self._watching and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    async def fresh(self, age_s: float | None = None, wait_s: float | None = None) -> Reading[T]:
        """Return a reading that is at most `age_s` old, or the last one after `wait_s`."""
        age_s = self._interval_s if age_s is None else age_s
        if self._looked_s is None or self._clock.monotonic() - self._looked_s > age_s:
            await asyncio.wait([self._begin()], timeout=self._timeout_s if wait_s is None else wait_s)
        return self.reading

    async def renew(self, wait_s: float) -> None:
        await self.fresh(wait_s=wait_s)

    async def close(self) -> None:
        for task in (self._polling, self._looking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._polling = self._looking = None

    async def _poll(self) -> None:
        while True:
            await asyncio.wait([self._begin()])
            await self._clock.sleep(self._interval_s)

    def _begin(self) -> asyncio.Task[None]:
        """Return the running poll, or start one. There is never more than one."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._once())
        return self._looking

    async def _once(self) -> None:
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                value = await self._look()
        except (PenstockError, TimeoutError, OSError, httpx.HTTPError) as error:
            self._failed(reason_of(error))
        except Exception:  # noqa: BLE001 - a bug in one poll must not end the others
            _LOG.exception("a poll failed")
            self._failed("the console failed to poll it; see the console's log")
        else:
            now = self._clock.now_ms()
            self._reading = Reading(value=value, at_ms=now, error=None, failing_since_ms=None)
            self._answered_s = self._clock.monotonic()
            self._took_s.append(self._answered_s - began)
        self._looked_s = self._clock.monotonic()

    def _failed(self, why: str) -> None:
        since = self._reading.failing_since_ms or self._clock.now_ms()
        self._reading = Reading(value=None, at_ms=self._reading.at_ms, error=why, failing_since_ms=since)


@dataclass(frozen=True, slots=True)
class _Point:
    at_s: float
    value: float


def rate_between(before: float, before_s: float, after: float, after_s: float) -> float | None:
    """Return the growth per second, or None if no time has passed or the counter was reset."""
    if after_s <= before_s or after < before:
        return None
    return (after - before) / (after_s - before_s)


class Meter:
    """The last values of a counter. A counter that decreases was reset, and its rate starts over."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()

    def read(self, at_s: float, value: float | None) -> None:
        """Add a reading. None means a failed reading, which clears the rate."""
        points = self._points
        if value is None or (points and value < points[-1].value):
            points.clear()
        if value is None:
            return
        points.append(_Point(at_s, value))
        while len(points) > 2 and at_s - points[1].at_s >= _SPAN_S:
            points.popleft()

    @property
    def rate(self) -> float | None:
        """The rate per second over the last readings, or None with fewer than two."""
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        return rate_between(first.value, first.at_s, last.value, last.at_s)


class Trail:
    """The last points of a few figures over time."""

    __slots__ = ("_points",)

    def __init__(self, length: int) -> None:
        self._points: deque[tuple[int, *tuple[float | None, ...]]] = deque(maxlen=length)

    def add(self, at_ms: int, *values: float | None) -> None:
        self._points.append((at_ms, *values))

    def points(self) -> list[tuple[int, *tuple[float | None, ...]]]:
        """Return the points, oldest first."""
        return list(self._points)
