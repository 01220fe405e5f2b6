"""A small hand-made data directory with every kind of file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.storage import AppendLog, OsFileSystem
from penstock.topics.checkpoints.snapshot import LogStart, Snapshot, TopicEntry, write_snapshot
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.log.frame_scan import WalFormat
from penstock.topics.segments.format import HAS_TAG, IDX_DTYPE, Part, SegmentEntry, checksum, encode_deleted
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.segments.tags import TagTable

FS = OsFileSystem()
_HEAD = struct.Struct("<BQQHHI")


def segment(first_seq: int, count: int, tag: bytes = b"") -> tuple[bytes, bytes]:
    """Return data and index of a segment whose records contain their numbers."""
    data = b""
    rows = np.zeros(count, IDX_DTYPE)
    for place in range(count):
        payload = b'{"d":%d}' % (first_seq + place)
        flags = HAS_TAG if tag else 0
        body = _HEAD.pack(flags, first_seq + place, 1000 + place, 0, len(tag), len(payload)) + tag + payload
        frame = struct.pack("<I", len(body) + 8) + body + struct.pack("<Q", xxh3_64_intdigest(body))
        rows[place]["offset"], rows[place]["length"], rows[place]["ts"] = len(data), len(frame), 1000 + place
        rows[place]["packed"] = flags | (len(frame) - 1) << 8
        data += frame
    return data, rows.tobytes()


def entry(first_seq: int, count: int, *, sealed: bool, deleted: int = 0, tag: bytes = b"") -> SegmentEntry:
    data, idx = segment(first_seq, count, tag)
    return SegmentEntry(
        first_seq=first_seq,
        count=count,
        data_bytes=len(data),
        sealed=sealed,
        cold=False,
        created_ms=1,
        idx_xxh3=checksum(idx),
        deleted=deleted,
    )


def topic_entry(*segments: SegmentEntry, name: str = "clicks", id: int = 1) -> TopicEntry:
    last = segments[-1].end_seq - 1 if segments else 0
    return TopicEntry(
        name=name,
        id=id,
        epoch=1,
        config=b"{}",
        head_seq=last,
        cap_floor=1,
        ttl_floor=1,
        trim_floor=1,
        delete_below=0,
        reserved_head=0,
        last_write_ms=None,
        checkpointed_seq=last,
        segments=segments,
    )


class DataDirectory:
    """Topic 1 with a sealed segment (tags, deletions) and a growing one, one log, and snapshot 3."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = AppendLog.open(FS, str(path / "wal"), WalFormat(), file_bytes=65536)
        self.write_log(5)
        self.root = LocalSegmentRoot(FS, str(path))
        store = self.root.topic(1)
        sealed, growing = segment(1, 10, b"red"), segment(11, 5)
        store.put(1, [sealed[0]], sealed[1])
        store.replace(1, Part.TAGS, TagTable.of(1, {"red": list(range(10))}).encoded(10))
        store.replace(1, Part.DEL, encode_deleted(1, np.arange(10) < 2))
        store.put(11, [growing[0] + b"not yet counted"], growing[1] + b"neither")
        self.entries = [entry(1, 10, sealed=True, deleted=2, tag=b"red"), entry(11, 5, sealed=False)]
        self.snapshot(3)

    def write_log(self, frames: int, seq: int = 0) -> None:
        batch = [
            encode_control(FrameType.HEAD_WATERMARK, 1, struct.pack("<Q", seq + n)) for n in range(frames)
        ]
        self.log.append(batch, sum(map(len, batch)), frames, sync=True)

    def remove_topic(self) -> None:
        """Delete a topic as a server does: first in the log, then the files, and the snapshot later."""
        frame = encode_control(FrameType.TOPIC_DELETE, 1, struct.pack("<I6sI", 6, b"clicks", 0))
        self.log.append([frame], len(frame), 1, sync=True)
        self.root.remove_topic(1)

    def snapshot(self, number: int, *entries: SegmentEntry) -> None:
        file, offset = self.log.end
        made = Snapshot(
            next_topic_id=2,
            created_ms=1,
            wal={"wal": LogStart(file, offset)},
            synced={"wal": LogStart(file, offset)},
            topics=(topic_entry(*(entries or self.entries)),),
        )
        FS.make_dirs(str(self.path / "meta"))
        write_snapshot(FS, str(self.path / "meta"), number, made)

    def damage(self, relative: str, offset: int) -> None:
        path = self.path / relative
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 0x40
        path.write_bytes(raw)

    def active_log(self) -> str:
        return os.path.join("wal", (self.path / "wal" / "CURRENT").read_text().strip())


SEALED = "topics/00000001/seg-0000000000000001"
GROWING = "topics/00000001/seg-0000000000000011"
