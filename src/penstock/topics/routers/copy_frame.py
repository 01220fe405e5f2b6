"""Copies of stored records, and the log frame that lists the copied records.

A copy has the payload of the stored record under another topic, sequence number and time. It depends only on
that record, the router's flags, its position and its time. A copy that is made again after a crash therefore
has the same bytes. The frame of a pass is

    lp router | router_id u64 | source_id u64 | lp source | bits u8 | cursor u64 | forwarded_total u64
    | first_seq u64 | n u32 | n times (source_seq u64, count u64, hops u8)

One frame stands for all copies of a pass, in the log of the destination and at their position in it: earlier
writes have lower sequence numbers, later ones higher. A run with `source_seq` 0 stands for records that the
source lost before they could be copied. `cursor` and `forwarded_total` are the values after the pass. A frame
by value is followed by the copies themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.jsontext import members as json_members
from penstock.storage import Buffer
from penstock.topics.limits import META_KEYS_MAX
from penstock.topics.log.control import BodyReader, with_length
from penstock.topics.log.frame import HEADER_BYTES, MORE, FrameType, encode_control
from penstock.topics.log.payload import (
    DATA_WRAP_BYTES,
    ESCAPED,
    META_WRAP_BYTES,
    PreparedBatch,
    RecordHeaders,
    escape_savings,
    split_payload,
)
from penstock.topics.read.render import is_log_frame
from penstock.topics.routers.model import EXACTLY_ONCE, PRESERVE_NODE, PRESERVE_TAG
from penstock.topics.segments.columns import DAMAGED, Columns, StoredBytes, span
from penstock.topics.segments.format import HAS_META, HAS_NODE, HAS_TAG

BY_VALUE: Final = 32
"""A flag: the copies follow as separate frames. Without it they are made again from the source."""
LOST_SOURCE: Final = 0

_NUMBERS = struct.Struct("<BQQQI")
_RUN = struct.Struct("<QQB")


class CopyRun(NamedTuple):
    """Consecutive records from `source_seq` on, each with a copy, which went through `hops` routers."""

    source_seq: int
    records: int
    hops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFrame:
    """The copies of one pass of one router."""

    router: str
    router_id: int
    source: str
    source_id: int
    bits: int
    """The router's flags, and `BY_VALUE`."""
    cursor: int
    forwarded_total: int
    first_seq: int
    """The sequence number of the first copy, in the destination."""
    runs: tuple[CopyRun, ...]

    @property
    def by_value(self) -> bool:
        return bool(self.bits & BY_VALUE)

    def frame(self, dest_id: int, ts_ms: int) -> bytes:
        """Return the frame. A frame by value is truncated together with incomplete copies."""
        follows = self.by_value and any(run.source_seq for run in self.runs)
        return encode_control(
            FrameType.ROUTER_CURSOR, dest_id, self.encode(), ts_ms=ts_ms, flags=MORE if follows else 0
        )

    def encode(self) -> bytes:
        return b"".join(
            (
                with_length(self.router.encode()),
                struct.pack("<QQ", self.router_id, self.source_id),
                with_length(self.source.encode()),
                _NUMBERS.pack(self.bits, self.cursor, self.forwarded_total, self.first_seq, len(self.runs)),
                *(_RUN.pack(*run) for run in self.runs),
            )
        )

    @classmethod
    def decode(cls, body: Buffer) -> CopyFrame:
        """Decode the body of a frame. Raise `Corrupt` if it is damaged."""
        reader = BodyReader(body, "router cursor")
        router, router_id, source_id, source = reader.text(), reader.u64(), reader.u64(), reader.text()
        bits, cursor, total, first_seq, count = _NUMBERS.unpack(reader.take(_NUMBERS.size))
        runs = tuple(CopyRun(*run) for run in _RUN.iter_unpack(reader.take(count * _RUN.size)))
        reader.end()
        return cls(
            router=router,
            router_id=router_id,
            source=source,
            source_id=source_id,
            bits=bits,
            cursor=cursor,
            forwarded_total=total,
            first_seq=first_seq,
            runs=runs,
        )


def runs_of(seqs: Iterable[int], hops: Iterable[int]) -> tuple[CopyRun, ...]:
    """Group ascending sequence numbers with their hops into as few runs as possible."""
    runs: list[CopyRun] = []
    for seq, hop in zip(seqs, hops, strict=True):
        if runs and runs[-1].source_seq + runs[-1].records == seq and runs[-1].hops == hop:
            runs[-1] = runs[-1]._replace(records=runs[-1].records + 1)
        else:
            runs.append(CopyRun(seq, 1, hop))
    return tuple(runs)


_SEGMENT_HEADER_BYTES: Final = 29
_SEGMENT_SEQ = struct.Struct("<QQ")
_LENGTHS = struct.Struct("<HHI")
_CHECKSUM = struct.Struct("<Q")
ROUTER_KEY: Final = "_topics_router"
_META = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODE: Final = msgspec.json.Encoder().encode


class StoredRecord(NamedTuple):
    """The parts of one stored record."""

    seq: int
    node: bytes | None
    tag: bytes | None
    payload: bytes
    accounted: int
    has_meta: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStyle:
    """The parts of a record that its copies keep and, for `exactly_once`, their origin."""

    bits: int
    router: str
    source: str
    source_id: int
    source_epoch: int


