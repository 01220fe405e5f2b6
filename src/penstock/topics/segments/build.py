"""The conversion of log frames to segment frames.

The log frame and the segment frame of a record differ at the front. A segment belongs to one topic and holds
only records, so its frames omit type and topic, nine bytes. The rest is one contiguous part of the log frame,
after the last of the nine bytes is overwritten with the flags. All steps except cutting and checksums work on
many records together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import LimitExceeded
from penstock.topics.segments.columns import DAMAGED, DEAD, Columns, Lengths, Places, StoredBytes, gather
from penstock.topics.segments.format import (
    FRAME_BYTES_MIN,
    HAS_META,
    HAS_NODE,
    HAS_TAG,
    HOLE,
    IDX_DTYPE,
    LOST,
    IndexRows,
    checksums,
)

FRAME_SHRINKS_BY: Final = 9
"""How much shorter a record's segment frame is than its log frame."""

_KEPT: Final = HAS_TAG | HAS_NODE | HAS_META
_IN_FRAME: Final = HAS_TAG | HAS_NODE
_APPEND: Final = 1
_KIND_AT, _TOPIC_TOP_AT, _SEQ_AT, _TS_AT = 4, 13, 14, 22
_CHECKSUM_BYTES: Final = 8
_DATA_MAX: Final = 2**32 - 1
_BLOCK_ROWS: Final = 2048
"""The rows converted together: few enough that their pieces stay in the cache."""

_Flags: TypeAlias = npt.NDArray[np.uint8]
_Mask: TypeAlias = npt.NDArray[np.bool_]
_Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRows:
    """The bytes to append to a segment: `data` to its data file, `idx` to its index."""

    first_seq: int
    data: list[bytes]
    data_bytes: int
    idx: bytes
    lost: list[int]
    """Sequence numbers whose log frames are damaged. The index marks them as lost, not as holes."""

    @property
    def rows(self) -> IndexRows:
        return np.frombuffer(self.idx, IDX_DTYPE)

    @property
    def count(self) -> int:
        return len(self.idx) // IDX_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of one log file, as arrays of equal length."""

    seq: _Words
    start: Places
    length: Places
    ts: _Words
    flags: _Flags

    def where(self, mask: _Mask) -> _Block:
        return _Block(self.seq[mask], self.start[mask], self.length[mask], self.ts[mask], self.flags[mask])


def rows_that_fit(length: Lengths, *, events_left: int, bytes_left: int) -> int:
    """Return how many of the leading rows, given by their log frames, fit into the room of a segment."""
    sizes = np.maximum(length[: max(0, events_left)].astype(np.int64) - FRAME_SHRINKS_BY, 0)
    return int(np.searchsorted(np.cumsum(sizes), bytes_left, side="right"))


def build(
    rows: Columns, frames: Callable[[int], StoredBytes], *, data_offset: int = 0, verify: bool = True
) -> BuiltRows:
    """Build segment frames and index entries for these rows, at `data_offset` of the data file.

    `frames` returns the bytes of a log file by its number. Deleted records become holes. A sequence number is
    marked as lost if its frame is damaged or belongs to another record. `verify=False` skips the frames'
    checksums, for bytes that were just checked. Raises `LimitExceeded` if offsets would overflow.
    """
    flags = rows.flags
    wanted: _Mask = (flags & (DEAD | DAMAGED)) == 0
    sound = wanted.copy()
    pieces: list[bytes] = []
    for start, stop, file in _blocks(rows):
        places = start + np.flatnonzero(wanted[start:stop])
        if len(places):
            converted, sound[places] = _convert(_block(rows, places), frames(file), verify)
            pieces += converted
    lost: _Mask = ~sound & ((flags & DEAD) == 0)
    return BuiltRows(
        first_seq=rows.first_seq,
        data=pieces,
        data_bytes=sum(map(len, pieces)),
        idx=_index(rows, sound, lost, data_offset).tobytes(),
        lost=(rows.first_seq + np.flatnonzero(lost)).tolist(),
    )


