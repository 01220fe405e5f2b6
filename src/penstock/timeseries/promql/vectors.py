"""Values of an expression at every step: a vector of series, a number, or a string.

Presence is a separate mask, because NaN is an ordinary value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from penstock.timeseries.model import (
    LABEL_BYTES_MAX,
    SERIES_BYTES_MAX,
    Floats,
    Integers,
    Labels,
    Mask,
    Times,
    is_stale,
)
from penstock.timeseries.promql.limits import ExecutionError

SHORTEN: Final = "Use a shorter template or separator, or fewer sources"
SAME_LABELS = "vector cannot contain metrics with the same labelset"


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """An instant vector per step: a row per series, a column per step, and a mask of present values."""

    labels: Sequence[Labels]
    values: Floats
    present: Mask

    @classmethod
    def empty(cls, steps: int) -> Vectors:
        return cls((), np.empty((0, steps)), np.empty((0, steps), np.bool_))

    def rows(self, chosen: Integers | Sequence[int]) -> Vectors:
        """Return these rows, in this order."""
        index = np.asarray(chosen, np.intp)
        return Vectors([self.labels[row] for row in index.tolist()], self.values[index], self.present[index])

    def where(self, present: Mask) -> Vectors:
        """Return only the values in the mask, without rows that become empty."""
        return Vectors(self.labels, self.values, self.present & present).compact()

    def with_values(self, values: Floats) -> Vectors:
        """Replace the values and drop the metric's name, because they no longer belong to that metric."""
        return merged([labels.without_name() for labels in self.labels], values, self.present)

    def compact(self) -> Vectors:
        """Drop the rows that have no value at any step."""
        some = self.present.any(axis=1)
        return self if bool(some.all()) else self.rows(np.flatnonzero(some))


@dataclass(frozen=True, slots=True, eq=False)
class Scalars:
    """One number per step."""

    values: Floats


@dataclass(frozen=True, slots=True)
class Text:
    """A string, the same at every step."""

    value: str


Value: TypeAlias = Vectors | Scalars | Text


def group_by(keys: Sequence[Labels]) -> tuple[list[Labels], Integers]:
    """Return the distinct keys in order of appearance, and the group of each key."""
    numbers: dict[Labels, int] = {}
    groups = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.intp, len(keys))
    return list(numbers), groups


def rows_by_group(groups: Integers, count: int) -> list[Integers]:
    """Return the rows of each of `count` groups, in order."""
    if not count:
        return []
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.cumsum(np.bincount(groups, minlength=count))[:-1])


def merged(labels: Sequence[Labels], values: Floats, present: Mask, conflict: str = SAME_LABELS) -> Vectors:
    """Merge rows with the same labels. The result has no more cells than the input, which is already charged.

    Raises `ExecutionError` with `conflict` if two such rows have a value at the same step.
    """
    distinct, groups = group_by(labels)
    if len(distinct) == len(labels):
        return Vectors(labels, values, present)
    steps = values.shape[1]
    counts = np.zeros((len(distinct), steps), np.int64)
    np.add.at(counts, groups, present)
    if bool((counts > 1).any()):
        raise ExecutionError(conflict)
    joined = np.zeros((len(distinct), steps))
    row, step = np.nonzero(present)
    joined[groups[row], step] = values[row, step]
    return Vectors(distinct, joined, counts > 0)


