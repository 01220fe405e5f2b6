"""One pass of a router: select records, encode their copies, and commit the copies and the cursor.

A pass takes the records after the router's cursor, up to the room in its destination.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.limits import ROUTER_HOPS_MAX, ROUTER_PASS_RECORDS_MAX
from penstock.topics.log.control import write_head_watermark
from penstock.topics.log.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.model import Predicate
from penstock.topics.read.render import is_meant
from penstock.topics.routers.copy_frame import (
    BY_VALUE,
    LOST_SOURCE,
    CopyFrame,
    CopyRun,
    CopyStyle,
    StoredRecord,
    copies,
    runs_of,
    stored_records,
    styled,
)
from penstock.topics.routers.model import EXACTLY_ONCE
from penstock.topics.routers.table import Router
from penstock.topics.segments.columns import Columns, StoredBytes
from penstock.topics.segments.reader import Segment
from penstock.topics.topic.changes import PendingCommit
from penstock.topics.topic.topic import Topic
from penstock.topics.topic.topic_log import ATTACHED_FROM

PASS_RECORDS_MAX: Final = ROUTER_PASS_RECORDS_MAX
PASS_BYTES_MAX: Final = 1024**2
"""The limit of accounted bytes per pass, unless a single record is larger."""
PASS_ROWS_MAX: Final = 1024
"""The rows that one pass examines at most, even if it selects few. Other work waits meanwhile."""
_COLD_ROWS: Final = 256
_REFERABLE: Final = (Durability.DISK, Durability.FSYNC)
"""Durability classes that never reuse a sequence number."""


class Room(NamedTuple):
    """The room in a destination; None means no limit."""

    records: int | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, dest: Topic, total_left: int | None) -> Room:
        """Return the room in a topic that rejects writes when full, and in all topics together."""
        config, index = dest.config, dest.log.index
        if config.discard != "reject":
            return cls(None, total_left)
        records = config.cap_records - index.live - dest.log.in_flight if config.cap_records else None
        size = config.cap_bytes - index.live_bytes - dest.log.in_flight_bytes if config.cap_bytes else None
        bounds = [bound for bound in (size, total_left) if bound is not None]
        return cls(records, min(bounds, default=None))

    def takes(self, count: int, size: int) -> bool:
        fits = self.records is None or count <= self.records
        return fits and (self.bytes is None or size <= self.bytes)


class ColdBytes(NamedTuple):
    """Rows `start` to `stop - 1` of a run whose bytes must be fetched, with the bytes once fetched."""

    run: Columns
    start: int
    stop: int
    base: int = 0
    view: memoryview | None = None


@dataclass(slots=True)
class CopySelection:
    """The records that one pass copies. `cursor` is the router's cursor after it."""

    cursor: int
    lost: int = 0
    """The number of records that were lost. They come before the copies."""
    records: list[StoredRecord] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)
    size: int = 0
    by_value: bool = False
    blocked: bool = False
    """Whether the next record waits for room in the destination."""
    needs: ColdBytes | None = None
    """The bytes that must be fetched before anything can be copied."""


def style_of(router: Router) -> CopyStyle:
    """Return the style of the copies of a router."""
    return CopyStyle(
        bits=router.config.bits,
        router=router.name,
        source=router.source.name,
        source_id=router.source.id,
        source_epoch=router.source.epoch,
    )


def select(router: Router, room: Room, fetched: ColdBytes | None = None) -> CopySelection:
    """Select the records that the router copies next. Apply retention to both topics first.

    Skip records that do not pass the filter, that went through too many routers, or that were deleted. With
    `exactly_once`, also skip records whose origin is already in the destination.
    """
    if router.config.bits & EXACTLY_ONCE:
        router.dedup_window.look(router.dest, style_of(router))
    source, picked = router.source, CopySelection(router.cursor)
    bound = _skip_lost(source, picked)
    index, left = source.log.index, PASS_ROWS_MAX
    while picked.cursor + 1 < bound and left and not picked.blocked and not _is_full(picked):
        at = max(picked.cursor + 1, min(index.earliest_seq, bound))
        found = index.run_from(at)
        if found is None or found[0].first_seq + found[1] >= bound:
            picked.cursor = bound - 1
            break
        run, start = found
        file, stop = run.file_of(start)
        stop = min(stop, bound - run.first_seq, start + min(left, PASS_RECORDS_MAX - len(picked.records)))
        by_value = not _is_referable(source, router.dest, run, file)
        if picked.records and by_value != picked.by_value:
            break
        view, base = source.log.view(run, file), 0
        if view is None:
            if fetched is None or fetched.run is not run or not fetched.start <= start < fetched.stop:
                if not picked.records and not picked.lost:
                    picked.needs = ColdBytes(run, start, min(stop, start + _COLD_ROWS))
                break
            stop, base, view = min(stop, fetched.stop), fetched.base, fetched.view
            assert view is not None
        picked.by_value = by_value
        left -= stop - start
        if not _take(router, room, picked, run, range(start, stop), view, base):
            break
    return picked


