"""The index for searches: an immutable view of the vectors after one flush.

A search compares all vectors if at most `exact_max` pass the filter. Otherwise it compares only the rows of
the lists with the nearest centroids, so it may miss some results. Lists without a row that passes the filter
do not count. A search continues until it has compared `k` rows, so it returns `k` results if they exist.
Scores and the order of results are always exact.

`IndexState` is the state of the flusher: rows, lists and ids as of the last flush. `Recall` is the share of
the exact results that searches find. Each sampled vector is the query of a search, and is excluded from both
results, because finding itself proves little. A hit counts if it scores no worse than the last exact one, so
vectors with equal scores are interchangeable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from penstock.coordinator import Operation, Position
from penstock.vector.codec import Ids
from penstock.vector.damage import Damage
from penstock.vector.filters import Filter, IndexedColumn, mask
from penstock.vector.inverted_lists import InvertedLists
from penstock.vector.keys import BLOCK_SIZE, CENTROID_LEVEL
from penstock.vector.model import Collection, Floats, Metric
from penstock.vector.rows import Rows, Slots, comparable, distances

_CHUNK_CELLS: Final = 256 * 1024
"""Number of components compared in one step.

They fit the cache, and numpy's linear algebra processes them on one thread. For more it uses all cores. On a
busy machine, waiting for the cores takes longer than the work, and a server needs them for other searches.
"""
_NPROBE_MIN: Final = 64
_NPROBE_MAX: Final = 256
"""Bounds of the default `nprobe`, which is k. A list of 100 vectors is cheap, and recall matters.

Those lists are always compared. Without an `nprobe` from the caller, a search also compares lists that may
hold a better row than the current `k`-th best, up to the rows of `_NPROBE_MAX` lists.
"""
_PROBE_MARGIN: Final = 0.7
"""Assumed distance of a list's best row from its centroid, towards the query, in radii of the list.

Measurements: clustered vectors need only the nearest lists, and vectors in 24 directions reach a recall of
0.98.
"""
_PROBE_MARGIN_DOT: Final = 1.2
"""The same margin for dot products, where one list may hold rows of very different lengths.

