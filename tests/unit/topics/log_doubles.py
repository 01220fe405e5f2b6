"""A topic without a disk: log files and segments in memory, and a model of the expected results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.topics.log.frame import EncodedBatch, encode
from penstock.topics.log.payload import prepare
from penstock.topics.model import NewRecord, Page, Predicate, matches
from penstock.topics.read.page import DiffRequest, PageCursor
from penstock.topics.segments.build import build
from penstock.topics.segments.columns import Columns
from penstock.topics.segments.format import IDX_DTYPE
from penstock.topics.segments.tags import LogTags
from penstock.topics.topic.index import TopicIndex
from penstock.topics.topic.watermarks import LowWatermarks

TOPIC_ID = 7
NOW = 1_700_000_000_000
FILE_BYTES = 600


def text_of(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def record(
    data: object = None, *, tag: str | None = None, node: str | None = None, meta: object = None
) -> NewRecord:
    raw_meta = None if meta is None else msgspec.Raw(text_of(meta))
    return NewRecord(data=msgspec.Raw(text_of(data)), tag=tag, node=node, meta=raw_meta)


def encoded(
    records: Sequence[NewRecord], *, first_seq: int = 1, ts_ms: int = NOW, node: str | None = None
) -> EncodedBatch:
    batch = prepare(records, node)
    return encode(batch, topic_id=TOPIC_ID, first_seq=first_seq, ts_ms=ts_ms, durable=True)


@dataclass
class StoredSegment:
    """The data of a segment, and whether it must be fetched before a read."""

    data: bytearray
    cold: bool = False


class MemoryTopic:
    """Index, floors and tags of one topic, used as an engine uses them."""

    def __init__(self) -> None:
        self.index = TopicIndex()
        self.floors = LowWatermarks()
        self.tags = LogTags()
        self.files: dict[int, bytearray] = {1: bytearray()}
        self.now_ms = NOW

    def write(self, records: Sequence[NewRecord], node: str | None = None) -> EncodedBatch:
        first_seq = self.index.head_seq + 1
        batch = encoded(records, first_seq=first_seq, ts_ms=self.now_ms, node=node)
        number = max(self.files)
        if len(self.files[number]) > FILE_BYTES:
            number += 1
            self.files[number] = bytearray(b"\xee" * 13)
        base = len(self.files[number])
        self.files[number] = self.files[number] + bytes(batch.buffer)
        self.index.append(batch, file=number, base=base)
        self.tags.append(first_seq, batch.tags)
        return batch

    def evict(self, *, count: int | None = None, size: int | None = None) -> None:
        if count is not None:
            self.floors.raise_cap(self.index.evict_to_count(count))
        if size is not None:
            self.floors.raise_cap(self.index.evict_to_bytes(size))

    def expire(self, ttl_ms: int) -> None:
        self.floors.raise_ttl(self.index.expire(self.now_ms, ttl_ms))

    def segment_of(self, last_seq: int, copied: Columns | None = None) -> Columns:
        """Build a segment from the log rows up to `last_seq`, as a checkpoint does, without promoting it."""
        rows = self.index.copy(self.index.first_log_seq, last_seq) if copied is None else copied
        built = build(rows, lambda file: memoryview(self.files[file]))
        stored = StoredSegment(bytearray(b"".join(built.data)))
        return Columns.of_segment(rows.first_seq, built.idx, source=stored)

    def extended(self, segment: Columns, last_seq: int) -> Columns:
        """Append the log rows up to `last_seq` to the segment."""
        assert isinstance(segment.source, StoredSegment)
        rows = self.index.copy(segment.end_seq, last_seq)
        data = segment.source.data
        built = build(rows, lambda file: memoryview(self.files[file]), data_offset=len(data))
        idx = segment.index_rows().tobytes() + built.idx
        stored = StoredSegment(data + b"".join(built.data))
        return Columns.of_segment(segment.first_seq, np.frombuffer(idx, IDX_DTYPE), source=stored)

    def promote(self, segment: Columns) -> None:
        self.index.promote(segment)
        self.tags.forget_below(self.index.first_log_seq)

    def view(self, run: Columns, file: int) -> memoryview | None:
        if isinstance(run.source, StoredSegment):
            return None if run.source.cold else memoryview(run.source.data)
        return memoryview(self.files[file])

    def read(self, request: DiffRequest, ttl_ms: int = 0) -> Page:
        walk = PageCursor(self.index, self.floors, request, now_ms=self.now_ms, ttl_ms=ttl_ms)
        while not walk.done:
            needed = walk.step(self.view)
            if needed is not None:
                assert isinstance(needed.run.source, StoredSegment)
                walk.supply(memoryview(needed.run.source.data)[needed.start : needed.stop])
        return walk.page("t")


@dataclass
class ModelRecord:
    ts_ms: int
    record: NewRecord
    node: str | None
    size: int


class Model:
    """The same topic as plain dictionaries."""

    def __init__(self) -> None:
        self.head = 0
        self.live: dict[int, ModelRecord] = {}
        self.cap_floor = self.ttl_floor = 1

    def write(self, records: Iterable[NewRecord], node: str | None, now_ms: int) -> None:
        for new in records:
            self.head += 1
            size = len(bytes(new.data)) + (0 if new.meta is None else len(bytes(new.meta)))
            self.live[self.head] = ModelRecord(now_ms, new, node if new.node is None else new.node, size)

    @property
    def earliest(self) -> int:
        return min(self.live, default=self.head + 1)

    @property
    def floor(self) -> int:
        return max(self.cap_floor, self.ttl_floor)

    @property
    def bytes(self) -> int:
        return sum(kept.size for kept in self.live.values())

    def evict(self, *, count: int | None = None, size: int | None = None) -> None:
        while (count is not None and len(self.live) > count) or (size is not None and self.bytes > size):
            seq = self.earliest
            del self.live[seq]
            self.cap_floor = max(self.cap_floor, seq + 1)

    def expire(self, now_ms: int, ttl_ms: int) -> None:
        while self.live and ttl_ms and now_ms - self.live[self.earliest].ts_ms > ttl_ms:
            seq = self.earliest
            del self.live[seq]
            self.ttl_floor = max(self.ttl_floor, seq + 1)

    def delete(self, seqs: Iterable[int]) -> int:
        return sum(self.live.pop(seq, None) is not None for seq in list(seqs))

    def matching(self, predicate: Predicate) -> list[int]:
        return [seq for seq, kept in self.live.items() if matches(predicate, kept.record.tag)]

    def read(self, request: DiffRequest, now_ms: int, ttl_ms: int) -> tuple[list[dict[str, object]], int]:
        """Return the records of a page, and the cursor after it."""
        behind = request.from_seq if request.from_seq <= self.head else 0
        cursor = max(behind, self.earliest - 1)
        out: list[dict[str, object]] = []
        size = 0
        while cursor < self.head and len(out) < request.limit:
            kept = self.live.get(cursor + 1)
            own = kept is not None and kept.node is not None and kept.node.encode() in request.nodes
            if kept is not None and not own and not (ttl_ms and now_ms - kept.ts_ms > ttl_ms):
                if out and size + kept.size > request.max_batch_bytes:
                    break
                size += kept.size
                out.append(self._shown(cursor + 1, kept, request))
            cursor += 1
        return out, cursor

    @staticmethod
    def _shown(seq: int, kept: ModelRecord, request: DiffRequest) -> dict[str, object]:
        shown: dict[str, object] = {"$seq": seq, "$ts": kept.ts_ms}
        if kept.node is not None:
            shown["$node"] = kept.node
        if kept.record.tag is not None and request.include_tags:
            shown["$tag"] = kept.record.tag
        shown["data"] = json.loads(bytes(kept.record.data))
        if kept.record.meta is not None and request.include_meta:
            shown["meta"] = json.loads(bytes(kept.record.meta))
        return shown
