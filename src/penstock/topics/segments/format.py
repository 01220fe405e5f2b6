"""The files of a segment: consecutive frames, an index of fixed stride, and sidecars.

A segment holds the records `first_seq` to `first_seq + count - 1`. Its data file is a sequence of frames

    frame_len u32 | flags u8 | seq u64 | ts u64 | node_len u16 | tag_len u16 | data_len u32
    | node | tag | data | xxh3 u64 over everything between frame_len and itself

and its index has one entry of 20 bytes per sequence number, so that entry `seq - first_seq` is found without
a search. A sequence number without a record has an entry too. A hole never had a record, or its record was
removed before the segment was written. A lost entry had a record that was already unreadable then.

The sidecars share one header and one checksum. The sidecar of deletions has one bit per record. It is
replaced as a whole, so readers see the old or the new one. Bits are never cleared: a deleted record stays
deleted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from penstock.storage import Buffer
from penstock.topics.errors import Damaged


def checksums(pieces: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Return the checksum of each piece, as one array."""
    # Digests as bytes: an array of such large Python integers costs as much as the hashing.
    return np.frombuffer(b"".join(map(xxh3_64_digest, pieces)), ">u8").astype("<u8")


def checksums_between(
    buffer: bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the checksum of each part of a buffer.

    No part is kept, so all copies share the same few bytes.
    """
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.frombuffer(b"".join([xxh3_64_digest(buffer[start:end]) for start, end in spans]), ">u8")


HAS_TAG: Final = 1
HAS_NODE: Final = 2
HAS_META: Final = 8
HOLE: Final = 16
"""A flag only in the index: there is no frame, and no record is missing."""
LOST: Final = 64
"""A flag only in the index: there was a record, but no frame. Reading it is an error, not a gap."""

_IN_FRAME: Final = HAS_TAG | HAS_NODE
_WITHOUT_FRAME: Final = HOLE | LOST
_IN_INDEX: Final = HAS_TAG | HAS_NODE | HAS_META | HOLE | LOST

IDX_DTYPE: Final = np.dtype(
    {
        "names": ["offset", "length", "ts", "flags", "packed"],
        "formats": ["<u4", "<u4", "<u8", "u1", "<u4"],
        "offsets": [0, 4, 8, 16, 16],
        "itemsize": 20,
    }
)
"""One index entry. `packed` overlaps `flags`: its upper 24 bits are the overhead. See `overhead_of`."""
IDX_STRIDE: Final = 20

_HEAD = struct.Struct("<IBQQHHI")
_CHECKSUM_BYTES: Final = 8
FRAME_BYTES_MIN: Final = _HEAD.size + _CHECKSUM_BYTES

IndexRows: TypeAlias = npt.NDArray[np.void]
"""An array of `IDX_DTYPE`."""

_NAME = re.compile(r"seg-([0-9]{16,20})")


class Part(StrEnum):
    """The files of one segment. The value is the extension of the file name."""

    DATA = "data"
    IDX = "idx"
    TAGS = "tags"
    DEL = "del"


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The metadata of a segment. Bytes of its files beyond these numbers are ignored."""

    first_seq: int
    count: int
    data_bytes: int
    sealed: bool
    cold: bool
    created_ms: int
    idx_xxh3: int
    """The checksum of the index entries."""
    deleted: int = 0
    """The minimum number of records that the `.del` file must name."""

    @property
    def end_seq(self) -> int:
        """Return the sequence number after the last one."""
        return self.first_seq + self.count

    @property
    def idx_bytes(self) -> int:
        return self.count * IDX_STRIDE


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The content of one frame. The views point into the frame."""

    seq: int
    ts: int
    flags: int
    node: memoryview
    tag: memoryview
    payload: memoryview


def segment_name(first_seq: int) -> str:
    """Return the name of a segment's files, without the extension."""
    return f"seg-{first_seq:016d}"


def segment_id(name: str) -> int | None:
    """Return the first sequence number in a segment's name, or None if it is not the name of a segment."""
    found = _NAME.fullmatch(name)
    if found is None or segment_name(int(found[1])) != name:
        return None
    return int(found[1])


def checksum(buffer: Buffer) -> int:
    """Return the XXH3-64 of all bytes."""
    return xxh3_64_intdigest(buffer)


def overhead_of(rows: IndexRows) -> npt.NDArray[np.uint32]:
    """Return, per row, the frame length minus the record's accounted bytes."""
    overhead: npt.NDArray[np.uint32] = rows["packed"] >> np.uint32(8)
    return overhead


def data_end(rows: IndexRows) -> int:
    """Return how many bytes of the data file these rows cover, starting with the segment's first row."""
    return int(rows["length"].sum(dtype=np.uint64))


def read_index(buffer: Buffer, first_seq: int, expected_checksum: int | None = None) -> IndexRows:
    """Return the entries in `buffer` without copying them.

    Raises `Damaged` unless they have the expected checksum, cover the data file without gaps or overlaps, and
    use only known flags.
    """
    if len(buffer) % IDX_STRIDE:
        raise _index_damaged(first_seq, f"{len(buffer)} bytes are not a whole number of entries")
    if expected_checksum is not None and checksum(buffer) != expected_checksum:
        raise _index_damaged(first_seq, "its checksum is wrong")
    rows = np.frombuffer(buffer, IDX_DTYPE)
    wrong = _wrong_entries(rows)
    if wrong.any():
        raise _index_damaged(first_seq, f"the entry of record {first_seq + int(wrong.argmax())} is invalid")
    return rows


def _wrong_entries(rows: IndexRows) -> npt.NDArray[np.bool_]:
    flags, length, offset = rows["flags"], rows["length"], rows["offset"]
    framed = (flags & _WITHOUT_FRAME) == 0
    ends = np.cumsum(length, dtype=np.uint64)
    wrong: npt.NDArray[np.bool_] = (flags & ~np.uint8(_IN_INDEX)) != 0
    wrong |= framed & ((length < FRAME_BYTES_MIN) | (offset != ends - length) | (overhead_of(rows) > length))
    wrong |= ~framed & ((length != 0) | (offset != 0))
    return wrong


def _index_damaged(first_seq: int, why: str) -> Damaged:
    return Damaged(
        f"the index of segment {segment_name(first_seq)} is damaged: {why}; keep its files",
        {"first_seq": first_seq},
    )


def read_frame(frame: Buffer, seq: int) -> SegmentRecord:
    """Decode the record in a frame. Raise `Damaged` unless it is the intact frame of record `seq`."""
    view = memoryview(frame)
    size = len(view)
    if size < FRAME_BYTES_MIN:
        raise _frame_damaged(seq, f"only {size} bytes are left of it")
    frame_len, flags, found, ts, node_len, tag_len, data_len = _HEAD.unpack_from(view)
    if frame_len + 4 != size or FRAME_BYTES_MIN + node_len + tag_len + data_len != size:
        raise _frame_damaged(seq, "its lengths do not fit together")
    end = size - _CHECKSUM_BYTES
    if xxh3_64_intdigest(view[4:end]) != int.from_bytes(view[end:], "little"):
        raise _frame_damaged(seq, "its checksum is wrong")
    if found != seq:
        raise _frame_damaged(seq, f"record {found} is in its place")
    if flags & ~_IN_FRAME:
        raise _frame_damaged(seq, f"its flags {flags:#x} are unknown")
    tag_at = _HEAD.size + node_len
    data_at = tag_at + tag_len
    return SegmentRecord(seq, ts, flags, view[_HEAD.size : tag_at], view[tag_at:data_at], view[data_at:end])


def verify(data: Buffer, row: np.void, seq: int, base: int = 0) -> SegmentRecord:
    """Return the record that an index row points to. `data` are the data file's bytes from offset `base` on.

    Raises `Damaged` if the frame or the row is not as it was written, or if the record is lost.
    """
    flags, start, length = int(row["flags"]), int(row["offset"]) - base, int(row["length"])
    if flags & _WITHOUT_FRAME:
        raise _frame_damaged(
            seq, "it was lost before the segment was written" if flags & LOST else "there is no such record"
        )
    if start < 0 or start + length > len(data):
        raise _frame_damaged(seq, "its frame reaches past the end of the data")
    record = read_frame(memoryview(data)[start : start + length], seq)
    if record.ts != int(row["ts"]) or record.flags != flags & _IN_FRAME:
        raise _frame_damaged(seq, "frame and index disagree about it")
    return record


def damaged_rows(data: Buffer, rows: IndexRows, first_seq: int, base: int = 0) -> list[tuple[int, Damaged]]:
    """Return every unreadable record among `rows` with its error. Holes are ignored."""
    found: list[tuple[int, Damaged]] = []
    for place in np.flatnonzero((rows["flags"] & HOLE) == 0).tolist():
        try:
            verify(data, rows[place], first_seq + place, base)
        except Damaged as error:
            found.append((first_seq + place, error))
    return found


def _frame_damaged(seq: int, why: str) -> Damaged:
    return Damaged(f"stored record {seq} cannot be read: {why}", {"first_seq": seq, "last_seq": seq})


SIDECAR_VERSION: Final = 1

_SIDECAR_HEAD = struct.Struct("<4sIQII")
_BODY_AT: Final = _SIDECAR_HEAD.size + _CHECKSUM_BYTES


def close_sidecar(magic: bytes, first_seq: int, count: int, body: bytes) -> bytes:
    """Encode a sidecar with `body` for the first `count` records of a segment."""
    head = _SIDECAR_HEAD.pack(magic, SIDECAR_VERSION, first_seq, count, len(body))
    return head + xxh3_64_intdigest(head + body).to_bytes(_CHECKSUM_BYTES, "little") + body


def open_sidecar(raw: Buffer, magic: bytes, first_seq: int) -> tuple[int, memoryview]:
    """Return the record count and the body of a sidecar. Raise `Damaged` unless every bit is as written."""
    view = memoryview(raw)
    if len(view) < _BODY_AT:
        raise sidecar_damaged(first_seq, f"only {len(view)} bytes are left of it")
    head, body = view[: _SIDECAR_HEAD.size], view[_BODY_AT:]
    digest = int.from_bytes(view[_SIDECAR_HEAD.size : _BODY_AT], "little")
    if xxh3_64_intdigest(head.tobytes() + body.tobytes()) != digest:
        raise sidecar_damaged(first_seq, "its checksum is wrong")
    found_magic, version, found_seq, count, body_len = _SIDECAR_HEAD.unpack(head)
    if (found_magic, found_seq, body_len) != (magic, first_seq, len(body)):
        raise sidecar_damaged(first_seq, "it belongs to something else")
    if version != SIDECAR_VERSION:
        raise sidecar_damaged(first_seq, f"its version {version} is unknown")
    return count, body


def sidecar_damaged(first_seq: int, why: str) -> Damaged:
    return Damaged(
        f"a file beside segment {segment_name(first_seq)} is damaged: {why}", {"first_seq": first_seq}
    )


DeletedRows: TypeAlias = npt.NDArray[np.bool_]
"""One item per record of the segment, true if it was deleted."""

_MAGIC: Final = b"PTD1"


def encode_deleted(first_seq: int, deleted: DeletedRows) -> bytes:
    """Encode the `.del` file for a segment's records."""
    return close_sidecar(_MAGIC, first_seq, len(deleted), np.packbits(deleted, bitorder="little").tobytes())


def decode_deleted(raw: Buffer, first_seq: int, count: int) -> DeletedRows:
    """Return the bits of the first `count` records, false for records not in the file. Raise `Damaged`."""
    known, body = open_sidecar(raw, _MAGIC, first_seq)
    if len(body) != (known + 7) // 8:
        raise sidecar_damaged(first_seq, f"{len(body)} bytes do not fit {known} records")
    deleted = np.zeros(count, np.bool_)
    bits = np.unpackbits(np.frombuffer(body, np.uint8), count=known, bitorder="little")[:count]
    deleted[: len(bits)] = bits
    return deleted
