"""The records of one topic: index, floors, tags, and the sequence numbers of writes in flight.

All calls run on the event loop's thread, so each method is one atomic step. `next_seq` is ahead of the
published head by the undecided writes. Readers see only published records.
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
"""The first file number for files of a log directory that the topic does not write to."""
CHUNKS_FROM: Final = 1 << 63
"""The first file number for memory chunks, which hold the records of an ephemeral topic."""
RESERVE_MIN: Final = 256
RESERVE_BATCHES: Final = 16
"""How far ahead sequence numbers are reserved: one sync covers at least this many writes of the same size."""
_PRUNE_AT: Final = 64
_PRUNE_AT_BYTES: Final = 256 * 1024
_NO_BYTES: Final = memoryview(b"")


class TopicLog:
    """The stored state of a topic. `version` rises with every change that a snapshot must include."""

    shard: WalShard
    """Where the topic's frames go. Not set while recovery builds the topic."""

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
        """The engine's clock. None while recovery builds the topic."""
        self.segments: list[SegmentEntry] = []
        self.delete_below = 0
        self.kept_through = self.index.head_seq
        """The last record that belongs into a segment. Only an ephemeral topic has later records."""
        self.reserved_seq = 0
        """The last number that is durably reserved. A start after a crash continues after it."""
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
        """Replace the config without applying it to existing records."""
        self.config = config
        self.is_ephemeral = config.durability is Durability.EPHEMERAL
        self.version += 1

    def settle(self, now_ms: int) -> None:
        """Finish recovery: treat all records as written, and their floors as logged."""
        self.kept_through = self.index.head_seq
        floors = self.floors
        self.trims.settle(floors)
        self._logged_floors = (floors.cap, floors.ttl, floors.trim)
        self.forget_in_flight()
        self.ages.start(self.index.head_seq, now_ms)
        self.retain(now_ms)

    def steady_ms(self, now_ms: int) -> int:
        """Return the steady time for leases and expiry, or `now_ms` if there is no clock yet."""
        return now_ms if self.clock is None else self.clock.steady_ms()

    def wall_ahead_ms(self) -> int:
        """Return how far the wall clock is ahead of steady time.

        Deadlines are stored and shown in wall time.
        """
        return 0 if self.clock is None else self.clock.to_wall_ms(0)

    # ---- writes in flight ----------------------------------------------------------------------------

    def forget_in_flight(self) -> None:
        """Drop all submitted writes. The next write takes their sequence numbers."""
        self.next_seq = self.index.head_seq + 1
        self.in_flight = 0
        self.in_flight_bytes = 0
        self._reserving_seq = self.reserved_seq

    def give_up_in_flight(self) -> None:
        """Drop all submitted writes after a failed commit. The floors must be logged again."""
        self._logged_floors = (0, 0, 0)
        self.forget_in_flight()

    @property
    def is_idle(self) -> bool:
        """Return whether no write in flight will take a sequence number."""
        return self.next_seq == self.index.head_seq + 1 and not self.in_flight

    def admit(self, count: int, size: int) -> None:
        """Raise `TopicFull` or `RecordTooLarge` if `discard` is `reject` and the write does not fit."""
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
        """Assign the next sequence numbers to records in flight."""
        self.ages.stamped(self.next_seq, ts_ms, self.steady_ms(ts_ms), self.config.ttl_ms)
        self.next_seq += count
        self.in_flight += count
        self.in_flight_bytes += accounted_bytes
        self.last_ts_ms = ts_ms

    def release_seqs(self, count: int, accounted_bytes: int) -> None:
        """Release the last sequence numbers, because their records will not be submitted."""
        self.next_seq -= count
        self.in_flight -= count
        self.in_flight_bytes -= accounted_bytes

    def reservation(self, batch: EncodedBatch) -> int:
        """Return the number to reserve before these records are acknowledged without a sync, or 0."""
        if batch.last_seq <= self._reserving_seq:
            return 0
        self._reserving_seq = batch.last_seq + max(RESERVE_MIN, RESERVE_BATCHES * batch.count)
        return self._reserving_seq

    def moved_floors(self) -> list[bytes]:
        """Return a frame with the floors if they rose since they were last written, else nothing.

        The frame goes before the next write. Replay then applies the eviction before any later deletion or
        change of a cap.
        """
        floors = self.floors
        now = (floors.cap, floors.ttl, floors.trim)
        if now == self._logged_floors or not self._has_logged_records():
            return []
        self._logged_floors = now
        marks = Watermarks(
            cap=floors.cap, earliest_seq=self.index.earliest_seq, ttl=floors.ttl, trim=floors.trim
        )
        return [encode_control(FrameType.EVICT_WATERMARK, self.topic_id, marks.encode())]

    def _has_logged_records(self) -> bool:
        """Return whether the log has records above the floors that were written last."""
        return not self.is_ephemeral or max(self._logged_floors) <= self.kept_through

    # ---- published records ---------------------------------------------------------------------------

    def publish(self, batch: EncodedBatch, *, file: int, base: int, now_ms: int) -> None:
        """Make committed records visible, and evict the records that exceed the limits."""
        self.version += 1
        self.index.append(batch, file=file, base=base)
        if batch.tags:
            self.tags.append(batch.first_seq, batch.tags)
        self.in_flight -= batch.count
        self.in_flight_bytes -= batch.accounted_bytes
        self.last_write_ms = now_ms
        if not self.is_ephemeral or file < CHUNKS_FROM:
            # This includes writes submitted before the topic became ephemeral: their bytes are in the log.
            self.kept_through = self.index.head_seq
        self.retain(now_ms)

    def keep_in_memory(self, batch: EncodedBatch, *, now_ms: int) -> None:
        """Publish the records of an ephemeral topic and keep their bytes in memory."""
        self._next_chunk += 1
        self._chunks[self._next_chunk] = memoryview(batch.buffer)
        self._chunk_bytes += batch.byte_count
        self.publish(batch, file=self._next_chunk, base=0, now_ms=now_ms)

    def mark_lost(self, count: int) -> None:
        """Mark the next sequence numbers as lost, because their originals were lost before the copy."""
        self.version += 1
        first_seq = self.index.head_seq + 1
        self.index.skip_to(first_seq + count - 1)
        self.trims.add(first_seq, first_seq + count)
        self.trims.settle(self.floors)
        self.trims.fold(self.floors, self.index.earliest_seq)
        if not self.is_ephemeral:
            self.kept_through = self.index.head_seq

    def mark_log_lost(self, count: int) -> None:
        """Mark `count` sequence numbers after the head as lost with the log. This is an upper bound."""
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
        """Evict records that exceed the age or size limits. Floors report the loss to readers."""
        config, index = self.config, self.index
        removed = 0
        if config.ttl_ms and index.live:
            expired = self.ages.expire(index, self.steady_ms(now_ms), config.ttl_ms)
            removed += self._record(expired, self.floors.raise_ttl)
        if config.discard == "old":
            if config.cap_records and index.live > config.cap_records:
                removed += self._record(index.evict_to_count(config.cap_records), self.floors.raise_cap)
            if config.cap_bytes and index.live_bytes > config.cap_bytes:
                removed += self._record(index.evict_to_bytes(config.cap_bytes), self.floors.raise_cap)
        if removed:
            self._maybe_prune_chunks()

    def _record(self, removed: Removed, raise_floor: Callable[[Removed], bool]) -> int:
        if removed.records:
            self.version += 1
            raise_floor(removed)
            if self.trims:
                self.trims.settle(self.floors)
        return removed.records

    def _maybe_prune_chunks(self) -> None:
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
        """Return the bytes that a run points into, or None if its segment is cold."""
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
            return _NO_BYTES  # readers get an error per record instead

    def log_view(self, file: int) -> StoredBytes:
        """Return the bytes of a log file or memory chunk. They are empty for rows without a file."""
        if file == NO_FILE:
            return _NO_BYTES
        chunk = self._chunks.get(file)
        return self.shard.view(file) if chunk is None else chunk

    def log_paths(self, files: Iterable[int]) -> dict[int, str] | None:
        """Return the paths of these files, or None if the bytes of one are only in memory."""
        paths: dict[int, str] = {}
        for file in files:
            path = None if file in self._chunks else self.shard.path(file)
            if file != NO_FILE and path is None:
                return None
            if path is not None:
                paths[file] = path
        return paths

    def attach_file(self, file: int, view: StoredBytes) -> None:
        """Attach a file that rows point into but the topic's own log does not contain."""
        self._chunks[file] = view

    @property
    def has_chunks(self) -> bool:
        """Return whether some bytes are not in its own log. Copies are not, until a segment holds them."""
        return bool(self._chunks)

    @property
    def chunk_bytes(self) -> int:
        """Return how many bytes of records are in memory, including removed ones that are not freed yet."""
        return self._chunk_bytes

    def segment_of(self, run: Columns) -> Segment:
        """Return the segment that a run indexes."""
        assert isinstance(run.source, Segment)
        return run.source

    def promote(self, segments: Sequence[Segment], entries: list[SegmentEntry]) -> None:
        """Point the index to these segments. `entries` lists all segments of the topic."""
        for segment in segments:
            run = Columns.of_segment(segment.first_seq, segment.rows, source=segment)
            run.mark(np.flatnonzero(segment.deleted), DELETED)
            self.index.promote(run)
        self.segments = entries
        self.tags.forget_below(self.index.first_log_seq)
        if self._chunks:
            self._prune_chunks()

    # ---- deletion ------------------------------------------------------------------------------------

    def delete(
        self, deletion: Deletion, tables: Mapping[tuple[int, int], TagTable] | None = None
    ) -> DeleteResult:
        """Remove the matching records below `bound_head`.

        `tables` holds preloaded tag tables of segments, by first sequence number and count.
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
            self._maybe_prune_chunks()
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
            # If a segment has grown since its table was loaded, the loaded table lacks some tags.
            loaded = tables.get((segment.first_seq, segment.entry.count))
            return segment.tags() if loaded is None else loaded

        return self.tags.find(match, [table(segment) for segment in self.open_segments()])

    def open_segments(self) -> list[Segment]:
        """Return the segments that hold live records."""
        return [run.source for run in self.index.runs if run.live and isinstance(run.source, Segment)]

    def deleted_rows(self, run: Columns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which records of a segment were deleted, for its `.del` file."""
        rows = np.zeros(run.count, np.bool_)
        rows[(run.deleted_seqs() - np.uint64(run.first_seq)).astype(np.int64)] = True
        return rows
