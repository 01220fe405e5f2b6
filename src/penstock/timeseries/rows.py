"""Samples of many series side by side: three arrays instead of an object for each series.

A block holds the samples that one flush brought to one bucket, in one record:

    version u8 = 1 | count u32 | zstd of (series ids u32, timestamps i64, values f64)

Ids and timestamps are stored as differences to the row before; all numbers are little-endian, and rows are
sorted by id and time, with one row for each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import cramjam
import numpy as np
import numpy.typing as npt

from penstock.errors import Corrupt
from penstock.timeseries.arrays import Floats, Times
from penstock.timeseries.model import Samples

__all__ = ["ROW_BYTES", "Ids", "Rows", "decode_block", "encode_block"]

Ids: TypeAlias = npt.NDArray[np.uint32]

ROW_BYTES: Final = 20
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BI")
_LEVEL: Final = 1
_COUNT_MAX: Final = 2**26
"""More rows than any flush holds: a damaged count must not take memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Series id, timestamp and value of each sample, all three of one length."""

    ids: Ids
    timestamps: Times
    values: Floats

    @classmethod
    def empty(cls) -> Rows:
        return cls(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.float64))

    @classmethod
    def joined(cls, parts: Iterable[Rows]) -> Rows:
        """All of them, in the order of writing."""
        rows = list(parts)
        if len(rows) < 2:
            return rows[0] if rows else cls.empty()
        return cls(
            np.concatenate([part.ids for part in rows]),
            np.concatenate([part.timestamps for part in rows]),
            np.concatenate([part.values for part in rows]),
        )

    @classmethod
    def of_series(cls, ids: Sequence[int], samples: Sequence[Samples]) -> Rows:
        """Rows of whole series."""
        counts = np.fromiter(map(len, samples), np.int64, len(samples))
        joined = Samples.joined(samples)
        repeated: Ids = np.repeat(np.array(ids, np.uint32), counts)
        return cls(repeated, joined.timestamps, joined.values)

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, wanted: Ids) -> Rows:
        """Only those of the ids in `wanted`, which are sorted."""
        if not len(wanted):
            return Rows.empty()
        place = np.searchsorted(wanted, self.ids)
        place[place == len(wanted)] = 0
        return self._kept(wanted[place] == self.ids)

    def between(self, start_ms: int, end_ms: int) -> Rows:
        """Only those with `start_ms <= timestamp <= end_ms`."""
        return self._kept((self.timestamps >= start_ms) & (self.timestamps <= end_ms))

    def in_order(self) -> Rows:
        """Sorted by id and time, with one row for each: the one written last."""
        ids, times = self.ids, self.timestamps
        rising = (ids[1:] > ids[:-1]) | ((ids[1:] == ids[:-1]) & (times[1:] > times[:-1]))
        if bool(rising.all()):
            return self
        order = np.lexsort((times, ids))  # stable: of equal ones the last written is last
        ids, times = ids[order], times[order]
        last = np.append((ids[1:] != ids[:-1]) | (times[1:] != times[:-1]), True)
        return Rows(ids[last], times[last], self.values[order][last])

    def by_series(self) -> tuple[list[int], list[Samples]]:
        """The ids and the samples of each, of rows in order."""
        if not len(self):
            return [], []
        begins = np.flatnonzero(np.append(True, self.ids[1:] != self.ids[:-1]))
        bounds = [*begins.tolist(), len(self)]
        samples = [
            Samples(self.timestamps[low:high], self.values[low:high]) for low, high in pairwise(bounds)
        ]
        return self.ids[begins].tolist(), samples

    def _kept(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        if bool(chosen.all()):
            return self
        return Rows(self.ids[chosen], self.timestamps[chosen], self.values[chosen])


def encode_block(rows: Rows) -> bytes:
    """Rows in order, as one record."""
    ids = np.diff(rows.ids, prepend=np.uint32(0)).astype("<u4", copy=False)
    times = np.diff(rows.timestamps, prepend=np.int64(0)).astype("<i8", copy=False)
    plain = ids.tobytes() + times.tobytes() + rows.values.astype("<f8", copy=False).tobytes()
    return _HEAD.pack(_VERSION, len(rows)) + bytes(cramjam.zstd.compress(plain, _LEVEL))


def decode_block(value: bytes) -> Rows:
    """The rows of a record. Raises `Corrupt` if it breaks the format."""
    try:
        version, count = _HEAD.unpack_from(value)
        if version != _VERSION:
            raise Corrupt(f"a block of samples has the version {version}, which is not known")
        if count > _COUNT_MAX:
            raise Corrupt(f"a block of samples claims to hold {count:,} of them")
        plain = bytearray(count * ROW_BYTES)  # no block unpacks to more than it claims
        size = cramjam.zstd.decompress_into(value[_HEAD.size :], plain) if count else 0
    except (struct.error, cramjam.DecompressionError) as error:
        raise Corrupt(f"a block of samples breaks its format: {error}") from None
    if size != len(plain):
        raise Corrupt(f"a block of {count} samples holds {size} bytes")
    ids = np.cumsum(np.frombuffer(plain, "<u4", count), dtype=np.uint32)
    times = np.cumsum(np.frombuffer(plain, "<i8", count, count * 4), dtype=np.int64)
    return Rows(ids, times, np.frombuffer(plain, "<f8", count, count * 12).astype(np.float64, copy=False))