def _skip_lost(source: Topic, picked: CopySelection) -> int:
    """Count what the source lost at the cursor. Return where the next lost range begins, or the end."""
    floors, at = source.log.floors, picked.cursor + 1
    picked.lost = max(max(floors.cap, floors.trim) - at, 0)
    at += picked.lost
    while (trim := source.log.trims.after(at - 1)) is not None and trim[0] <= at:
        picked.lost += trim[1] - at
        at = trim[1]
    picked.cursor = at - 1
    return source.log.index.head_seq + 1 if trim is None else trim[0]


def _is_full(picked: CopySelection) -> bool:
    return len(picked.records) >= PASS_RECORDS_MAX or picked.size >= PASS_BYTES_MAX


def _is_referable(source: Topic, dest: Topic, run: Columns, file: int) -> bool:
    """Return whether a copy can be made again from the source until it is in a segment itself."""
    durability = source.config.durability
    if durability not in _REFERABLE or (dest.config.durable and not source.config.durable):
        return False
    if run.segment:
        return isinstance(run.source, Segment) and not run.source.entry.cold
    return 0 <= file < ATTACHED_FROM


def _take(
    router: Router,
    room: Room,
    picked: CopySelection,
    run: Columns,
    rows: range,
    view: StoredBytes,
    base: int,
) -> bool:
    """Select the live records of these rows, up to the room. Return whether all rows were processed."""
    match, style, hops = router.config.filter, style_of(router), router.source.log.hops
    is_once = bool(style.bits & EXACTLY_ONCE)
    earliest_seq = router.source.log.index.earliest_seq
    start = max(rows.start, earliest_seq - run.first_seq)
    live = start + np.flatnonzero(run.is_live(start, rows.stop)) if start < rows.stop else np.zeros(0, int)
    places: list[int] = live.tolist()
    for place, stored in zip(places, stored_records(run, places, view, base), strict=True):
        seq = run.first_seq + place
        if stored is None:
            # The record can never be read, so readers of the copy get a tombstone.
            if picked.records:
                return False
            picked.lost, picked.cursor = picked.lost + 1, seq
            continue
        hop = hops.of(seq)
        is_present = is_once and router.dedup_window.takes(seq, router.dest)
        if is_present or hop >= ROUTER_HOPS_MAX or not _passes(match, stored.tag):
            picked.cursor = seq
            continue
        record = styled(stored, style)
        if not room.takes(len(picked.records) + 1, picked.size + record.accounted):
            picked.blocked, picked.cursor = True, seq - 1
            return False
        picked.records.append(record)
        picked.seqs.append(seq)
        picked.hops.append(hop + 1)
        picked.size += record.accounted
        picked.cursor = seq
        if _is_full(picked):
            return False
    picked.cursor = run.first_seq + rows.stop - 1
    return True


def _passes(match: Predicate | None, tag: bytes | None) -> bool:
    return match is None or (tag is not None and is_meant(match, tag))