_BLOCK_CELLS_MAX: Final = 1 << 20
_PIECE_ITEMS_MAX: Final = 1 << 25
"""Number of items to reduce between two checks of the time. It takes numpy a few hundredths of a second."""
_KEY_MAX: Final = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Concatenated series. Row `i` is `bounds[i]` to `bounds[i + 1]` of both buffers, in order."""

    labels: Sequence[Labels]
    bounds: Integers
    timestamps: Times
    values: Floats

    @classmethod
    def of(cls, series: Sequence[tuple[Labels, Times, Floats]]) -> Rows:
        """Create rows sorted by their labels."""
        ordered = sorted(series, key=lambda one: one[0])
        counts = [len(timestamps) for _, timestamps, _ in ordered]
        return cls(
            [labels for labels, _, _ in ordered],
            np.concatenate(([0], np.cumsum(counts, dtype=np.intp))).astype(np.intp),
            np.concatenate([np.empty(0, np.int64), *(one[1] for one in ordered)]),
            np.concatenate([np.empty(0), *(one[2] for one in ordered)]),
        )

    def without_stale(self) -> Rows:
        """Drop stale markers, because range functions use only samples."""
        kept = ~is_stale(self.values)
        if bool(kept.all()):
            return self
        before = np.concatenate(([0], np.cumsum(kept))).astype(np.intp)
        return Rows(self.labels, before[self.bounds], self.timestamps[kept], self.values[kept])

    def positions(self, times: Times) -> Integers:
        """Return, for each row and time, the position of its first sample after that time."""
        if not len(self.labels) or not len(self.timestamps):
            return np.zeros((len(self.labels), len(times)), np.intp)
        low = int(self.timestamps.min())
        reach = int(self.timestamps.max()) - low + 2
        parts = [
            self._positions(range(first, min(first + size, len(self.labels))), times, low, reach)
            for size in [max(1, _KEY_MAX // reach)]
            for first in range(0, len(self.labels), size)
        ]
        return np.concatenate(parts)

    def _positions(self, rows: range, times: Times, low: int, reach: int) -> Integers:
        """Search all rows in one pass, with keys whose high part is the row and whose low part is the
        time."""
        first, last = int(self.bounds[rows.start]), int(self.bounds[rows.stop])
        counts = np.diff(self.bounds[rows.start : rows.stop + 1])
        offsets = np.arange(len(rows), dtype=np.int64) * reach
        keys = np.repeat(offsets, counts) + (self.timestamps[first:last] - low)
        wanted = offsets[:, None] + np.clip(times - low, -1, reach - 1)
        return first + np.searchsorted(keys, wanted, side="right")


def latest(rows: Rows, times: Times, lookback_ms: int) -> tuple[Vectors, Times]:
    """Return the last sample of each row in `(time - lookback, time]`, and its timestamp.

    A row whose last sample is a stale marker has no value at that step.
    """
    after = rows.positions(times)
    shape = after.shape
    if not len(rows.timestamps):
        return Vectors.empty(shape[1]), np.empty((0, shape[1]), np.int64)
    last = after - 1
    found = last >= rows.bounds[:-1, None]
    last = np.maximum(last, 0)
    values, stamps = rows.values[last], rows.timestamps[last]
    present = found & (stamps > times - lookback_ms) & ~is_stale(values)
    some = np.flatnonzero(present.any(axis=1))
    vectors = Vectors(rows.labels, values, present)
    return (vectors, stamps) if len(some) == shape[0] else (vectors.rows(some), stamps[some])


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A group of windows as columns. Column `j` holds the samples of window `j`, followed by padding.

    Where `inside` is false, `values` is 0 and `seconds` is undefined. `seconds` is relative to the window's
    end.
    """

    values: Floats
    seconds: Floats
    inside: Mask
    counts: Floats
    steps: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Windows of samples: for each row and step, `low[row, step]` to `high[row, step]` of the rows'
    buffers."""

    rows: Rows
    ends: Times
    range_ms: int
    low: Integers
    high: Integers
    check: Callable[[], None]
    """Called between pieces of work. It raises to stop the work."""

    @classmethod
    def over(cls, rows: Rows, ends: Times, range_ms: int, check: Callable[[], None]) -> Windows:
        """Create windows of `range_ms` that end at `ends`. `rows` must not contain stale markers."""
        return cls(rows, ends, range_ms, rows.positions(ends - range_ms), rows.positions(ends), check)

    @property
    def counts(self) -> Integers:
        return self.high - self.low

    def at(self, index: Integers) -> tuple[Times, Floats]:
        """Return the timestamps and values at positions in the buffers. Positions outside are clamped."""
        if not len(self.rows.values):
            return np.zeros(index.shape, np.int64), np.zeros(index.shape)
        inside = np.clip(index, 0, len(self.rows.values) - 1)
        return self.rows.timestamps[inside], self.rows.values[inside]

    def vectors(self, values: Floats, present: Mask, *, keep_name: bool = False) -> Vectors:
        """Create the result of a function: a value per window. Drop the metric's name unless `keep_name`."""
        found = Vectors(self.rows.labels, values, present).compact()
        if keep_name:
            return found
        return merged([labels.without_name() for labels in found.labels], found.values, found.present)

    def fold(self, function: Callable[[Block], Floats], count_min: int = 1) -> Vectors:
        """Apply `function` to every window of at least `count_min` samples."""
        counts = self.counts
        present = counts >= count_min
        values = np.zeros(counts.shape)
        for row, step, block in self._blocks(present):
            self.check()
            with np.errstate(all="ignore"):
                values[row, step] = function(block)
        return self.vectors(values, present)

    def reduce(self, ufunc: np.ufunc, items: Floats, low: Integers, high: Integers) -> Floats:
        """Apply `ufunc` to `items[low:high]` of every window. The result is 0 where that is empty."""
        values = np.zeros(low.shape)
        some = high > low
        edges = np.stack((low[some], high[some]), axis=1)
        reduced = np.empty(len(edges))
        padded = np.append(items, 0.0)  # an end may be after the last item
        for piece in _pieces(edges[:, 1] - edges[:, 0]):
            self.check()
            with np.errstate(all="ignore"):
                reduced[piece] = ufunc.reduceat(padded, edges[piece].ravel())[::2]
        values[some] = reduced
        return values

    def _blocks(self, present: Mask) -> Iterator[tuple[Integers, Integers, Block]]:
        """Yield windows in blocks of bounded size. Windows of similar size share a block to limit the
        padding."""
        row, step = np.nonzero(present)
        counts = self.counts[row, step]
        order = np.argsort(counts, kind="stable")
        row, step, counts = row[order], step[order], counts[order]
        first = 0
        while first < len(row):
            width = int(counts[min(first + _BLOCK_CELLS_MAX // max(int(counts[first]), 1), len(row) - 1)])
            size = max(1, _BLOCK_CELLS_MAX // max(width, 1))
            piece = slice(first, first + size)
            yield row[piece], step[piece], self._block(row[piece], step[piece], counts[piece])
            first += size

    def _block(self, row: Integers, step: Integers, counts: Integers) -> Block:
        lane = np.arange(int(counts.max()))[:, None]
        inside = lane < counts
        timestamps, values = self.at(self.low[row, step] + lane)
        seconds = (timestamps - self.ends[step]) / 1000.0
        return Block(np.where(inside, values, 0.0), seconds, inside, counts.astype(np.float64), step)


def _pieces(work: Integers) -> Iterator[slice]:
    """Yield groups of neighbours with bounded total work. An item above the bound is a separate group."""
    done = np.cumsum(work)
    first = 0
    while first < len(work):
        before = int(done[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(done, before + _PIECE_ITEMS_MAX, side="right")))
        yield slice(first, last)
        first = last


def checked_labels(labels: Labels, maker: str) -> Labels:
    """Return `labels` if they could be stored. Raise `ExecutionError`, which names the limit, otherwise."""
    total = 0
    for name, value in labels:
        size = _size(name) + _size(value)
        if size > LABEL_BYTES_MAX:
            raise ExecutionError(
                f"{maker} makes label {name[:80]!r} too long: {size:,} bytes with its name; "
                f"at most {LABEL_BYTES_MAX:,} are allowed. {SHORTEN}"
            )
        total += size
    if total > SERIES_BYTES_MAX:
        raise ExecutionError(
            f"{maker} makes the labels of a series too long: {total:,} bytes; "
            f"at most {SERIES_BYTES_MAX:,} are allowed. {SHORTEN}"
        )
    return labels


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
