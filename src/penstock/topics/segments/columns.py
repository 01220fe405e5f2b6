"""The locations of records with consecutive sequence numbers, as one fixed-size row each.

A row has the 20 bytes of a segment's index entry. A run of rows is therefore either a segment's index file,
or a buffer of the same layout that grows as records are written. In a growing buffer, offsets point into log
files or memory chunks, and `file_of` returns the file of a row. The bytes themselves are in memory, or in a
file that is read as needed.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.storage import Buffer, FileView
from penstock.topics.segments.format import (
    HAS_META,
    HAS_NODE,
    HAS_TAG,
    HOLE,
    IDX_DTYPE,
    IDX_STRIDE,
    LOST,
    IndexRows,
)

DELETED: Final = 0x80
"""A flag that exists only in memory: the record was removed. On disk, the `.del` sidecar stores this."""
DAMAGED: Final = LOST
"""The record was acknowledged and cannot be read. It counts as live until it is deleted or evicted."""
DEAD: Final = DELETED | HOLE
"""The flags of rows that are not live records."""
NO_FRAME: Final = HOLE | DAMAGED
"""The flags of rows that have no bytes to read."""

ROW = struct.Struct("<IIQI")
"""offset, length, ts, flags | overhead << 8."""

_KEPT: Final = HAS_TAG | HAS_NODE | HAS_META | HOLE | DAMAGED
_FLAGS_AT: Final = 16
NO_FILE: Final = -1
"""The file of rows without bytes."""

_ROWS_MIN: Final = 16
_NO_ROWS: Final = bytes(IDX_STRIDE)

Lengths: TypeAlias = npt.NDArray[np.uint32]
Times: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.uint8]
Places: TypeAlias = npt.NDArray[np.int64]
"""Row numbers within one run."""


def pack_row(offset: int, length: int, ts_ms: int, flags: int, overhead: int) -> bytes:
    """Encode one row. `overhead` is the frame length minus the record's accounted bytes."""
    return ROW.pack(offset, length, ts_ms, flags | overhead << 8)


