"""The frames of the topics log: one per record of a write, one per change of a topic.

    frame_len u32 | type u8 | flags u8 | topic_id u64 | seq u64 | ts u64 | node_len u16 | tag_len u16
    | data_len u32 | node | tag | data | xxh3 u64 over everything between frame_len and itself

Little-endian; `frame_len` counts the bytes after itself. `docs/formats/topics-wal.md` has the tables.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from penstock.storage import Buffer
from penstock.topics.log.payload import DATA_WRAP_BYTES, PreparedBatch
from penstock.topics.segments.columns import ROW
from penstock.topics.segments.format import (
    HAS_META,
    HAS_NODE,
    HAS_TAG,
    IDX_DTYPE,
    IDX_STRIDE,
    checksums_between,
)

DURABLE: Final = 4
"""A flag: the write was acknowledged only after a sync."""
MORE: Final = 16
"""A flag: more records of the same write follow. Without them this one must not become visible."""
ROW_FLAGS: Final = HAS_TAG | HAS_NODE | HAS_META
"""The flags of a frame that its row in the index also has."""

HEADER = struct.Struct("<IBBQQQHHI")
HEADER_BYTES: Final = HEADER.size
CHECKSUM = struct.Struct("<Q")
FRAME_BYTES_MIN: Final = HEADER_BYTES + CHECKSUM.size
APPEND_FRAME_BYTES_MIN: Final = FRAME_BYTES_MIN + len(b'{"d":0}')
"""The size of the smallest record's frame, and so the least log space per sequence number."""
CURSOR_FRAME_BYTES_MIN: Final = FRAME_BYTES_MIN + 72
"""The size of the frame of one router pass."""
_BODY = struct.Struct("<BBQQQHHI")
_LENGTH = struct.Struct("<I")
_APPEND: Final = 1
_FEW: Final = 24
"""The number of records up to which a plain loop is faster than arrays."""
_U32: Final = np.dtype("<u4")
_U64: Final = np.dtype("<u8")

_ALIKE = struct.Struct("<cQIBBQQQHHI")
"""The end of one record, its checksum, and the head of the next."""
_LENGTH_AT: Final = 1 + CHECKSUM.size
_FLAGS_AT: Final = _LENGTH_AT + 5
_SEQ_AT: Final = _LENGTH_AT + 14
_DATA_BYTES_AT: Final = _LENGTH_AT + 34


class FrameType(IntEnum):
    APPEND = 1
    TOPIC_CREATE = 2
    TOPIC_DELETE = 3
    ROUTER_CREATE = 4
    ROUTER_DELETE = 5
    DELETE = 6
    EVICT_WATERMARK = 7
    CHECKPOINT_MARK = 8
    CONFIG_UPDATE = 9
    LEASE = 10
    HEAD_WATERMARK = 11
    ROUTER_CURSOR = 12


class EncodedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The frames of one write in one buffer. The offsets in `rows` are relative to its start."""

    buffer: Buffer
    count: int
    first_seq: int
    ts_ms: int
    rows: bytes
    tags: list[tuple[int, bytes]]
    """Pairs of a record's position in the batch and its tag."""
    accounted_bytes: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1

    @property
    def byte_count(self) -> int:
        return len(self.buffer)


def encode_control(
    kind: FrameType, topic_id: int, body: bytes, *, seq: int = 0, ts_ms: int = 0, flags: int = 0
) -> bytes:
    """Encode a frame that is not a record."""
    return _framed(_BODY.pack(kind, flags, topic_id, seq, ts_ms, 0, 0, len(body)) + body)


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body) + 8) + body + CHECKSUM.pack(xxh3_64_intdigest(body))


