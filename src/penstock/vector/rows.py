"""Vectors in memory in comparable form: a row for each, and a column for every indexed field.

Rows are only appended, so the arrays together with a row count are an immutable state. Dead rows stay until
they are numerous enough to justify copying the live ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.vector.codec import Ids, index_value, normal
from penstock.vector.model import Collection, Floats, Metric, Scalar

Slots = npt.NDArray[np.int64]

_CHUNK_CELLS: Final = 4 * 1024**2
"""Number of distances computed in one step: 16 MiB."""
_PIECE_MAX: Final = 240_000
"""Number of multiplications that numpy performs on one core."""
_TOGETHER_MAX: Final = 32_000_000
"""Number of multiplications above which using all cores pays."""
_ROUNDS: Final = 6


def squares(rows: Floats) -> Floats:
    """Return the squared length of each row."""
    lengths: Floats = np.einsum("ij,ij->i", rows, rows)
    return lengths


def distances(rows: Floats, centroids: Floats) -> Floats:
    """Return the squared distances of all rows to all centroids, minus the squared length of the row.

    The missing term is the same for all distances of a row, so it does not change their order.
    """
    return squares(centroids)[None, :] - 2.0 * _products(rows, centroids)


def _products(rows: Floats, centroids: Floats) -> Floats:
    """Return the dot products of all pairs. Small products are computed in pieces on one core.

    Above the size of a piece, numpy's linear algebra uses all cores. On a busy machine, waiting for them
    takes longer than the work.
    """
    cells = centroids.size
    if not cells or len(rows) * cells > _TOGETHER_MAX:
        return rows @ centroids.T
    step = max(1, _PIECE_MAX // cells)
    if step >= len(rows):
        return rows @ centroids.T
    made = np.empty((len(rows), len(centroids)), np.float32)
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        np.matmul(rows[part], centroids.T, out=made[part])
    return made


def nearest(rows: Floats, centroids: Floats) -> Slots:
    """Return the index of the nearest centroid of each row."""
    found = np.empty(len(rows), np.int64)
    step = max(1, _CHUNK_CELLS // max(1, len(centroids)))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        found[part] = distances(rows[part], centroids).argmin(axis=1)
    return found


def halves(rows: Floats, *, smallest: int) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Split a group by 2-means. Return a mask of the second half, and the two centroids.

    If a half has fewer than `smallest` rows, split at the median along the line between the centroids, so
    that both lists have similar sizes. The seeds are the row farthest from the mean and the row farthest from
    that one, so the same rows are always split in the same way.
    """
    first = rows[_farthest(rows, rows.mean(axis=0))]
    centroids = np.stack((first, rows[_farthest(rows, first)]))
    second = np.zeros(len(rows), np.bool_)
    for _ in range(_ROUNDS):
        before, second = second, distances(rows, centroids).argmin(axis=1) == 1
        if not second.any() or second.all() or bool((before == second).all()):
            break
        centroids = _means(rows, second)
    if min(int(second.sum()), int((~second).sum())) < smallest:
        second = _middle_cut(rows, centroids)
        centroids = _means(rows, second)
    return second, centroids


def _farthest(rows: Floats, point: Floats) -> int:
    apart = rows - point
    return int(squares(apart).argmax())


def _means(rows: Floats, second: npt.NDArray[np.bool_]) -> Floats:
    return np.stack((rows[~second].mean(axis=0), rows[second].mean(axis=0))).astype(np.float32)