class Columns:
    """The rows of `first_seq` to `end_seq - 1`. The owning index maintains `live` and `live_bytes`.

    The run of a segment has `segment` set, and all its rows are in one file. `source` belongs to the owner.
    """

    __slots__ = (
        "_flags",
        "_rows",
        "_spans",
        "changed",
        "count",
        "first_seq",
        "live",
        "live_bytes",
        "segment",
        "source",
    )

    def __init__(self, first_seq: int, *, segment: bool = False, source: object = None) -> None:
        self.first_seq = first_seq
        self.count = 0
        self.segment = segment
        self.source = source
        self.changed = False
        """Whether a flag was set since the owner last cleared this."""
        self.live = 0
        self.live_bytes = 0
        self._rows: Buffer = _NO_ROWS
        self._flags: bytearray | None = None
        self._spans: list[tuple[int, int]] = []

    @classmethod
    def of_segment(cls, first_seq: int, rows: Buffer | IndexRows, *, source: object = None) -> Columns:
        """Return the run of a segment whose index entries are `rows`, without copying or changing them."""
        run = cls(first_seq, segment=True, source=source)
        plain = (
            np.ascontiguousarray(rows).view("u1").data if isinstance(rows, np.ndarray) else memoryview(rows)
        )
        run.count = len(plain) // IDX_STRIDE
        run._rows = plain.toreadonly() if run.count else _NO_ROWS
        run._spans = [(0, 0)]
        run.recount()
        return run

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        kind = "segment" if self.segment else "log"
        return f"<Columns {kind} {self.first_seq}..{self.end_seq - 1} live={self.live}>"

    @property
    def end_seq(self) -> int:
        """Return the sequence number after the last row."""
        return self.first_seq + self.count

    @property
    def offset(self) -> Lengths:
        """Return the offset of each frame in its file."""
        return np.ndarray(self.count, "<u4", self._rows, 0, IDX_STRIDE)

    @property
    def length(self) -> Lengths:
        """Return the length of each frame, including its length field."""
        return np.ndarray(self.count, "<u4", self._rows, 4, IDX_STRIDE)

    @property
    def ts(self) -> Times:
        return np.ndarray(self.count, "<u8", self._rows, 8, IDX_STRIDE)

    @property
    def flags(self) -> Flags:
        """Return the current flags. Change them only through `mark`."""
        if self._flags is not None:
            return np.frombuffer(self._flags, "u1")
        return np.ndarray(self.count, "u1", self._rows, _FLAGS_AT, IDX_STRIDE)

    @property
    def overhead(self) -> Lengths:
        packed: Lengths = np.ndarray(self.count, "<u4", self._rows, _FLAGS_AT, IDX_STRIDE)
        return packed >> np.uint32(8)

    def accounted(self, start: int, stop: int) -> Lengths:
        """Return the accounted bytes of rows `start` to `stop - 1`, including dead rows."""
        if start >= stop:
            return np.zeros(0, np.uint32)
        at = start * IDX_STRIDE
        length: Lengths = np.ndarray(stop - start, "<u4", self._rows, at + 4, IDX_STRIDE)
        packed: Lengths = np.ndarray(stop - start, "<u4", self._rows, at + _FLAGS_AT, IDX_STRIDE)
        return length - (packed >> np.uint32(8))

    def is_live(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of the rows `start` to `stop - 1` are live records."""
        alive: npt.NDArray[np.bool_] = (self.flags[start:stop] & np.uint8(DEAD)) == 0
        return alive

    def row(self, place: int) -> tuple[int, int, int, int, int]:
        """Return offset, length, ts, flags and overhead of one row."""
        offset, length, ts, packed = ROW.unpack_from(self._rows, place * IDX_STRIDE)
        return offset, length, ts, self.flag(place), packed >> 8

    def flag(self, place: int) -> int:
        """Return the flags of one row."""
        if self._flags is not None:
            return self._flags[place]
        return self._rows[place * IDX_STRIDE + _FLAGS_AT]

    def mark(self, places: Places | int, flag: int) -> None:
        """Set a flag on these rows. The buffer of a segment's index is not changed."""
        self.changed = True
        if isinstance(places, int):
            if isinstance(self._rows, bytearray):
                self._rows[place_of_flags(places)] |= flag
            else:
                self._own_flags()[places] |= flag
        elif len(places):
            if not isinstance(self._rows, bytearray):
                self._own_flags()
            self.flags[places] |= np.uint8(flag)

    def _own_flags(self) -> bytearray:
        if self._flags is None:
            self._flags = bytearray(self.flags.tobytes())
        return self._flags

    def append_row(self, file: int, offset: int, length: int, ts_ms: int, flags: int, overhead: int) -> None:
        """Append a row. Not allowed for the run of a segment."""
        rows = self._room(1)
        self._enter(file)
        ROW.pack_into(rows, self.count * IDX_STRIDE, offset, length, ts_ms, flags | overhead << 8)
        self.count += 1

    def append_rows(self, file: int, base: int, rows: Buffer) -> None:
        """Append rows whose offsets are relative to `base` of a file.

        Not allowed for the run of a segment.
        """
        added = len(rows) // IDX_STRIDE
        target = self._room(added)
        self._enter(file)
        start = self.count * IDX_STRIDE
        if added == 1:
            offset, length, ts_ms, packed = ROW.unpack(rows)
            ROW.pack_into(target, start, offset + base, length, ts_ms, packed)
            self.count += 1
            return
        target[start : start + added * IDX_STRIDE] = rows
        moved: Lengths = np.ndarray(added, "<u4", target, start, IDX_STRIDE)
        moved += np.uint32(base)
        self.count += added

    def append_part(self, other: Columns, start: int, stop: int) -> None:
        """Append rows `start` to `stop - 1` of another run, with their flags and files."""
        for at, file in list(other._spans_between(start, stop)):
            end = min(other.file_of(at)[1], stop)
            before = self.count
            self.append_rows(file, 0, memoryview(other._rows)[at * IDX_STRIDE : end * IDX_STRIDE])
            if other._flags is not None:
                self.flags[before:] = other.flags[at:end]

    def _room(self, added: int) -> bytearray:
        assert not self.segment, "a segment's rows never change"
        rows = self._rows
        wanted = (self.count + added) * IDX_STRIDE
        if isinstance(rows, bytearray) and len(rows) >= wanted:
            return rows
        # Allocate a new buffer instead of resizing, because views of the old one may still be in use.
        grown = bytearray(max(wanted, 2 * len(rows), _ROWS_MIN * IDX_STRIDE))
        grown[: self.count * IDX_STRIDE] = memoryview(rows)[: self.count * IDX_STRIDE]
        self._rows = grown
        return grown

    def _enter(self, file: int) -> None:
        if not self._spans or self._spans[-1][1] != file:
            self._spans.append((self.count, file))

    def file_of(self, place: int) -> tuple[int, int]:
        """Return the file of one row, and the first later row in another file, or the end."""
        spans = self._spans
        if place >= spans[-1][0]:
            return spans[-1][1], self.count
        at = bisect_right(spans, place, key=_start_of) - 1
        return spans[at][1], spans[at + 1][0]

    def files(self, from_place: int = 0) -> list[int]:
        """Return the files that rows from `from_place` on point into, in order of the rows."""
        return [file for _, file in self._spans_between(from_place, self.count)]

    @property
    def file(self) -> Places:
        """Return the file of every row."""
        starts = np.array([at for at, _ in self._spans], np.int64)
        sizes = np.diff(starts, append=np.int64(self.count))
        return np.repeat(np.array([file for _, file in self._spans], np.int64), sizes)

    def part(self, first_seq: int, last_seq: int) -> Columns:
        """Copy the log rows of `first_seq` to `last_seq`, including flags."""
        copied = Columns(first_seq, source=self.source)
        copied.append_part(self, first_seq - self.first_seq, last_seq + 1 - self.first_seq)
        copied.recount()
        return copied

    def _spans_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        while start < stop:
            file, after = self.file_of(start)
            yield start, file
            start = after

    def index_rows(self) -> IndexRows:
        """Copy the rows as index entries, without the flags that exist only in memory."""
        rows = np.frombuffer(bytearray(memoryview(self._rows)[: self.count * IDX_STRIDE]), IDX_DTYPE)
        rows["flags"] = self.flags & np.uint8(_KEPT)
        return rows

    def recount(self, below_seq: int = 0) -> None:
        """Recompute `live` and `live_bytes` from the rows at or above `below_seq`."""
        start = min(max(below_seq - self.first_seq, 0), self.count)
        alive = self.is_live(start, self.count)
        self.live = int(np.count_nonzero(alive))
        self.live_bytes = int(self.accounted(start, self.count)[alive].sum(dtype=np.uint64))

    def deleted_seqs(self) -> npt.NDArray[np.uint64]:
        """Return the sequence numbers of removed rows that have a frame, as stored in a `.del` sidecar."""
        removed = (self.flags & (DELETED | HOLE)) == DELETED
        return np.flatnonzero(removed).astype("<u8") + np.uint64(self.first_seq)


def place_of_flags(place: int) -> int:
    """Return the offset of the flags of one row in a buffer of rows."""
    return place * IDX_STRIDE + _FLAGS_AT


def _start_of(span: tuple[int, int]) -> int:
    return span[0]


StoredBytes: TypeAlias = memoryview | FileView
"""Stored bytes. A file view has zeros where it cannot be read, so frames from it need a checksum test."""

_DENSE: Final = 4
"""The ratio of range bytes to requested bytes up to which one large copy is cheaper than many small ones."""
_NEAR: Final = 4096
"""The gap between two frames up to which it is cheaper to read the gap than to read twice."""


def span(view: StoredBytes, start: int, stop: int) -> bytes:
    """Copy the bytes `start` to `stop - 1`."""
    return view.read(start, stop) if isinstance(view, FileView) else view[start:stop].tobytes()


def gather(view: StoredBytes, starts: Places, lengths: Places) -> tuple[bytes, Places]:
    """Copy these frames, at least one, into one buffer. Return it, and where each frame begins in it."""
    first, last = int(starts.min()), int((starts + lengths).max())
    if last - first <= _DENSE * int(lengths.sum()):
        return span(view, first, last), starts - first
    if isinstance(view, FileView):
        return _read_near(view, starts, lengths)
    spans = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return b"".join([view[start:stop] for start, stop in spans]), np.cumsum(lengths) - lengths


def _read_near(view: FileView, starts: Places, lengths: Places) -> tuple[bytes, Places]:
    """Read frames that are near each other with one read."""
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    far = begins[1:] - ends[:-1] > _NEAR
    lows = begins[np.concatenate(([True], far))]
    highs = ends[np.concatenate((far, [True]))]
    parts = [view.read(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
    moved = np.cumsum(highs - lows) - highs
    places = np.empty_like(starts)
    places[order] = begins + moved[np.concatenate(([0], np.cumsum(far)))]
    return b"".join(parts), places