def encode(
    batch: PreparedBatch,
    *,
    topic_id: int,
    first_seq: int,
    ts_ms: int,
    durable: bool,
    ends: Sequence[int] = (),
) -> EncodedBatch:
    """Encode checked and measured records. All of them carry the same timestamp.

    They belong to one write, or to several writes whose last records are `ends`, counted from 1.
    """
    flags = DURABLE if durable else 0
    if batch.count == 1 and batch.headers is None:
        buffer, rows = _encode_plain(batch, topic_id, first_seq, ts_ms, flags)
    else:
        head = _Head(topic_id, first_seq, ts_ms, flags, ends or (batch.count,))
        buffer, rows = (_encode_few if batch.count <= _FEW else _encode_many)(batch, head)
    return EncodedBatch(
        buffer=buffer,
        count=batch.count,
        first_seq=first_seq,
        ts_ms=ts_ms,
        rows=rows,
        tags=batch.tags,
        accounted_bytes=batch.accounted_bytes,
    )


class _Head(NamedTuple):
    """The header fields that frames encoded together share."""

    topic_id: int
    first_seq: int
    ts_ms: int
    flags: int
    ends: Sequence[int]


def _encode_plain(
    batch: PreparedBatch, topic_id: int, seq: int, ts_ms: int, common: int
) -> tuple[Buffer, bytes]:
    """Encode the single record of a write that has only data, on the fast path of `_encode_few`."""
    data = batch.data[0]
    node_bytes, own = _without_headers(batch)
    body = _BODY.pack(_APPEND, own | common, topic_id, seq, ts_ms, node_bytes, 0, len(data) + DATA_WRAP_BYTES)
    frame = _framed(b"".join((body, batch.lead, data, b"}")))
    size = len(frame)
    return frame, ROW.pack(0, size, ts_ms, own | (size - batch.accounted_bytes) << 8)


def _encode_few(batch: PreparedBatch, head: _Head) -> tuple[Buffer, bytes]:
    topic_id, seq, ts_ms, common, ends = head
    frames: list[bytes] = []
    rows: list[bytes] = []
    offset, headers = 0, batch.headers
    lead, trail, tag_bytes = batch.lead, b"}", 0
    node_bytes, own = _without_headers(batch)
    accounted = batch.accounted
    for place, data in enumerate(batch.data):
        if headers is not None:
            lead, trail, own = headers.leads[place], headers.trails[place], headers.flags[place]
            node_bytes, tag_bytes = headers.node_bytes[place], headers.tag_bytes[place]
        flags = own | common if place + 1 in ends else own | common | MORE
        data_bytes = len(lead) + len(data) + len(trail) - node_bytes - tag_bytes
        body = _BODY.pack(_APPEND, flags, topic_id, seq + place, ts_ms, node_bytes, tag_bytes, data_bytes)
        frame = _framed(b"".join((body, lead, data, trail)))
        overhead = len(frame) - accounted[place]
        frames.append(frame)
        rows.append(ROW.pack(offset, len(frame), ts_ms, own & ROW_FLAGS | overhead << 8))
        offset += len(frame)
    return frames[0] if len(frames) == 1 else b"".join(frames), b"".join(rows)


def _without_headers(batch: PreparedBatch) -> tuple[int, int]:
    """Return the node length and the flags of a record without headers."""
    return (0, 0) if batch.node is None else (len(batch.node), HAS_NODE)


def _encode_many(batch: PreparedBatch, head: _Head) -> tuple[Buffer, bytes]:
    """Encode many records with arrays, except for the checksums. Same result as `_encode_few`.

    The buffer is joined with room for the checksums, which are written afterwards. Between the texts of two
    records is one piece with the end of the first, its checksum, and the head of the second.
    """
    headers = batch.headers
    if headers is None:
        return _encode_alike(batch, head)
    topic_id, first_seq, ts_ms, common, ends = head
    text_bytes = np.fromiter(map(len, batch.data), np.int64, batch.count)
    glue = np.empty(batch.count, _GLUE)
    own = np.array(headers.flags, np.uint8)
    glue["node_bytes"], glue["tag_bytes"] = headers.node_bytes, headers.tag_bytes
    leads = np.fromiter(map(len, headers.leads), np.int64, batch.count)
    around = leads + np.fromiter(map(len, headers.trails), np.int64, batch.count)
    names = glue["node_bytes"].astype(np.int64) + glue["tag_bytes"]
    lengths = text_bytes + around + FRAME_BYTES_MIN
    glue["checksum"] = 0
    glue["frame_len"] = lengths - 4
    glue["type"] = _APPEND
    glue["flags"] = own | common | MORE
    glue["flags"][np.array(ends) - 1] &= ~np.uint8(MORE)
    glue["topic_id"] = topic_id
    glue["seq"] = np.arange(first_seq, first_seq + batch.count, dtype=np.uint64)
    glue["ts"] = ts_ms
    glue["data_bytes"] = text_bytes + around - names
    pieces = glue.view(f"V{glue.dtype.itemsize}").tolist()
    parts: list[object] = [b""] * (4 * batch.count + 1)
    parts[0:-1:4], parts[1::4], parts[2::4], parts[3::4] = pieces, headers.leads, batch.data, headers.trails
    parts[0], parts[-1] = pieces[0][CHECKSUM.size :], bytes(CHECKSUM.size)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    rows = np.empty(batch.count, IDX_DTYPE)
    rows["offset"], rows["length"], rows["ts"] = starts, lengths, ts_ms
    rows["packed"] = (lengths - np.array(headers.accounted, np.int64)) << 8 | (own & ROW_FLAGS)
    return _with_checksums(b"".join(parts), starts, stops), rows.tobytes()  # type: ignore[arg-type]


