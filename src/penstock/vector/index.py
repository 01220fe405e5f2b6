"""What a search reads: the vectors of one flush, which never change.

Up to `exact_max` vectors, or vectors that a filter leaves, are all compared. Above that the rows of the
`nprobe` lists whose centroids are nearest are compared: some that belong among the results may be missed.
Whatever is compared, its score is exact, and so is the order of the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.vector.clustering import Slots, distances
from penstock.vector.filters import Filter, IndexedColumn, mask
from penstock.vector.model import Collection, Floats, Metric
from penstock.vector.postings import Ids
from penstock.vector.rows import comparable

__all__ = ["Found", "Index"]

_CHUNK_CELLS: Final = 256 * 1024
"""Components compared at once.

It fits the cache, and the linear algebra below numpy does it on one thread: for more it calls all cores
together, which on a busy machine takes longer than the work, and a server has other searches for them.
"""
_NPROBE_MIN: Final = 64
_NPROBE_MAX: Final = 256
"""Between them `nprobe` is k: a list of a hundred vectors in memory costs little, and recall counts."""
_UNIT: Final = 2.0**-24
"""What one operation of 32-bit floats may be off, relatively."""


class Found(NamedTuple):
    """Where the results are and how they score, best first."""

    slots: Slots
    scores: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The first `count` rows of some arrays, which of them are alive, and the lists they stand in."""

    collection: Collection
    exact_max: int
    count: int
    live: int
    matrix: Floats
    squares: Floats
    ids: Ids
    alive: npt.NDArray[np.bool_]
    names: Sequence[str]
    columns: Mapping[str, IndexedColumn]
    centroids: Floats
    lists: Sequence[Slots]

    def search(
        self, vector: Floats, k: int, *, filter: Filter | None = None, nprobe: int | None = None
    ) -> Found:
        """The `k` best of what is compared; with `nprobe` not more than that many lists, however few vectors.

        Filter and vector have been checked. Vectors that score the same come in the order they were stored.
        """
        query = comparable(vector[None, :], self.collection.metric)[0]
        allowed = self.alive[: self.count]
        if filter is not None:
            allowed = allowed & mask(filter, self.columns, self.count)
        if nprobe is None and (self.live <= self.exact_max or int(allowed.sum()) <= self.exact_max):
            return self._best(query, None if self._is_dense(allowed) else np.flatnonzero(allowed), allowed, k)
        slots = self._probed(query, self._usual_nprobe(k) if nprobe is None else nprobe)
        return self._best(query, slots[allowed[slots]], allowed, k)

    @property
    def _step(self) -> int:
        """Rows compared at once."""
        return max(1, _CHUNK_CELLS // self.collection.dimensions)

    def _is_dense(self, allowed: npt.NDArray[np.bool_]) -> bool:
        """Whether it is cheaper to compare all rows than to pick some."""
        return 2 * int(allowed.sum()) > self.count

    def _usual_nprobe(self, k: int) -> int:
        return min(max(_NPROBE_MIN, k), _NPROBE_MAX)

    def _probed(self, query: Floats, nprobe: int) -> Slots:
        """The rows of the nearest lists."""
        if not self.lists:
            return np.empty(0, np.int64)
        if self.collection.metric is Metric.DOT:
            far = -(self.centroids @ query)
        else:
            far = distances(query[None, :], self.centroids)[0]
        if nprobe >= len(self.lists):
            return np.concatenate(self.lists)
        near = np.argpartition(far, nprobe - 1)[:nprobe]
        return np.concatenate([self.lists[place] for place in near.tolist()])

    def _best(self, query: Floats, slots: Slots | None, allowed: npt.NDArray[np.bool_], k: int) -> Found:
        """The best of these rows, or of all that are allowed.

        A quick pass in 32-bit floats rules out what cannot be among them, by the most it can be off; the rest
        is computed anew in 64 bits.
        """
        quick = self._quick(query, slots)
        if slots is None:
            quick[~allowed] = np.inf
            slots = np.arange(self.count)
        if len(quick) > k:
            bound = np.partition(quick, k - 1)[k - 1] + 2 * self._error(query, slots)
            kept = quick <= bound
            slots = slots[kept]
        slots = slots[allowed[slots]]
        scores = self._scores(query, slots)
        order = np.lexsort((self.ids[slots], scores))[:k]
        sign = -1.0 if self.collection.metric is Metric.DOT else 1.0
        return Found(slots[order], sign * scores[order])

    def _quick(self, query: Floats, slots: Slots | None) -> Floats:
        """Lower is better, whatever the metric."""
        count = self.count if slots is None else len(slots)
        made = np.empty(count, np.float32)
        step = self._step
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            picked = part if slots is None else slots[part]
            # `take` is twice as quick as picking rows by an index.
            rows = self.matrix[part] if slots is None else np.take(self.matrix, slots[part], axis=0)
            products = rows @ query
            if self.collection.metric is Metric.DOT:
                np.negative(products, out=made[part])
            else:
                np.subtract(self.squares[picked], 2.0 * products, out=made[part])
        return made

    def _error(self, query: Floats, slots: Slots) -> float:
        """How far a quick score can be from the true one."""
        longest = float(self.squares[slots].max(initial=0.0))
        length = float(query.astype(np.float64) @ query)
        return 2.0 * (self.collection.dimensions + 4) * _UNIT * (longest + length)

    def _scores(self, query: Floats, slots: Slots) -> npt.NDArray[np.float64]:
        made = np.empty(len(slots), np.float64)
        wide = query.astype(np.float64)
        for begin in range(0, len(slots), self._step):
            part = slice(begin, begin + self._step)
            rows = self.matrix[slots[part]].astype(np.float64)
            if self.collection.metric is Metric.DOT:
                made[part] = -(rows @ wide)
            else:
                rows -= wide
                made[part] = np.einsum("ij,ij->i", rows, rows)
        return made
