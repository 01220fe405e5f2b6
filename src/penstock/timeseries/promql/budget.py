"""What one query may cost: samples held, and time."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.timeseries.promql.errors import QueryTimeout, TooManySamples
from penstock.units import format_count, format_duration

__all__ = ["Budget"]


class Budget:
    """Counts down as a query is read and evaluated. Time is looked at whenever something is charged.

    One part of a query uses it at a time, on whatever thread; `stop` may come from another.
    """

    def __init__(self, *, samples_max: int, timeout_s: float, clock: Clock) -> None:
        self._samples_left = self._samples_max = samples_max
        self._timeout_s = timeout_s
        self._clock = clock
        self._started = clock.monotonic()
        self._stopped = False

    @property
    def samples_used(self) -> int:
        return self._samples_max - self._samples_left

    @property
    def seconds_left(self) -> float:
        """How much of the time is left, at least 0."""
        return max(0.0, self._timeout_s - (self._clock.monotonic() - self._started))

    def stop(self) -> None:
        """Nobody waits for the answer any more: the next look at the time ends the work."""
        self._stopped = True

    def charge(self, samples: int) -> None:
        """Raises `TooManySamples` or `QueryTimeout`, before the samples are made."""
        self._samples_left -= samples
        if self._samples_left < 0:
            raise TooManySamples(
                "query processing would load too many samples into memory in query execution: "
                f"more than {format_count(self._samples_max)}"
            )
        self.check()

    def check(self) -> None:
        """Raises `QueryTimeout` if the time is over. Whoever works long looks now and then."""
        if self._stopped or self._clock.monotonic() - self._started > self._timeout_s:
            raise self.timed_out()

    def timed_out(self) -> QueryTimeout:
        return QueryTimeout(f"query timed out after {format_duration(self._timeout_s)}")