def _encode_alike(batch: PreparedBatch, head: _Head) -> tuple[Buffer, bytes]:
    """Encode many records that have only data. Same result as `_encode_many`.

    The heads differ only in two lengths and the sequence number, and the rows in two fields. So one head and
    one row are repeated, and only these fields are written. Every array call costs as much as several
    records.
    """
    topic_id, first_seq, ts_ms, common, ends = head
    count, lead = batch.count, batch.lead
    node_bytes, own = _without_headers(batch)
    around = len(lead) + 1 + FRAME_BYTES_MIN
    flags = own | common | MORE
    piece = _ALIKE.pack(b"}", 0, 0, _APPEND, flags, topic_id, 0, ts_ms, node_bytes, 0, 0) + lead
    stride = len(piece)
    glue = bytearray(piece * count)
    for end in ends:
        glue[_FLAGS_AT + (end - 1) * stride] = flags & ~MORE
    lengths = np.fromiter(map(len, batch.data), np.int64, count)
    lengths += around
    np.ndarray(count, _U32, glue, _LENGTH_AT, stride)[:] = lengths - _LENGTH.size
    np.ndarray(count, _U32, glue, _DATA_BYTES_AT, stride)[:] = lengths - (FRAME_BYTES_MIN + node_bytes)
    np.ndarray(count, _U64, glue, _SEQ_AT, stride)[:] = np.arange(first_seq, first_seq + count, dtype=_U64)
    pieces = np.ndarray(count, f"V{stride}", glue).tolist()
    parts: list[object] = [b""] * (2 * count + 1)
    parts[0:-1:2], parts[1::2] = pieces, batch.data
    parts[0], parts[-1] = pieces[0][_LENGTH_AT:], b"}" + bytes(CHECKSUM.size)
    stops = lengths.cumsum()
    starts = stops - lengths
    rows = bytearray(ROW.pack(0, 0, ts_ms, own | around << 8) * count)
    np.ndarray(count, _U32, rows, 0, IDX_STRIDE)[:] = starts
    np.ndarray(count, _U32, rows, _U32.itemsize, IDX_STRIDE)[:] = lengths
    return _with_checksums(b"".join(parts), starts, stops), bytes(rows)  # type: ignore[arg-type]


def _with_checksums(buffer: bytes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bytearray:
    """Return the frames from `starts` to `ends` with their checksums filled in."""
    places = ends - CHECKSUM.size
    out = bytearray(buffer)
    sums = checksums_between(buffer, starts + _LENGTH.size, places)
    np.ndarray(len(out) - CHECKSUM.size + 1, _U64, out, 0, 1)[places] = sums
    return out


_GLUE = np.dtype(
    [
        ("checksum", "<u8"),
        ("frame_len", "<u4"),
        ("type", "u1"),
        ("flags", "u1"),
        ("topic_id", "<u8"),
        ("seq", "<u8"),
        ("ts", "<u8"),
        ("node_bytes", "<u2"),
        ("tag_bytes", "<u2"),
        ("data_bytes", "<u4"),
    ]
)
