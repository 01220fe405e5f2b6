"""The records of the acknowledgement log, 40 bytes each.

    u32 xxh3 | u8 kind | u8 outcome | u16 subscriber | u64 segment | u32 bundle | u32 attempt | i64 ns
      | u64 number
    u32 xxh3 | u8 4    | u8 part    | u16 subscriber | 24 bytes of a name | u64 number

The checksum is the low half of XXH3-64 over the 36 bytes after it. Each record is verified independently, so
a reader finds the next valid record after a damaged one. `docs/formats/quiver-acks.md` describes every field.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

RECORD_BYTES: Final = 40
WHOLE_SEGMENT: Final = 0xFFFFFFFF
"""The bundle value that stands for every bundle of the segment."""

_RECORD: Final = struct.Struct("<BBHQIIqQ")
_NAME: Final = struct.Struct("<BBH24sQ")
_CHECKSUM: Final = struct.Struct("<I")
_NAME_BYTES: Final = 24
_NUMBER_MAX: Final = 2**63 - 1
_LOW: Final = 0xFFFFFFFF


class RecordKind(enum.IntEnum):
    """The kinds of records. Numbers are stable on disk; readers skip unknown ones."""

    OUTCOME = 0
    SUBSCRIBER = 1
    UNREGISTER = 2
    DELETED = 3
    NAME = 4
    STATE = 5
    LOGGED = 6
    """The durable end of the write-ahead log.

    `segment_seq` holds the position. `attempt` (high half) and `bundle` (low half) hold the number of the
    last bundle. `ts_ns` holds the number of the last segment that was written.
    """


class Outcome(enum.IntEnum):
    """The outcome of a bundle for one subscriber. An audit can distinguish delivered from lost bundles."""

    ACK = 0
    NACK = 1
    DROPPED = 2
    EXPIRED = 3
    REJECTED = 4

    @property
    def resolves(self) -> bool:
        """Whether the outcome resolves the bundle. After a nack it is delivered again."""
        return self is not Outcome.NACK


class OffsetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Any record except a name part. `outcome` holds a state for kinds 1 and 5, and a reason for kind 3."""

    kind: int
    outcome: int = 0
    subscriber: int = 0
    segment_seq: int = 0
    bundle: int = WHOLE_SEGMENT
    attempt: int = 0
    ts_ns: int = 0
    number: int


class NamePart(msgspec.Struct, frozen=True, kw_only=True):
    """Up to 24 bytes of a subscriber's name. The subscriber is defined by the record before it."""

    subscriber: int
    part: int
    text: bytes
    number: int


Record: TypeAlias = OffsetRecord | NamePart


def encode_record(record: Record) -> bytes:
    """Encode a record in 40 bytes."""
    if isinstance(record, NamePart):
        body = _NAME.pack(RecordKind.NAME, record.part, record.subscriber, record.text, record.number)
    else:
        body = _RECORD.pack(
            record.kind,
            record.outcome,
            record.subscriber,
            record.segment_seq,
            record.bundle,
            min(record.attempt, _LOW),
            record.ts_ns,
            record.number,
        )
    return _CHECKSUM.pack(xxh3_64_intdigest(body) & _LOW) + body


def decode_record(data: bytes | memoryview) -> Record | None:
    """Decode a record of 40 bytes. Return None if they are damaged.

    Numbers that no directory can reach count as damage despite a valid checksum, because the next number must
    fit too.
    """
    body = data[_CHECKSUM.size : RECORD_BYTES]
    if len(data) < RECORD_BYTES or _CHECKSUM.unpack_from(data)[0] != xxh3_64_intdigest(body) & _LOW:
        return None
    if body[0] == RecordKind.NAME:
        _, part, subscriber, text, number = _NAME.unpack(body)
        if number > _NUMBER_MAX:
            return None
        return NamePart(subscriber=subscriber, part=part, text=text.rstrip(b"\0"), number=number)
    kind, outcome, subscriber, segment_seq, bundle, attempt, ts_ns, number = _RECORD.unpack(body)
    # Two kinds hold a count or a number in `attempt` and `bundle`.
    wide = (attempt << 32) + bundle if kind in (RecordKind.DELETED, RecordKind.LOGGED) else 0
    if max(number, segment_seq, wide, segment_seq + wide * (kind == RecordKind.DELETED)) > _NUMBER_MAX:
        return None
    return OffsetRecord(
        kind=kind,
        outcome=outcome,
        subscriber=subscriber,
        segment_seq=segment_seq,
        bundle=bundle,
        attempt=attempt,
        ts_ns=ts_ns,
        number=number,
    )


def decode_records(data: bytes | memoryview) -> Iterator[Record | None]:
    """Yield each record in turn, or None for one that cannot be decoded. The last one may be truncated."""
    view = memoryview(data)
    for start in range(0, len(view), RECORD_BYTES):
        yield decode_record(view[start : start + RECORD_BYTES])


def name_parts(name: str) -> list[bytes]:
    """Split a name into the pieces that its records hold."""
    text = name.encode("ascii")
    return [text[start : start + _NAME_BYTES] for start in range(0, len(text), _NAME_BYTES)]
