"""How much of what an exact search finds the usual search finds, measured on vectors that are stored.

Each vector of a sample is asked for, and left out of both answers: that a search finds what it was asked with
says little. A hit counts if it scores no worse than the last of the exact ones, so that vectors that score
the same can stand for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.vector.filters import Filter
from penstock.vector.index import Found, Index
from penstock.vector.model import Metric
from penstock.vector.rows import Slots

__all__ = ["SAMPLE_MAX", "Recall", "Tally", "compare", "sampled"]

SAMPLE_MAX: Final = 1000
_SLACK: Final = 1e-9
"""What the scores of one vector may differ by, relatively, because it was compared in other company."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The share of the `k` best that searches find, over `sample` queries."""

    recall: float
    k: int
    sample: int
    vectors: int
    """In the collection."""


@dataclass(slots=True)
class Tally:
    """Hits that were found, of those that were there."""

    found: int = 0
    wanted: int = 0

    @property
    def share(self) -> float:
        """1 where nothing was to be found."""
        return self.found / self.wanted if self.wanted else 1.0


def sampled(index: Index, sample: int) -> Slots:
    """Living rows, drawn evenly; the same ones for the same index."""
    living = np.flatnonzero(index.alive[: index.count])
    rng = np.random.default_rng(0)
    return rng.choice(living, min(sample, len(living)), replace=False)


def compare(
    index: Index, slot: int, k: int, *, filter: Filter | None = None, nprobe: int | None = None
) -> Tally:
    """Ask for one row by lists and exactly."""
    query = index.matrix[slot]
    wanted = _others(index.exact(query, k + 1, filter=filter), slot, k)
    found = _others(index.search(query, k + 1, filter=filter, nprobe=nprobe), slot, k)
    if not len(wanted.slots):
        return Tally()
    sign = -1.0 if index.collection.metric is Metric.DOT else 1.0
    worst = sign * float(wanted.scores[-1])
    good = sign * found.scores <= worst + _SLACK * abs(worst)
    return Tally(int(good.sum()), len(wanted.slots))


def _others(found: Found, slot: int, k: int) -> Found:
    """The `k` best without the row itself."""
    others = found.slots != slot
    return Found(found.slots[others][:k], found.scores[others][:k])
