"""What one query may cost: samples held, and time."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.timeseries.promql.errors import QueryTimeout, TooManySamples
from penstock.units import format_count, format_duration

__all__ = ["Budget"]


class Budget:
    """Counts down as a query is evaluated. Time is looked at whenever something is charged."""

    def __init__(self, *, samples_max: int, timeout_s: float, clock: Clock) -> None:
        self._samples_left = self._samples_max = samples_max
        self._timeout_s = timeout_s
        self._clock = clock
        self._started = clock.monotonic()

    @property
    def samples_used(self) -> int:
        return self._samples_max - self._samples_left

    def charge(self, samples: int) -> None:
        """Raises `TooManySamples` or `QueryTimeout`, before the samples are made."""
        self._samples_left -= samples
        if self._samples_left < 0:
            raise TooManySamples(
                "query processing would load too many samples into memory in query execution: "
                f"more than {format_count(self._samples_max)}"
            )
        if self._clock.monotonic() - self._started > self._timeout_s:
            raise QueryTimeout(
                f"query timed out in expression evaluation after {format_duration(self._timeout_s)}"
            )