def _middle_cut(rows: Floats, centroids: Floats) -> npt.NDArray[np.bool_]:
    order = np.argsort(rows @ (centroids[1] - centroids[0]), kind="stable")
    second = np.zeros(len(rows), np.bool_)
    second[order[len(rows) // 2 :]] = True
    return second


Codes = npt.NDArray[np.int32]

NO_LIST: Final = -1
_FIRST_CAPACITY: Final = 1024
ABSENT: Final = -1


def comparable(vectors: Floats, metric: Metric) -> Floats:
    """Return vectors in comparable form. For cosine, normalise all but zero vectors."""
    if metric is not Metric.COSINE:
        return np.ascontiguousarray(vectors, dtype=np.float32)
    wide = vectors.astype(np.float64)
    lengths = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    lengths[lengths == 0] = 1.0
    return np.ascontiguousarray(wide / lengths[:, None], dtype=np.float32)


class Column:
    """The values of one indexed field: a code for each value, and the code of every row."""

    def __init__(self) -> None:
        self.codes: Codes = np.full(_FIRST_CAPACITY, ABSENT, np.int32)
        self.code_of: dict[bytes, int] = {}
        self.values: list[bytes] = []
        self.live: list[int] = []
        """Number of vectors with the value, by code."""
        self.stale: list[int] = []
        """Number of deleted ids in storage that had the value, by code."""
        self.merges: list[int] = []
        """Upper bound on the merges of the value's stored record since it was rewritten, by code."""

    def code(self, value: bytes) -> int:
        """Return the code of a value. Assign a new code if it has none."""
        code = self.code_of.get(value)
        if code is None:
            code = self.code_of[value] = len(self.values)
            self.values.append(value)
            self.live.append(0)
            self.stale.append(0)
            self.merges.append(0)
        return code

    def compacted(self, kept: Slots, capacity: int) -> Column:
        """Return the column for the rows `kept`, without unused values."""
        made = Column()
        recoded = np.full(len(self.values) + 1, ABSENT, np.int32)  # the last entry is for absent values
        for code, value in enumerate(self.values):
            if self.live[code]:
                recoded[code] = fresh = made.code(value)
                made.live[fresh], made.stale[fresh] = self.live[code], self.stale[code]
                made.merges[fresh] = self.merges[code]
        made.codes = np.full(capacity, ABSENT, np.int32)
        made.codes[: len(kept)] = recoded[self.codes[kept]]
        return made


class Rows:
    """All rows with their indexed attributes. Only the flusher changes them."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self.count = 0
        self.matrix: Floats = np.empty((_FIRST_CAPACITY, collection.dimensions), np.float32)
        self.squares: Floats = np.empty(_FIRST_CAPACITY, np.float32)
        self.ids: Ids = np.empty(_FIRST_CAPACITY, np.uint64)
        self.alive: npt.NDArray[np.bool_] = np.zeros(_FIRST_CAPACITY, np.bool_)
        self.home: Slots = np.full(_FIRST_CAPACITY, NO_LIST, np.int64)
        """Centroid id of each row's list, also for dead rows."""
        self.names: list[str] = []
        """External ids."""
        self.columns: dict[str, Column] = {name: Column() for name in collection.indexed}

    def append(self, ids: Ids, rows: Floats, names: Sequence[str], *, alive: bool = True) -> Slots:
        """Append rows, which must be in comparable form, and return their slots."""
        begin, end = self.count, self.count + len(ids)
        self._reserve(end)
        self.matrix[begin:end] = rows
        self.squares[begin:end] = squares(rows)
        self.ids[begin:end] = ids
        self.alive[begin:end] = alive
        self.home[begin:end] = NO_LIST
        for column in self.columns.values():
            column.codes[begin:end] = ABSENT
        self.names.extend(names)
        self.count = end
        return np.arange(begin, end, dtype=np.int64)

    def describe(self, slots: Slots, attributes: Iterable[Mapping[str, Scalar]]) -> None:
        """Set the indexed attributes of rows that were just appended."""
        kinds = {name: one.type for name, one in self._collection.indexed.items()}
        for slot, named in zip(slots.tolist(), attributes, strict=True):
            for name, kind in kinds.items():
                if name in named:
                    column = self.columns[name]
                    code = column.code(index_value(normal(named[name], kind)))
                    column.codes[slot] = code
                    column.live[code] += 1

    def die(self, slots: Slots) -> None:
        """Mark rows as dead. They stay in their lists."""
        # Copy the array, because readers of the old one must still see these rows.
        self.alive = self.alive.copy()
        self.alive[slots] = False
        for column in self.columns.values():
            for code in column.codes[slots].tolist():
                if code != ABSENT:
                    column.live[code] -= 1
                    column.stale[code] += 1

    @property
    def wasted(self) -> int:
        """Number of rows that are in no list."""
        return int((self.home[: self.count] == NO_LIST).sum())

    def compacted(self) -> tuple[Rows, Slots]:
        """Copy the rows that are in a list to new arrays. Return them, and the new slot of each row or -1."""
        kept = np.flatnonzero(self.home[: self.count] != NO_LIST)
        moved = np.full(self.count, -1, np.int64)
        moved[kept] = np.arange(len(kept))
        made = Rows(self._collection)
        made.append(self.ids[kept], self.matrix[kept], [self.names[slot] for slot in kept.tolist()])
        made.alive[: len(kept)] = self.alive[kept]
        made.home[: len(kept)] = self.home[kept]
        for name, column in self.columns.items():
            made.columns[name] = column.compacted(kept, len(made.ids))
        return made, moved

    def _reserve(self, count: int) -> None:
        capacity = len(self.ids)
        if count <= capacity:
            return
        more = max(count, 2 * capacity) - capacity
        self.matrix = np.concatenate((self.matrix, np.empty((more, self.matrix.shape[1]), np.float32)))
        self.squares = np.concatenate((self.squares, np.empty(more, np.float32)))
        self.ids = np.concatenate((self.ids, np.empty(more, np.uint64)))
        self.alive = np.concatenate((self.alive, np.zeros(more, np.bool_)))
        self.home = np.concatenate((self.home, np.full(more, NO_LIST, np.int64)))
        for column in self.columns.values():
            column.codes = np.concatenate((column.codes, np.full(more, ABSENT, np.int32)))
