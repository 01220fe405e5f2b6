"""The records of one topic: index, floors, tags, and the sequence numbers of writes in flight.

Everything happens on the event loop's thread, so a method is one atomic step for all others. `next_seq` is
ahead of the published head by what was submitted and is not decided yet; readers see what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from penstock.clock import SteadyClock
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import Damaged, RecordTooLarge, TopicFull
from penstock.topics.log.control import Deletion, Watermarks
from penstock.topics.log.frame import EncodedBatch, FrameType, encode_control
from penstock.topics.log.wal import WalShard
from penstock.topics.model import DeleteResult, Predicate
from penstock.topics.segments.columns import DELETED, NO_FILE, Columns, StoredBytes
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.reader import Segment
from penstock.topics.segments.tags import LogTags, Seqs, TagTable
from penstock.topics.topic.index import Removed, TopicIndex
from penstock.topics.topic.retention import Ages
from penstock.topics.topic.watermarks import HopCounts, LostRanges, LowWatermarks

ATTACHED_FROM: Final = 1 << 62
"""File numbers from here on stand for files of a log directory that the topic does not write to."""
CHUNKS_FROM: Final = 1 << 63
"""File numbers from here on are chunks of memory, the records of an ephemeral topic."""
RESERVE_MIN: Final = 256
RESERVE_BATCHES: Final = 16
"""How far ahead sequence numbers are reserved: one sync for at least this many writes of the same size."""
_PRUNE_AT: Final = 64
_PRUNE_AT_BYTES: Final = 256 * 1024
_NO_BYTES: Final = memoryview(b"")


class TopicLog:
    """The stored state of a topic. `version` rises with every change that a snapshot has to record."""

    shard: WalShard
    """Where the topic's frames go; not there while a recovery builds the topic."""

    def __init__(self, *, name: str, topic_id: int, config: TopicConfig, index: TopicIndex | None) -> None:
        self.version = 0
        self.name = name
        self.topic_id = topic_id
        self.set_config(config)
        self.index = TopicIndex() if index is None else index
        self.floors = LowWatermarks()
        self.tags = LogTags(self.index.head_seq + 1)
        self.ages = Ages()
        self.clock: SteadyClock | None = None
        """Of the engine; none while a recovery builds the topic."""
        self.segments: list[SegmentEntry] = []
        self.delete_below = 0
        self.kept_through = self.index.head_seq
        """Up to here records belong into segments; only an ephemeral topic is ahead of it."""
        self.reserved_seq = 0
        """Durably reserved: a start after a crash continues after it."""
        self.last_ts_ms = 0
        self.last_write_ms: int | None = None
        self.trims = LostRanges()
        self.hops = HopCounts()
        self._chunks: dict[int, StoredBytes] = {}
        self._next_chunk = CHUNKS_FROM
        self._prune_at = _PRUNE_AT
        self._chunk_bytes = 0
        self._prune_at_bytes = _PRUNE_AT_BYTES
        self._logged_floors = (1, 1, 1)
        self.forget_in_flight()

    def set_config(self, config: TopicConfig) -> None:
        """Replace the config without applying it to what is there."""
        self.config = config
        self.is_ephemeral = config.durability is Durability.EPHEMERAL
        self.version += 1

    def settle(self, now_ms: int) -> None:
        """After a recovery: treat everything that was found as written, and its floors as logged."""
        self.kept_through = self.index.head_seq
        floors = self.floors
        self.trims.settle(floors)
        self._logged_floors = (floors.cap, floors.ttl, floors.trim)
        self.forget_in_flight()
        self.ages.start(self.index.head_seq, now_ms)
        self.retain(now_ms)

    def steady_ms(self, now_ms: int) -> int:
        """The engine's steady time, by which leases end and records expire; `now_ms` before it has one."""
        return now_ms if self.clock is None else self.clock.steady_ms()

    def wall_ahead_ms(self) -> int:
        """How far the wall clock, which deadlines are stored and shown in, is ahead of steady time."""
        return 0 if self.clock is None else self.clock.to_wall_ms(0)

    # ---- writes in flight ----------------------------------------------------------------------------

    def forget_in_flight(self) -> None:
        """Nothing that was submitted will be published: the next write takes its sequence numbers."""
        self.next_seq = self.index.head_seq + 1
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._reserving_seq = self.reserved_seq

    def give_up_in_flight(self) -> None:
        """A commit failed. What it was to say about the floors was not said."""
        self._logged_floors = (0, 0, 0)
        self.forget_in_flight()

    @property
    def is_idle(self) -> bool:
        """Whether no write in flight will take a sequence number."""
        return self.next_seq == self.index.head_seq + 1 and not self.in_flight

    def admit(self, count: int, size: int) -> None:
        """Raises `TopicFull` or `RecordTooLarge` if `discard` is `reject` and the write has no room."""
        config = self.config
        if config.discard != "reject":
            return
        cap_records, cap_bytes = config.cap_records, config.cap_bytes
        if (cap_records and count > cap_records) or (cap_bytes and size > cap_bytes):
            raise RecordTooLarge(
                f'{count} records of {size} bytes are more than topic "{self.name}" may ever hold; '
                "split the write or raise the caps"
            )
        full = cap_records and self.index.live + self.in_flight + count > cap_records
        if full or (cap_bytes and self.index.live_bytes + self.in_flight_bytes + size > cap_bytes):
            raise TopicFull(
                f'topic "{self.name}" is full; delete records or raise its caps',
                {
                    "topic": self.name,
                    "cap_records": cap_records,
                    "cap_bytes": cap_bytes,
                    "head_seq": self.index.head_seq,
                    "earliest_seq": self.index.earliest_seq,
                },
            )

    def reserve_seqs(self, count: int, accounted_bytes: int, ts_ms: int) -> None:
        """Give the next sequence numbers to records in flight."""
        self.ages.stamped(self.next_seq, ts_ms, self.steady_ms(ts_ms), self.config.ttl_ms)
        self.next_seq += count
        self.in_flight += count
        self.in_flight_bytes += accounted_bytes
        self.last_ts_ms = ts_ms

    def release_seqs(self, count: int, accounted_bytes: int) -> None:
        """Take back the last numbers: their records are not submitted after all."""
        self.next_seq -= count
        self.in_flight -= count
        self.in_flight_bytes -= accounted_bytes

    def reservation(self, batch: EncodedBatch) -> int:
        """Return the number to reserve before these records are acknowledged without a sync; 0 for none."""
        if batch.last_seq <= self._reserving_seq:
            return 0
        self._reserving_seq = batch.last_seq + max(RESERVE_MIN, RESERVE_BATCHES * batch.count)
        return self._reserving_seq

    def moved_floors(self) -> list[bytes]:
        """A frame with the floors if they rose since they were last written, else nothing.

        It goes in front of whatever is written next, so that no later deletion or change of a cap is replayed
        before the eviction that came first.
        """
        floors = self.floors
        now = (floors.cap, floors.ttl, floors.trim)
        if now == self._logged_floors or not self._kept_something():
            return []
        self._logged_floors = now
        marks = Watermarks(
            cap=floors.cap, earliest_seq=self.index.earliest_seq, ttl=floors.ttl, trim=floors.trim
        )
        return [encode_control(FrameType.EVICT_WATERMARK, self.topic_id, marks.encode())]

    def _kept_something(self) -> bool:
        """Whether the log has records above the floors that were written last."""
        return not self.is_ephemeral or max(self._logged_floors) <= self.kept_through

    # ---- published records ---------------------------------------------------------------------------

    def publish(self, batch: EncodedBatch, *, file: int, base: int, now_ms: int) -> None:
        """Make committed records visible, and evict what they push out."""
        self.version += 1
        self.index.append(batch, file=file, base=base)
        if batch.tags:
            self.tags.append(batch.first_seq, batch.tags)
        self.in_flight -= batch.count
        self.in_flight_bytes -= batch.accounted_bytes
        self.last_write_ms = now_ms
        if not self.is_ephemeral or file < CHUNKS_FROM:
            # Also what was submitted before the topic became ephemeral: its bytes are in the log.
            self.kept_through = self.index.head_seq
        self.retain(now_ms)

    def keep_in_memory(self, batch: EncodedBatch, *, now_ms: int) -> None:
        """Publish the records of an ephemeral topic, whose bytes are kept here."""
        self._next_chunk += 1
        self._chunks[self._next_chunk] = memoryview(batch.buffer)
        self._chunk_bytes += batch.byte_count
        self.publish(batch, file=self._next_chunk, base=0, now_ms=now_ms)

    def mark_lost(self, count: int) -> None:
        """Mark the next sequence numbers as lost: their originals were lost before they were copied."""
        self.version += 1
        first_seq = self.index.head_seq + 1
        self.index.skip_to(first_seq + count - 1)
        self.trims.add(first_seq, first_seq + count)
        self.trims.settle(self.floors)
        self.trims.fold(self.floors, self.index.earliest_seq)
        if not self.is_ephemeral:
            self.kept_through = self.index.head_seq

    def mark_log_lost(self, count: int) -> None:
        """At most `count` sequence numbers after the head were given out and are lost with the log."""
        first_seq = self.index.head_seq + 1
        self.floors.lost.append((first_seq, first_seq + count))
        self.mark_lost(count)

    def restore_copies(self, batch: EncodedBatch) -> None:
        """Append copies as they were before a crash."""
        self._next_chunk += 1
        self._chunks[self._next_chunk] = memoryview(batch.buffer)
        self._chunk_bytes += batch.byte_count
        self.index.append(batch, file=self._next_chunk, base=0)
        self.tags.append(batch.first_seq, batch.tags)
        self.last_write_ms = batch.ts_ms
        self.last_ts_ms = max(self.last_ts_ms, batch.ts_ms)

    def retain(self, now_ms: int) -> None:
        """Evict what is too old or too much. Floors tell readers what they missed."""
        config, index = self.config, self.index
        removed = 0
        if config.ttl_ms and index.live:
            expired = self.ages.expire(index, self.steady_ms(now_ms), config.ttl_ms)
            removed += self._note(expired, self.floors.raise_ttl)
        if config.discard == "old":
            if config.cap_records and index.live > config.cap_records:
                removed += self._note(index.evict_to_count(config.cap_records), self.floors.raise_cap)
            if config.cap_bytes and index.live_bytes > config.cap_bytes:
                removed += self._note(index.evict_to_bytes(config.cap_bytes), self.floors.raise_cap)
        if removed:
            self._let_go_of_chunks()

    def _note(self, removed: Removed, raise_floor: Callable[[Removed], bool]) -> int:
        if removed.records:
            self.version += 1
            raise_floor(removed)
            if self.trims:
                self.trims.settle(self.floors)
        return removed.records

    def _let_go_of_chunks(self) -> None:
        if len(self._chunks) > self._prune_at or self._chunk_bytes > self._prune_at_bytes:
            self._prune_chunks()

    def _prune_chunks(self) -> None:
        self.index.drop_dead_runs()
        needed = self.index.files()
        self._chunks = {number: chunk for number, chunk in self._chunks.items() if number in needed}
        self._chunk_bytes = sum(map(len, self._chunks.values()))
        self._prune_at = max(_PRUNE_AT, 2 * len(self._chunks))
        self._prune_at_bytes = max(_PRUNE_AT_BYTES, 2 * self._chunk_bytes)
        self.tags.forget_below(self.index.earliest_seq)

    # ---- stored bytes --------------------------------------------------------------------------------

    def view(self, run: Columns, file: int) -> StoredBytes | None:
        """The bytes a run points into; None for a segment that is cold."""
        if not run.segment:
            return self.log_view(file)
        if run.source is None:
            return _NO_BYTES
        segment = self.segment_of(run)
        if segment.entry.cold:
            return None
        try:
            return segment.data()
        except Damaged:
            return _NO_BYTES  # what a reader needs of it is told record by record

    def log_view(self, file: int) -> StoredBytes:
        """The bytes of a log file or a chunk of memory; none for rows that are in no file."""
        if file == NO_FILE:
            return _NO_BYTES
        chunk = self._chunks.get(file)
        return self.shard.view(file) if chunk is None else chunk

    def log_paths(self, files: Iterable[int]) -> dict[int, str] | None:
        """Return the paths of these files; None if the bytes of one are in memory only."""
        paths: dict[int, str] = {}
        for file in files:
            path = None if file in self._chunks else self.shard.path(file)
            if file != NO_FILE and path is None:
                return None
            if path is not None:
                paths[file] = path
        return paths

    def attach_file(self, file: int, view: StoredBytes) -> None:
        """Attach a file that rows point into and that the topic's own log does not have."""
        self._chunks[file] = view

    @property
    def has_chunks(self) -> bool:
        """Whether some of its bytes are not in its own log: copies, until a segment has them."""
        return bool(self._chunks)

    @property
    def chunk_bytes(self) -> int:
        """How many bytes of records are in memory, including some that were removed."""
        return self._chunk_bytes

    def segment_of(self, run: Columns) -> Segment:
        """The segment that a run is the index of."""
        assert isinstance(run.source, Segment)
        return run.source

    def promote(self, segments: Sequence[Segment], entries: list[SegmentEntry]) -> None:
        """Point the index to these segments; `entries` are all that the topic has."""
        for segment in segments:
            run = Columns.of_segment(segment.first_seq, segment.rows, source=segment)
            run.mark(np.flatnonzero(segment.deleted), DELETED)
            self.index.promote(run)
        self.segments = entries
        self.tags.forget_below(self.index.first_log_seq)
        if self._chunks:
            self._prune_chunks()

    # ---- deletions -----------------------------------------------------------------------------------

    def delete(
        self, deletion: Deletion, tables: Mapping[tuple[int, int], TagTable] | None = None
    ) -> DeleteResult:
        """Remove the matching records, none at or above `bound_head`.

        `tables` are tag tables of segments that were loaded ahead, by first sequence number.
        """
        self.version += 1
        index = self.index
        bound = index.head_seq + 1 if deletion.bound_head is None else deletion.bound_head
        before = bound if deletion.before_seq is None else min(deletion.before_seq, bound)
        if deletion.match is not None:
            seqs = self._tagged(deletion.match, tables or {})
            removed = index.delete_seqs(seqs[seqs < np.uint64(before)])
        elif len(deletion.seqs):
            removed = index.delete_seqs(deletion.seqs[deletion.seqs < np.uint64(bound)])
        else:
            removed = index.delete_prefix(before)
            self.delete_below = max(self.delete_below, before)
        if removed.records:
            self._let_go_of_chunks()
        return DeleteResult(
            topic=self.name,
            deleted=removed.records,
            earliest_seq=index.earliest_seq,
            head_seq=index.head_seq,
            count=index.live,
            bytes=index.live_bytes,
        )

    def _tagged(self, match: Predicate, tables: Mapping[tuple[int, int], TagTable]) -> Seqs:
        def table(segment: Segment) -> TagTable:
            # A segment that has grown since its table was loaded has more tags than the table knows.
            loaded = tables.get((segment.first_seq, segment.entry.count))
            return segment.tags() if loaded is None else loaded

        return self.tags.find(match, [table(segment) for segment in self.open_segments()])

    def open_segments(self) -> list[Segment]:
        """The segments that live records are in."""
        return [run.source for run in self.index.runs if run.live and isinstance(run.source, Segment)]

    def deleted_rows(self, run: Columns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which records of a segment were deleted, for its `.del` file."""
        rows = np.zeros(run.count, np.bool_)
        rows[(run.deleted_seqs() - np.uint64(run.first_seq)).astype(np.int64)] = True
        return rows
