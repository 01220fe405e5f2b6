"""Errors of queries, and the budget of a query.

InvalidInput
├── ParseError          the text is not a query; the message is the parser's
└── BadRange            the requested steps cannot be evaluated
Unsupported
└── UnsupportedQuery    a query that uses an unsupported part of the language
Rejected
└── ExecutionError      the data does not allow a result (several series where one is needed)
LimitExceeded
├── TooManySamples      the query would hold more samples than allowed
└── QueryTimeout        the query took longer than allowed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from penstock.clock import Clock
from penstock.errors import InvalidInput, LimitExceeded, Rejected, Unsupported
from penstock.timeseries.model import Labels
from penstock.units import format_count, format_duration


class ParseError(InvalidInput):
    """The text is not a query. The message comes from the parser and names the offending part if possible."""

    def __init__(self, message: str) -> None:
        super().__init__(f"parse error: {message}")


class BadRange(InvalidInput):
    """The end is before the start, the step is not positive, or there are too many steps."""


class UnsupportedQuery(Unsupported):
    """The query uses an unsupported part of the language. The message names it."""


class ExecutionError(Rejected):
    """The data does not allow a result, for example if several series match where one is expected."""


class TooManySamples(LimitExceeded):
    """The query would hold more samples in memory than allowed."""


class QueryTimeout(LimitExceeded):
    """The query took longer than allowed."""


_SAMPLE_BYTES: Final = 110
"""Memory of a sample during evaluation.

Labels are charged as the number of samples that fit into their bytes.
"""
_ROWS_AT_ONCE: Final = 256
"""Number of label sets processed between two checks of the time."""


class Budget:
    """The remaining samples and time of a query. Every charge checks the time.

    Only one thread at a time may use it, except for `stop`, which any thread may call.
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
        """The remaining time, at least 0."""
        return max(0.0, self._timeout_s - (self._clock.monotonic() - self._started))

    def stop(self) -> None:
        """Cancel the query. The next check of the time raises `QueryTimeout`."""
        self._stopped = True

    def charge(self, samples: int) -> None:
        """Charge samples before they are created. Raises `TooManySamples` or `QueryTimeout`."""
        self._samples_left -= samples
        if self._samples_left < 0:
            raise TooManySamples(
                "query processing would load too many samples into memory in query execution: "
                f"more than {format_count(self._samples_max)}, "
                f"where {_SAMPLE_BYTES} bytes of labels count as a sample. "
                "Select fewer series, a shorter range or shorter labels, or raise samples_max"
            )
        self.check()

    def charge_labels(self, labels: Iterable[Labels]) -> Iterator[Labels]:
        """Charge each label set that an expression creates before the next one is created.

        Names and values count in full even if series share them, because a response repeats them. Raises the
        same errors as `charge`.
        """
        for one in labels:
            names = sum(len(name) for name, _ in one)
            self.charge(labels_cost(one) + names // _SAMPLE_BYTES)
            yield one

    def watch(self, labels: Iterable[Labels]) -> Iterator[Labels]:
        """Yield existing label sets, and check the time periodically."""
        for row, one in enumerate(labels):
            if row % _ROWS_AT_ONCE == 0:
                self.check()
            yield one

    def check(self) -> None:
        """Raise `QueryTimeout` if the time is up. Long computations must call it periodically."""
        if self._stopped or self._clock.monotonic() - self._started > self._timeout_s:
            raise self.timed_out()

    def timed_out(self) -> QueryTimeout:
        return QueryTimeout(f"query timed out after {format_duration(self._timeout_s)}")


def labels_cost(labels: Labels, least: int = 1) -> int:
    """Return the cost of a label set in samples: one for every 110 bytes of values, and at least `least`."""
    return max(least, labels.memory_bytes // _SAMPLE_BYTES)
