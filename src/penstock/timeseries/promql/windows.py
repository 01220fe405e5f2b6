"""Samples of many series in one flat buffer, and the windows of it that each step looks at.

A window is open at the left: `(end - range, end]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.timeseries.arrays import Floats, Integers, Mask, Times
from penstock.timeseries.model import Labels, is_stale
from penstock.timeseries.promql.vectors import Vectors, merged

__all__ = ["Block", "Rows", "Windows", "latest"]

_BLOCK_CELLS_MAX: Final = 1 << 20
_PIECE_ITEMS_MAX: Final = 1 << 25
"""What numpy reduces in some hundredths of a second, between two looks at the time."""
_KEY_MAX: Final = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Series one behind the other: row `i` is `bounds[i]` to `bounds[i + 1]` of both buffers, in order."""

    labels: Sequence[Labels]
    bounds: Integers
    timestamps: Times
    values: Floats

    @classmethod
    def of(cls, series: Sequence[tuple[Labels, Times, Floats]]) -> Rows:
        """Rows sorted by their labels."""
        ordered = sorted(series, key=lambda one: one[0])
        counts = [len(timestamps) for _, timestamps, _ in ordered]
        return cls(
            [labels for labels, _, _ in ordered],
            np.concatenate(([0], np.cumsum(counts, dtype=np.intp))).astype(np.intp),
            np.concatenate([np.empty(0, np.int64), *(one[1] for one in ordered)]),
            np.concatenate([np.empty(0), *(one[2] for one in ordered)]),
        )

    def without_stale(self) -> Rows:
        """Without the markers: a range sees samples only."""
        kept = ~is_stale(self.values)
        if bool(kept.all()):
            return self
        before = np.concatenate(([0], np.cumsum(kept))).astype(np.intp)
        return Rows(self.labels, before[self.bounds], self.timestamps[kept], self.values[kept])

    def positions(self, times: Times) -> Integers:
        """For each row and time, where in the buffers its first sample after that time stands."""
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
        """All rows in one search: a row's number makes the high part of the key, the time the low part."""
        first, last = int(self.bounds[rows.start]), int(self.bounds[rows.stop])
        counts = np.diff(self.bounds[rows.start : rows.stop + 1])
        offsets = np.arange(len(rows), dtype=np.int64) * reach
        keys = np.repeat(offsets, counts) + (self.timestamps[first:last] - low)
        wanted = offsets[:, None] + np.clip(times - low, -1, reach - 1)
        return first + np.searchsorted(keys, wanted, side="right")


def latest(rows: Rows, times: Times, lookback_ms: int) -> tuple[Vectors, Times]:
    """The last sample of each row in `(time - lookback, time]`, and its timestamp.

    A row whose last sample is a stale marker has no value there.
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
    """Some windows side by side: column `j` holds window `j`, its samples first, then nothing.

    Where `inside` is false, `values` is 0 and `seconds` means nothing. `seconds` counts from the
    window's end.
    """

    values: Floats
    seconds: Floats
    inside: Mask
    counts: Floats
    steps: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """For each row and step a slice `low[row, step]` to `high[row, step]` of the rows' buffers."""

    rows: Rows
    ends: Times
    range_ms: int
    low: Integers
    high: Integers
    check: Callable[[], None]
    """Called between pieces of work; raises when it has to end."""

    @classmethod
    def over(cls, rows: Rows, ends: Times, range_ms: int, check: Callable[[], None]) -> Windows:
        """Windows of `range_ms` that end at `ends`, over samples without stale markers."""
        return cls(rows, ends, range_ms, rows.positions(ends - range_ms), rows.positions(ends), check)

    @property
    def counts(self) -> Integers:
        return self.high - self.low

    def at(self, index: Integers) -> tuple[Times, Floats]:
        """Timestamp and value at a place in the buffers; places outside give those of the nearest one."""
        if not len(self.rows.values):
            return np.zeros(index.shape, np.int64), np.zeros(index.shape)
        inside = np.clip(index, 0, len(self.rows.values) - 1)
        return self.rows.timestamps[inside], self.rows.values[inside]

    def vectors(self, values: Floats, present: Mask, *, keep_name: bool = False) -> Vectors:
        """The answer of a function: a value per window, without the metric's name unless it is kept."""
        found = Vectors(self.rows.labels, values, present).compact()
        if keep_name:
            return found
        return merged([labels.without_name() for labels in found.labels], found.values, found.present)

    def fold(self, function: Callable[[Block], Floats], count_min: int = 1) -> Vectors:
        """`function` over every window of at least `count_min` samples."""
        counts = self.counts
        present = counts >= count_min
        values = np.zeros(counts.shape)
        for row, step, block in self._blocks(present):
            self.check()
            with np.errstate(all="ignore"):
                values[row, step] = function(block)
        return self.vectors(values, present)

    def reduce(self, ufunc: np.ufunc, items: Floats, low: Integers, high: Integers) -> Floats:
        """`ufunc` over `items[low:high]` of every window where that is not empty, 0 elsewhere."""
        values = np.zeros(low.shape)
        some = high > low
        edges = np.stack((low[some], high[some]), axis=1)
        reduced = np.empty(len(edges))
        padded = np.append(items, 0.0)  # an end may stand behind the last item
        for piece in _pieces(edges[:, 1] - edges[:, 0]):
            self.check()
            with np.errstate(all="ignore"):
                reduced[piece] = ufunc.reduceat(padded, edges[piece].ravel())[::2]
        values[some] = reduced
        return values

    def _blocks(self, present: Mask) -> Iterator[tuple[Integers, Integers, Block]]:
        """Windows in pieces of bounded size, those of like size together so that little is padding."""
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
    """Neighbours whose work, added up, is bounded; one whose own is more stands alone."""
    done = np.cumsum(work)
    first = 0
    while first < len(work):
        before = int(done[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(done, before + _PIECE_ITEMS_MAX, side="right")))
        yield slice(first, last)
        first = last