def _blocks(rows: Columns) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of rows that are in one log file, with the file."""
    start = 0
    while start < rows.count:
        file, after = rows.file_of(start)
        stop = min(after, start + _BLOCK_ROWS)
        yield start, stop, file
        start = stop


def _block(rows: Columns, places: Places) -> _Block:
    return _Block(
        (rows.first_seq + places).astype(np.uint64),
        rows.offset[places].astype(np.int64),
        rows.length[places].astype(np.int64),
        rows.ts[places],
        rows.flags[places],
    )


def _index(rows: Columns, sound: _Mask, lost: _Mask, at: int) -> IndexRows:
    length = np.where(sound, rows.length.astype(np.int64) - FRAME_SHRINKS_BY, 0)
    ends = np.cumsum(length) + at
    if rows.count and int(ends[-1]) > _DATA_MAX:
        raise LimitExceeded(f"a segment cannot grow to {int(ends[-1])} bytes; seal it and start another")
    overhead = np.where(sound, rows.overhead.astype(np.int64) - FRAME_SHRINKS_BY, 0)
    flags = np.where(sound, rows.flags & _KEPT, np.where(lost, LOST, HOLE))
    idx = np.zeros(rows.count, IDX_DTYPE)
    idx["offset"] = np.where(sound, ends - length, 0)
    idx["length"] = length
    idx["ts"] = rows.ts
    idx["packed"] = flags | overhead << 8
    return idx


def _convert(block: _Block, view: StoredBytes, verify: bool) -> tuple[list[bytes], _Mask]:
    """Return the segment frames of the block, and which of its rows are sound. The others have no frame."""
    good: _Mask = (block.length >= FRAME_BYTES_MIN + FRAME_SHRINKS_BY) & (
        block.start + block.length <= len(view)
    )
    if not good.all():
        return _convert_those(block, good, view, verify)
    chunk, starts = gather(view, block.start, block.length)
    good = _are_expected(chunk, starts, block)
    if verify:
        good &= _are_intact(chunk, starts, block.length)
    if not good.all():
        return _convert_those(block, good, view, verify)
    return [_framed(_bodies(chunk, starts, block), block.length)], good


def _convert_those(block: _Block, good: _Mask, view: StoredBytes, verify: bool) -> tuple[list[bytes], _Mask]:
    """Convert rows as `_convert` does, except those that failed a check."""
    if not good.any():
        return [], good
    pieces, still_good = _convert(block.where(good), view, verify)
    sound = good.copy()
    sound[good] = still_good
    return pieces, sound


def _words(chunk: bytes, kind: str) -> _Words:
    """View every integer of this kind in the chunk, at every byte offset, without a copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray((len(chunk) - size + 1,), kind, buffer=chunk, strides=(1,))


def _are_expected(chunk: bytes, starts: Places, block: _Block) -> _Mask:
    """Return which frames have the header of the expected record."""
    octets, quads, words = _words(chunk, "u1"), _words(chunk, "<u4"), _words(chunk, "<u8")
    right: _Mask = quads[starts] == block.length - 4
    right &= (octets[starts + _KIND_AT] == _APPEND) & (octets[starts + _TOPIC_TOP_AT] == 0)
    right &= (words[starts + _SEQ_AT] == block.seq) & (words[starts + _TS_AT] == block.ts)
    return right


def _are_intact(chunk: bytes, starts: Places, lengths: Places) -> _Mask:
    """Return which frames have the checksum they were written with."""
    ends = starts + lengths - _CHECKSUM_BYTES
    intact: _Mask = checksums(_cut(chunk, starts + 4, ends)) == _words(chunk, "<u8")[ends]
    return intact


def _bodies(chunk: bytes, starts: Places, block: _Block) -> list[bytes]:
    """Return the bytes of each segment frame between its length and its checksum."""
    marked = (block.flags & _IN_FRAME) != 0
    if marked.any():
        patched = np.frombuffer(chunk, np.uint8).copy()
        patched[starts[marked] + _TOPIC_TOP_AT] = block.flags[marked] & _IN_FRAME
        chunk = patched.tobytes()
    return _cut(chunk, starts + _TOPIC_TOP_AT, starts + block.length - _CHECKSUM_BYTES)


def _cut(chunk: bytes, starts: Places, ends: Places) -> list[bytes]:
    return [chunk[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


_BETWEEN = np.dtype({"names": ["digest", "frame_len"], "formats": ["<u8", "<u4"], "itemsize": 12})


def _framed(bodies: list[bytes], lengths: Places) -> bytes:
    """Join bodies, with the checksum of one and the length of the next between them."""
    count = len(bodies)
    between = np.zeros(count + 1, _BETWEEN)
    between["frame_len"][:count] = lengths - FRAME_SHRINKS_BY - 4
    between["digest"][1:] = checksums(bodies)
    parts: list[bytes] = [b""] * (2 * count + 1)
    parts[0::2] = between.view("V12").tolist()
    parts[1::2] = bodies
    parts[0], parts[-1] = parts[0][8:], parts[-1][:8]
    return b"".join(parts)