class CopyPass:
    """One pass, and the publication of its copies after the commit."""

    __slots__ = ("_batch", "_copy", "_now_ms", "_on_published", "_router", "base", "reserved")

    def __init__(
        self,
        router: Router,
        copy: CopyFrame,
        batch: EncodedBatch | None,
        *,
        now_ms: int,
        on_published: Callable[[Topic], None],
    ) -> None:
        self._router = router
        self._copy = copy
        self._batch = batch
        self._now_ms = now_ms
        self._on_published = on_published
        self.base = 0
        """How many bytes precede the copies in the same entry."""
        self.reserved = 0

    def publish(self, entry: Entry, position: LogPosition) -> None:
        """Publish the copies after the commit of their entry."""
        log = self._router.dest.log
        log.reserved_seq = max(log.reserved_seq, self.reserved)
        if self._copy.by_value:
            self._publish(lambda batch: self._publish_logged(batch, position))
        else:
            self.keep()

    def _publish_logged(self, batch: EncodedBatch, position: LogPosition) -> None:
        at = position.offset + self.base
        self._router.dest.publish(batch, file=position.file, base=at, now_ms=self._now_ms)

    def keep(self) -> None:
        """Publish copies whose bytes are only in memory."""
        self._publish(lambda batch: self._router.dest.keep_in_memory(batch, now_ms=self._now_ms))

    def _publish(self, show: Callable[[EncodedBatch], None]) -> None:
        router, copy = self._router, self._copy
        # Set the cursor first, so that a subscriber woken by the copies sees the router's position.
        router.cursor, router.forwarded_total = copy.cursor, copy.forwarded_total
        if copy.bits & EXACTLY_ONCE:
            router.dedup_window.look(router.dest, style_of(router))
        at = copy.first_seq
        for run in copy.runs:
            if run.source_seq:
                router.dest.log.hops.add(at, run.records, run.hops)
            else:
                router.dest.mark_lost(run.records)
            at += run.records
        if self._batch is not None:
            show(self._batch)
        router.dedup_window.passed(router.dest, router.cursor)
        self._on_published(router.dest)
        router.logged_cursor = router.cursor


def submit(
    router: Router, picked: CopySelection, *, now_ms: int, on_published: Callable[[Topic], None]
) -> asyncio.Future[None] | None:
    """Commit copies and cursor atomically. Call `WalShard.check_room` first.

    Return None if the copies are already published, because the destination is ephemeral.
    """
    dest = router.dest
    dest.shard.flush_pending()
    ts_ms = max(now_ms, dest.log.last_ts_ms)
    batch = None
    if picked.records:
        batch = encode(
            copies(picked.records),
            topic_id=dest.id,
            first_seq=dest.log.next_seq + picked.lost,
            ts_ms=ts_ms,
            durable=dest.config.durable,
        )
    copy = _copy_frame(router, picked)
    copy_pass = CopyPass(router, copy, batch, now_ms=now_ms, on_published=on_published)
    if dest.is_ephemeral:
        _reserve_seqs(dest, picked.lost, batch)
        copy_pass.keep()
        return None
    frames, copy_pass.reserved = _leading_frames(dest, batch)
    frames.append(copy.frame(dest.id, ts_ms))
    copy_pass.base = sum(map(len, frames))
    copied = [batch.buffer] if batch is not None and picked.by_value else []
    pending = PendingCommit(copy_pass.publish)
    dest.shard.submit(
        [*frames, *copied],
        frames=len(frames) + (len(picked.records) if copied else 0),
        sync=dest.config.durable or copy_pass.reserved > 0 or (picked.lost > 0 and batch is None),
        waiting=pending,
    )
    _reserve_seqs(dest, picked.lost, batch)
    if batch is not None and not copied:
        router.source.is_referred = True
        # The bytes stay in memory until the next checkpoint, so they count towards it like logged bytes.
        dest.shard.submitted_bytes += batch.byte_count
    on_published(dest)
    return pending.outcome


def _copy_frame(router: Router, picked: CopySelection) -> CopyFrame:
    lost = (CopyRun(LOST_SOURCE, picked.lost),) if picked.lost else ()
    return CopyFrame(
        router=router.name,
        router_id=router.id,
        source=router.source.name,
        source_id=router.source.id,
        bits=router.config.bits | (BY_VALUE if picked.by_value else 0),
        cursor=picked.cursor,
        forwarded_total=router.forwarded_total + picked.lost + len(picked.records),
        first_seq=router.dest.log.next_seq,
        runs=(*lost, *runs_of(picked.seqs, picked.hops)),
    )


def _leading_frames(dest: Topic, batch: EncodedBatch | None) -> tuple[list[bytes], int]:
    """Return the frames before the copies, with moved floors, and the numbers they reserve."""
    frames, reserved = dest.log.moved_floors(), 0
    if batch is not None and dest.config.durability is Durability.DISK:
        reserved = dest.log.reservation(batch)
    if reserved:
        frames.append(encode_control(FrameType.HEAD_WATERMARK, dest.id, write_head_watermark(reserved)))
    return frames, reserved


def _reserve_seqs(dest: Topic, lost: int, batch: EncodedBatch | None) -> None:
    dest.log.next_seq += lost
    if batch is not None:
        dest.log.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)
