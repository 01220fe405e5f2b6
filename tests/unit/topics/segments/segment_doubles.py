"""Log frames and rows for tests of segments, built independently of the code that reads them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from penstock.topics.segments.build import BuiltRows, build
from penstock.topics.segments.columns import Columns
from penstock.topics.segments.format import HAS_META, HAS_NODE, HAS_TAG, HOLE, Part, SegmentEntry, verify
from penstock.topics.segments.reader import Segment
from penstock.topics.segments.store import SegmentStore

LOG_FILE = 7
TOPIC = 0x0A


@dataclass(frozen=True)
class Written:
    """One record as it was written."""

    payload: bytes
    tag: bytes = b""
    node: bytes = b""
    ts: int = 1_700_000_000_000


def log_frame(seq: int, record: Written, *, topic: int = TOPIC, kind: int = 1) -> bytes:
    flags = (HAS_TAG if record.tag else 0) | (HAS_NODE if record.node else 0) | 4 | 16
    lengths = len(record.node), len(record.tag), len(record.payload)
    body = struct.pack("<BBQQQHHI", kind, flags, topic, seq, record.ts, *lengths)
    body += record.node + record.tag + record.payload
    return struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxh3_64_intdigest(body))


def segment_frame(seq: int, record: Written) -> bytes:
    flags = (HAS_TAG if record.tag else 0) | (HAS_NODE if record.node else 0)
    lengths = len(record.node), len(record.tag), len(record.payload)
    body = struct.pack("<BQQHHI", flags, seq, record.ts, *lengths)
    body += record.node + record.tag + record.payload
    return struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxh3_64_intdigest(body))


def log_of(
    records: list[Written], first_seq: int = 1, gap: int = 0, file: int = LOG_FILE
) -> tuple[Columns, bytes]:
    """Return rows, and a log file with their records, each after `gap` foreign bytes."""
    rows, log = Columns(first_seq), bytearray()
    for place, record in enumerate(records):
        log += b"\xee" * gap
        frame = log_frame(first_seq + place, record)
        flags = (HAS_TAG if record.tag else 0) | (HAS_NODE if record.node else 0)
        flags |= HAS_META if b'"m":' in record.payload else 0
        rows.append_row(
            file, len(log), len(frame), record.ts, flags, len(frame) - len(record.payload) + len(b'{"d":}')
        )
        log += frame
    return rows, bytes(log)


def built_of(records: list[Written], first_seq: int = 1, data_offset: int = 0) -> BuiltRows:
    rows, log = log_of(records, first_seq)
    return build(rows, lambda _file: memoryview(log), data_offset=data_offset)


def some_records(count: int, start: int = 0) -> list[Written]:
    """Return records of every shape: plain, with a tag, with a node, with both, with meta."""
    return [
        Written(
            payload=b'{"d":%d%b}' % (place, b',"m":{"k":1}' if place % 5 == 0 else b""),
            tag=b"tag-%d" % (place % 3) if place % 2 else b"",
            node=b"node" if place % 4 < 2 else b"",
            ts=1_700_000_000_000 + place,
        )
        for place in range(start, start + count)
    ]


def read_back(segment: Segment) -> list[Written | None]:
    """Return every record of a segment, with None for a hole or a deleted one. Raise read errors."""
    base, data = segment.read(0, len(segment.rows))
    found: list[Written | None] = []
    for place, row in enumerate(segment.rows):
        if row["flags"] & HOLE or segment.deleted[place]:
            found.append(None)
            continue
        record = verify(data, row, segment.first_seq + place, base)
        found.append(
            Written(bytes(record.payload), bytes(record.tag), bytes(record.node), record.ts),
        )
    return found


def stored_parts(store: SegmentStore, entry: SegmentEntry) -> dict[Part, bytes]:
    return {
        part: store.view(entry.first_seq, part).tobytes()
        for part in Part
        if store.exists(entry.first_seq, part)
    }
