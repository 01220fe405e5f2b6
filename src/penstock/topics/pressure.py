"""How hard the server is pressed, and what it does about it: later and in larger pieces, never less.

Every 100 ms three signals become one number from 0 to 1: how many topics wait to be delivered, how long they
waited against the 5 ms that are aimed at, and how full the queues of the log are. The largest of them counts,
smoothed. Up the ladder deliveries are put together, commits wait for company, what matters least is put off,
and at the very top writers are told to come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CALM", "SAMPLE_MS", "Governor", "Ladder", "Signals"]

SAMPLE_MS: Final = 100
_DEPTH_FULL: Final = 256
"""So many waiting topics per worker are full pressure by themselves."""
_LATENCY_FULL_MS: Final = 5.0
_SMOOTHING: Final = 0.3
_NOTHING: Final = 0.01
_COALESCE_FROM: Final = 0.2
_COALESCE_MS_MAX: Final = 20.0
_WIDEN_FROM: Final = 0.4
_WINDOW_MS: Final = (0.5, 10.0)
_DEFER_FROM: Final = 0.8
_DEFER_AFTER: Final = 5
"""Samples above the mark until work is put off: half a second is no spike."""
_RESUME_BELOW: Final = 0.6
_REFUSE_FROM: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What is measured: topics that wait, how long the last ones did, and how full the fullest queue is."""

    depth: int
    wait_ms: float
    busy: float
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What a pressure means. Everything here costs time; nothing changes what is stored or read."""

    pressure: float
    coalesce_ms: float
    """How long a delivery may wait for more of the same topic."""
    commit_window_ms: float
    """How long a commit may wait for more; 0 leaves it to the committer."""
    defers: bool
    """Copies go one band lower, and what has a negative priority is not pushed. Everything can be polled."""
    refuses: bool
    """Writes are refused where the log's queue is filling up, unless the writer insists."""


CALM: Final = Ladder(pressure=0.0, coalesce_ms=0.0, commit_window_ms=0.0, defers=False, refuses=False)


class Governor:
    """Turns samples into a pressure and a step of the ladder. Has no clock: a sample is 100 ms."""

    def __init__(self) -> None:
        self.ladder = CALM
        self._high = 0

    def sample(self, signals: Signals) -> Ladder:
        """The ladder after one more sample."""
        now = max(
            signals.depth / (signals.workers * _DEPTH_FULL), signals.wait_ms / _LATENCY_FULL_MS, signals.busy
        )
        before = self.ladder.pressure
        pressure = before + _SMOOTHING * (min(max(now, 0.0), 1.0) - before)
        if pressure < _NOTHING:
            pressure = 0.0
        self._high = self._high + 1 if pressure > _DEFER_FROM else 0
        defers = pressure >= _RESUME_BELOW if self.ladder.defers else self._high >= _DEFER_AFTER
        self.ladder = Ladder(
            pressure=pressure,
            coalesce_ms=_over(_COALESCE_FROM, pressure) * _COALESCE_MS_MAX,
            commit_window_ms=_window_ms(pressure),
            defers=defers,
            refuses=pressure >= _REFUSE_FROM,
        )
        return self.ladder


def _over(start: float, pressure: float) -> float:
    """How far the pressure is from `start` to 1, as a share."""
    return max(0.0, (pressure - start) / (1.0 - start))


def _window_ms(pressure: float) -> float:
    least, most = _WINDOW_MS
    return least + (most - least) * pressure if pressure > _WIDEN_FROM else 0.0