Measurements: recall is about 0.98 or better if one vector in a hundred is 20 times as long, if lengths are
log-normal, and without clusters. Ordering the lists by their spread as well would lose the few long rows.
"""
_PICKING: Final = 2
"""Cost of a selected row relative to a row in a pass over all rows."""
_PICKED_CELLS: Final = 64 * 1024
"""Number of components compared in one step if rows are selected. Their copy stays in the cache."""
SAMPLE_MAX: Final = 1000
_SLACK: Final = 1e-9
"""Relative difference between two scores of one vector when it is compared in different batches."""
_UNIT: Final = 2.0**-24
"""Relative error of one operation on 32-bit floats."""


class Found(NamedTuple):
    """Slots and scores of results, best first."""

    slots: Slots
    scores: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The first `count` rows of the arrays, a mask of the live ones, and their lists."""

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
    radii: Floats
    """Root mean square distance of the rows of each list from its centroid."""

    def search(
        self, vector: Floats, k: int, *, filter: Filter | None = None, nprobe: int | None = None
    ) -> Found:
        """Return the `k` best of the compared rows, or all rows that pass the filter if they are fewer.

        With `nprobe`, that many lists are compared, even for few vectors, and more only if they hold fewer
        than `k` rows. The caller must have checked filter and vector. Equal scores are in the order of their
        ids.
        """
        query = comparable(vector[None, :], self.collection.metric)[0]
        allowed = self.alive[: self.count]
        if filter is not None:
            allowed = allowed & mask(filter, self.columns, self.count)
        if nprobe is None and (self.live <= self.exact_max or int(allowed.sum()) <= self.exact_max):
            slots = None if self._is_dense(allowed) else np.flatnonzero(allowed)
            return self._best(query, slots, self._quick(query, slots), allowed, k)
        slots, quick = self._probed(query, allowed, k, nprobe)
        return self._best(query, slots, quick, allowed, k)

    def exact(self, vector: Floats, k: int, *, filter: Filter | None = None) -> Found:
        """Return the result of a search that compares all rows."""
        return dataclasses.replace(self, exact_max=self.count).search(vector, k, filter=filter)

    @property
    def _step(self) -> int:
        """Number of rows compared in one step."""
        return max(1, _CHUNK_CELLS // self.collection.dimensions)

    def _is_dense(self, allowed: npt.NDArray[np.bool_]) -> bool:
        """Return whether comparing all rows is cheaper than selecting some."""
        return 2 * int(allowed.sum()) > self.count

    def _usual_nprobe(self, k: int) -> int:
        return min(max(_NPROBE_MIN, k), _NPROBE_MAX)

    def _probed(
        self, query: Floats, allowed: npt.NDArray[np.bool_], k: int, nprobe: int | None
    ) -> tuple[Slots, Floats]:
        """Return the allowed rows of the nearest lists, and their quick scores."""
        order, bounds = self._ordered(query)
        count, slots = self._nearest(order, allowed, k, self._usual_nprobe(k) if nprobe is None else nprobe)
        quick = self._quick(query, slots)
        if nprobe is None and count < len(order):
            bound = np.partition(quick, k - 1)[k - 1]
            rest = order[count:]
            rows_max = _NPROBE_MAX * self.live // len(self.lists) - len(slots)
            more = self._rows_of(rest[bounds[rest] < bound], allowed, rows_max)
            slots, quick = np.concatenate((slots, more)), np.concatenate((quick, self._quick(query, more)))
        return slots, quick

    def _ordered(self, query: Floats) -> tuple[Slots, Floats]:
        """Return the lists, most promising first, and a bound on the score of the best row of each."""
        length = float(np.sqrt(query.astype(np.float64) @ query))
        if self.collection.metric is Metric.DOT:
            far = -(self.centroids @ query)
            reach = np.float32(length) * self.radii
            return np.argsort(far, kind="stable"), far - _PROBE_MARGIN_DOT * reach
        far = distances(query[None, :], self.centroids)[0] if len(self.lists) else self.radii
        apart = np.sqrt(np.maximum(far + np.float32(length**2), 0))
        return np.argsort(far, kind="stable"), far + self.radii * (self.radii - 2 * _PROBE_MARGIN * apart)

    def _nearest(
        self, order: Slots, allowed: npt.NDArray[np.bool_], k: int, nprobe: int
    ) -> tuple[int, Slots]:
        """Take lists in this order until `nprobe` are non-empty and `k` rows are found. Return their
        number and rows."""
        taken, filled, begin = [np.empty(0, np.int64)], 0, 0
        while begin < len(order) and (filled < nprobe or sum(map(len, taken)) < k):
            # Filters may leave most lists empty, so examine more lists in each round.
            places = order[begin : begin + max(nprobe, begin)]
            slots, counts = self._allowed_rows(places, allowed)
            enough = (filled + np.cumsum(counts > 0) >= nprobe) & (
                sum(map(len, taken)) + np.cumsum(counts) >= k
            )
            used = int(enough.argmax()) + 1 if enough.any() else len(places)
            taken.append(slots[: int(counts[:used].sum())])
            filled += int((counts[:used] > 0).sum())
            begin += used
        return begin, np.concatenate(taken)

    def _rows_of(self, places: Slots, allowed: npt.NDArray[np.bool_], rows_max: int) -> Slots:
        """Return the allowed rows of the first of these lists, at most `rows_max` rows in total."""
        slots, counts = self._allowed_rows(places, allowed)
        return slots[: int(counts[np.cumsum(counts) <= rows_max].sum())]

    def _allowed_rows(self, places: Slots, allowed: npt.NDArray[np.bool_]) -> tuple[Slots, Slots]:
        """Return the allowed rows of these lists, list by list, and their number in each."""
        lists = [self.lists[place] for place in places.tolist()]
        slots = np.concatenate([np.empty(0, np.int64), *lists])
        kept = allowed[slots]
        owners = np.repeat(np.arange(len(lists)), [len(one) for one in lists])
        return slots[kept], np.bincount(owners[kept], minlength=len(lists))

    def _best(
        self, query: Floats, slots: Slots | None, quick: Floats, allowed: npt.NDArray[np.bool_], k: int
    ) -> Found:
        """Return the best of these rows, or of all allowed ones.

        A fast pass in 32-bit floats excludes the rows that cannot be among the best, given its error bound.
        The rest is computed again in 64 bits.
        """
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
        """Return fast, approximate scores. Lower is better for every metric."""
        if slots is not None and _PICKING * len(slots) > self.count:
            scores: Floats = self._quick(query, None)[slots]
            return scores
        count = self.count if slots is None else len(slots)
        made = np.empty(count, np.float32)
        step = self._step if slots is None else max(1, _PICKED_CELLS // self.collection.dimensions)
        for begin in range(0, count, step):
            part = slice(begin, min(begin + step, count))
            picked = part if slots is None else slots[part]
            # `take` is twice as fast as indexing.
            rows = self.matrix[part] if slots is None else np.take(self.matrix, slots[part], axis=0)
            products = rows @ query
            if self.collection.metric is Metric.DOT:
                np.negative(products, out=made[part])
            else:
                np.subtract(self.squares[picked], 2.0 * products, out=made[part])
        return made

    def _error(self, query: Floats, slots: Slots) -> float:
        """Return the error bound of a fast score."""
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


_WASTE_MIN: Final = 1024
"""Minimum number of unused rows that justifies copying all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Limits of exact searches and of the sizes of posting lists."""

    exact_max: int = 50_000
    split_at: int = 150
    merge_below: int = 50


class IdBlocks:
    """Allocator of unused ids, in blocks. Each block is stored in the batch that first uses it."""

    def __init__(self, next_id: int) -> None:
        self._next = self._end = next_id
        self._changed = False

    def take(self, count: int = 1) -> int:
        """Return the first of `count` consecutive new ids."""
        first, self._next = self._next, self._next + count
        while self._next > self._end:
            self._end += BLOCK_SIZE
            self._changed = True
        return first

    def skip_past(self, last: int) -> None:
        """Continue with the block after the id `last`, because the end of the stored block is unknown."""
        self._next = self._end = (last // BLOCK_SIZE + 1) * BLOCK_SIZE
        self._changed = True

    @property
    def next_id(self) -> int:
        return self._next

    def take_block(self) -> tuple[int, int] | None:
        """Return the base and size of the newest block if it was started since the last call."""
        changed, self._changed = self._changed, False
        return (self._end - BLOCK_SIZE, BLOCK_SIZE) if changed else None


@dataclass(slots=True, kw_only=True)
class IndexState:
    """Mutable state of the index. Only the flusher changes it, from one thread at a time."""

    collection: Collection
    tuning: Tuning
    rows: Rows
    partition: InvertedLists
    data_ids: IdBlocks
    centroid_ids: IdBlocks
    slot_of: dict[str, int] = field(default_factory=dict)
    """Slot of each external id."""
    dead: BitMap64 = field(default_factory=BitMap64)
    """Deleted ids that are still in a posting list."""
    position: Position | None = None
    lost: dict[str, int | None] = field(default_factory=dict)
    """External ids of vectors without an undamaged copy, with their internal ids if known."""
    damage: Damage | None = None
    """Damage found when opening, if any."""
    repairs: list[Operation] = field(default_factory=list)
    """Operations that repair damaged records, in addition to the changes of the lists."""

    @classmethod
    def empty(
        cls, collection: Collection, tuning: Tuning, *, next_id: int = 0, next_centroid: int = CENTROID_LEVEL
    ) -> IndexState:
        centroid_ids = IdBlocks(next_centroid)
        partition = InvertedLists(
            split_at=tuning.split_at, merge_below=tuning.merge_below, new_id=centroid_ids.take
        )
        return cls(
            collection=collection,
            tuning=tuning,
            rows=Rows(collection),
            partition=partition,
            data_ids=IdBlocks(next_id),
            centroid_ids=centroid_ids,
        )

    def index(self) -> Index:
        """Return an immutable view of the state."""
        rows, lists = self.rows, self.partition.lists
        centroids = (
            self.partition.centroids()[1] if lists else np.empty((0, self.collection.dimensions), np.float32)
        )
        fields = self.collection.indexed
        return Index(
            collection=self.collection,
            exact_max=self.tuning.exact_max,
            count=rows.count,
            live=len(self.slot_of),
            matrix=rows.matrix,
            squares=rows.squares,
            ids=rows.ids,
            alive=rows.alive,
            names=rows.names,
            columns={
                name: IndexedColumn(column.codes, column.code_of, fields[name].type)
                for name, column in rows.columns.items()
            },
            centroids=centroids,
            lists=[one.slots for one in lists.values()],
            radii=np.array([one.radius(rows) for one in lists.values()], np.float32),
        )

    def compact(self) -> None:
        """Free the memory of rows that are in no list, if they are most of the rows."""
        wasted = self.rows.wasted
        if wasted < _WASTE_MIN or 2 * wasted < self.rows.count:
            return
        self.rows, places = self.rows.compacted()
        self.partition.moved(places)
        self.slot_of = {name: int(places[slot]) for name, slot in self.slot_of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The share of the `k` best results that searches find, over `sample` queries."""

    recall: float
    k: int
    sample: int
    vectors: int
    """Number of vectors in the collection."""


@dataclass(slots=True)
class Tally:
    """Counts of found and expected hits."""

    found: int = 0
    wanted: int = 0

    @property
    def share(self) -> float:
        """Share of expected hits that were found, or 1 if none was expected."""
        return self.found / self.wanted if self.wanted else 1.0


def sampled(index: Index, sample: int) -> Slots:
    """Return a uniform sample of live rows. It is deterministic for an index."""
    living = np.flatnonzero(index.alive[: index.count])
    rng = np.random.default_rng(0)
    return rng.choice(living, min(sample, len(living)), replace=False)


def compare(
    index: Index, slot: int, k: int, *, filter: Filter | None = None, nprobe: int | None = None
) -> Tally:
    """Search for one row with the lists and exactly, and compare the results."""
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
    """Return the `k` best results other than the row itself."""
    others = found.slots != slot
    return Found(found.slots[others][:k], found.scores[others][:k])
