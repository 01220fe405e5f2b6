"""Encoding and decoding of one entry of the write-ahead log.

    body_len u32 | type u8 | ingestion_ns i64 | wal_seq u64 | slot_bitmap u64
    | per slot: slot u16 | fingerprint 32 bytes | rows u32 | len u32 | an Arrow IPC stream
    | xxh3 u64 over the body

Little-endian. Two types belong to the log itself and have no slots: a mark confirms everything before it, and
an opening, the first entry of every file, repeats the header's position under a checksum. A run of zero bytes
is never a valid entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash
from xxhash import xxh3_64_intdigest

from penstock.errors import Corrupt, LimitExceeded
from penstock.storage import Buffer, FrameEnds, chase

ENTRY_BYTES_MAX: Final = 256 * 1024**2
"""The maximum size of a body. The reader rejects a longer one before it reads it."""

_LENGTH = struct.Struct("<I")
_BODY = struct.Struct("<BqQQ")
_HEAD = struct.Struct("<IBqQQ")
_SLOT = struct.Struct("<H32sII")
_SUM = struct.Struct("<Q")
OPENING_BYTES: Final = _HEAD.size + _SUM.size
ENTRY_BYTES_MIN: Final = _HEAD.size + _SLOT.size + _SUM.size
"""The size of an opening and of a mark."""
_AROUND: Final = _LENGTH.size + _SUM.size


class EntryType(IntEnum):
    """The type of an entry. Readers use the length to skip unknown types."""

    BUNDLE = 0
    OPENING = 254
    MARK = 255


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPart:
    """One slot of a bundle as stored in an entry. `payload` is an IPC stream of one batch, in pieces."""

    slot: int
    fingerprint: bytes
    rows: int
    payload: Sequence[Buffer]
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalEntry:
    """A bundle that was read back. Payloads are views of the log."""

    ingest_ns: int
    wal_seq: int
    parts: Sequence[SlotPart]

    @classmethod
    def decode(cls, body: memoryview) -> WalEntry:
        """Decode the bundle in a verified body. Raise `Corrupt` if its parts are inconsistent."""
        if len(body) < _BODY.size:
            raise Corrupt(f"an entry of {len(body)} bytes is too short for a bundle")
        kind, ingest_ns, wal_seq, bitmap = _BODY.unpack_from(body)
        if kind != EntryType.BUNDLE:
            raise Corrupt(f"an entry of type {kind} is not a bundle")
        parts: list[SlotPart] = []
        offset = _BODY.size
        for slot in _slots(bitmap):
            part, offset = _decode_part(body, offset)
            if part.slot != slot:
                raise Corrupt(f"entry {wal_seq} has slot {part.slot} where its bitmap says {slot}")
            parts.append(part)
        if offset != len(body):
            raise Corrupt(f"entry {wal_seq} has {len(body) - offset} bytes after its last slot")
        return cls(ingest_ns=ingest_ns, wal_seq=wal_seq, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first entry of a file: the file's start position, its number, and the salt of its marks."""

    position: int
    number: int
    salt: int

    def encode(self) -> bytes:
        return _own(EntryType.OPENING, self.position, self.salt, self.number)

    @classmethod
    def decode(cls, view: memoryview, offset: int) -> Opening | None:
        """Decode the opening at `offset`. Return None if it is missing or damaged."""
        if _entry_end(view, offset, min(len(view), offset + OPENING_BYTES)) != offset + OPENING_BYTES:
            return None
        _, kind, position, salt, number = _HEAD.unpack_from(view, offset)
        if kind != EntryType.OPENING or position < 0:
            return None
        return cls(position=position, number=number, salt=salt)


def encode_entry(ingest_ns: int, wal_seq: int, parts: Sequence[SlotPart]) -> tuple[list[Buffer], int]:
    """Return the pieces of a bundle's entry for a single write, and their total size.

    `parts` must be in ascending order of slot. The payloads are not copied. Raise `LimitExceeded` if the
    entry is too large.
    """
    length = entry_bytes(parts) - _AROUND
    bitmap = 0
    for part in parts:
        bitmap |= 1 << part.slot
    head = _HEAD.pack(length, EntryType.BUNDLE, ingest_ns, wal_seq, bitmap)
    digest = xxhash.xxh3_64(head[_LENGTH.size :])
    pieces: list[Buffer] = [head]
    for part in parts:
        slot_head = _SLOT.pack(part.slot, part.fingerprint, part.rows, part.byte_count)
        digest.update(slot_head)
        pieces.append(slot_head)
        for piece in part.payload:
            digest.update(piece)
            pieces.append(piece)
    pieces.append(_SUM.pack(digest.intdigest()))
    return pieces, length + _AROUND


def entry_bytes(parts: Sequence[SlotPart]) -> int:
    """Return the size of the entry for these parts. Raise `LimitExceeded` if it is too large."""
    length = _BODY.size + sum([_SLOT.size + part.byte_count for part in parts])
    if length > ENTRY_BYTES_MAX:
        raise LimitExceeded(f"a bundle of {length} bytes is larger than {ENTRY_BYTES_MAX}; split it")
    return length + _AROUND


def entry_type(view: memoryview, start: int) -> int:
    """Return the type of the valid entry at `start`."""
    return view[start + _LENGTH.size]


def entry_body(view: memoryview, start: int, end: int) -> memoryview:
    """Return the body of the valid entry between two offsets."""
    return view[start + _LENGTH.size : end - _SUM.size]


class WalFormat:
    """The `LogFormat` of these entries."""

    def frame_end(self, view: memoryview, offset: int, limit: int) -> int | None:
        return _entry_end(view, offset, limit)

    def frame_ends(self, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
        return chase(self, view, start, limit)

    def mark(self, value: int) -> bytes:
        return _own(EntryType.MARK, 0, value, 0)

    def read_mark(self, frame: memoryview) -> int | None:
        if len(frame) != OPENING_BYTES:
            return None
        _, kind, _, value, _ = _HEAD.unpack_from(frame)
        return int(value) if kind == EntryType.MARK else None


def _own(kind: EntryType, first: int, second: int, third: int) -> bytes:
    body = _BODY.pack(kind, first, second, third)
    return _LENGTH.pack(len(body)) + body + _SUM.pack(xxh3_64_intdigest(body))


def _entry_end(view: memoryview, offset: int, limit: int) -> int | None:
    if offset + _AROUND >= limit:
        return None
    (length,) = _LENGTH.unpack_from(view, offset)
    end: int = offset + _AROUND + length
    if not 0 < length <= ENTRY_BYTES_MAX or end > limit:
        return None
    body = view[offset + _LENGTH.size : end - _SUM.size]
    return end if xxh3_64_intdigest(body) == _SUM.unpack_from(view, end - _SUM.size)[0] else None


def _slots(bitmap: int) -> list[int]:
    return [slot for slot in range(64) if bitmap >> slot & 1]


def _decode_part(body: memoryview, offset: int) -> tuple[SlotPart, int]:
    start = offset + _SLOT.size
    if start > len(body):
        raise Corrupt("an entry ends inside a slot's header")
    slot, fingerprint, rows, length = _SLOT.unpack_from(body, offset)
    if start + length > len(body):
        raise Corrupt(f"an entry ends inside the payload of slot {slot}")
    payload = body[start : start + length]
    part = SlotPart(slot=slot, fingerprint=fingerprint, rows=rows, payload=[payload], byte_count=length)
    return part, start + length