def stored_records(
    run: Columns, places: Sequence[int], view: StoredBytes, base: int = 0
) -> Iterator[StoredRecord | None]:
    """Yield the records of these rows, whose file has the bytes `view` from offset `base` on.

    Yield None for an unreadable record. Every frame from a file is checked.
    """
    is_memory = isinstance(view, memoryview)
    for place in places:
        offset, length, ts, flags, overhead = run.row(place)
        at, seq = offset - base, run.first_seq + place
        header = _SEGMENT_HEADER_BYTES if run.segment else HEADER_BYTES
        if flags & DAMAGED or at < 0 or length < header + 8 or at + length > len(view):
            yield None
            continue
        frame = span(view, at, at + length)
        is_sound = _is_sound(frame, seq, ts) if run.segment else is_memory or is_log_frame(frame, seq)
        if not is_sound:
            yield None
            continue
        node_bytes, tag_bytes, _ = _LENGTHS.unpack_from(frame, header - 8)
        tag_at = header + node_bytes
        data_at = tag_at + tag_bytes
        yield StoredRecord(
            seq,
            frame[header:tag_at] if flags & HAS_NODE else None,
            frame[tag_at:data_at] if flags & HAS_TAG else None,
            frame[data_at:-8],
            length - overhead,
            bool(flags & HAS_META),
        )


def _is_sound(frame: bytes, seq: int, ts: int) -> bool:
    (digest,) = _CHECKSUM.unpack_from(frame, len(frame) - 8)
    return _SEGMENT_SEQ.unpack_from(frame, 5) == (seq, ts) and xxh3_64_intdigest(frame[4:-8]) == digest


def styled(record: StoredRecord, style: CopyStyle) -> StoredRecord:
    """Return the record as its copy shows it."""
    if style.bits & EXACTLY_ONCE:
        record = _add_origin(record, style)
    if not style.bits & PRESERVE_NODE:
        record = record._replace(node=None)
    return record if style.bits & PRESERVE_TAG else record._replace(tag=None)


def copies(records: Sequence[StoredRecord]) -> PreparedBatch:
    """Return styled records as a batch to encode."""
    headers = RecordHeaders(accounted=[record.accounted for record in records])
    for record in records:
        node, tag = record.node or b"", record.tag or b""
        headers.leads.append(node + tag)
        headers.trails.append(b"")
        headers.node_bytes.append(len(node))
        headers.tag_bytes.append(len(tag))
        headers.flags.append(_flags(record))
    return PreparedBatch(
        count=len(records),
        data=[record.payload for record in records],
        accounted_bytes=sum(headers.accounted),
        node=None,
        headers=headers,
        tags=[(place, record.tag) for place, record in enumerate(records) if record.tag is not None],
    )


def _flags(record: StoredRecord) -> int:
    flags = (0 if record.node is None else HAS_NODE) | (0 if record.tag is None else HAS_TAG)
    wrap = DATA_WRAP_BYTES
    if record.has_meta:
        flags |= HAS_META
        wrap += META_WRAP_BYTES
    # If the accounted size is smaller than the stored size, log replay must measure it again.
    return flags if len(record.payload) - wrap == record.accounted else flags | ESCAPED


def _add_origin(record: StoredRecord, style: CopyStyle) -> StoredRecord:
    """Return the record with its origin in its meta."""
    data, meta = split_payload(record.payload) if record.has_meta else (record.payload[5:-1], None)
    new_meta = _with_origin(meta, _origin(record.seq, style))
    accounted = record.accounted - (0 if meta is None else _measured(meta)) + _measured(new_meta)
    return record._replace(payload=b'{"d":%b,"m":%b}' % (data, new_meta), accounted=accounted, has_meta=True)


def key_of(seq: int, style: CopyStyle) -> str:
    """Return the idempotency key of the copies of this record."""
    return f"router:{style.router}:{style.source_id}:{style.source_epoch}:{seq}"


def _origin(seq: int, style: CopyStyle) -> msgspec.Raw:
    return msgspec.Raw(
        _ENCODE(
            {
                "idempotency_key": key_of(seq, style),
                "router": style.router,
                "source_topic": style.source,
                "source_topic_id": style.source_id,
                "source_epoch": style.source_epoch,
                "source_seq": seq,
            }
        )
    )


def _with_origin(meta: bytes | None, origin: msgspec.Raw) -> bytes:
    if meta is None:
        return _ENCODE({ROUTER_KEY: origin})
    if meta.startswith(b"{"):
        members = _members(meta)
        if len(members.keys() - {ROUTER_KEY}) < META_KEYS_MAX:
            return _ENCODE({**members, ROUTER_KEY: origin})
    return _ENCODE({ROUTER_KEY: origin, "_topics_original_meta": msgspec.Raw(meta)})


def _members(meta: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _META.decode(meta)
    except RecursionError:  # stored before there was a limit on nesting
        return {name: msgspec.Raw(text) for name, text in json_members(meta).items()}


def _measured(text: bytes) -> int:
    return len(text) - int(escape_savings(text)[1].sum())
