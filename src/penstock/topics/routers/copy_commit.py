"""One pass of a router: select the next records of the source, encode the copies, commit them and the cursor.

A pass takes the records after the router's cursor, as far as its destination has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.limits import ROUTER_HOPS_MAX, ROUTER_PASS_RECORDS_MAX
from penstock.topics.log.control import write_head_watermark
from penstock.topics.log.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.log.recovery import ADOPTED_FROM
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
from penstock.topics.topic.topic import Topic

PASS_RECORDS_MAX: Final = ROUTER_PASS_RECORDS_MAX
PASS_BYTES_MAX: Final = 1024**2
"""Accounted bytes of one pass, unless a single record has more."""
PASS_ROWS_MAX: Final = 1024
"""Rows that one pass looks at, however few of them it takes: other work waits meanwhile."""
_COLD_ROWS: Final = 256
_REFERABLE: Final = (Durability.DISK, Durability.FSYNC)
"""Classes that never give a sequence number to a second record."""


class Room(NamedTuple):
    """What the destination has room for; None sets no bound."""

    records: int | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, dest: Topic, total_left: int | None) -> Room:
        """The room in a topic that rejects what is too much, and in all topics together."""
        config, index = dest.config, dest.index
        if config.discard != "reject":
            return cls(None, total_left)
        records = config.cap_records - index.live - dest.in_flight if config.cap_records else None
        size = config.cap_bytes - index.live_bytes - dest.in_flight_bytes if config.cap_bytes else None
        bounds = [bound for bound in (size, total_left) if bound is not None]
        return cls(records, min(bounds, default=None))

    def takes(self, count: int, size: int) -> bool:
        fits = self.records is None or count <= self.records
        return fits and (self.bytes is None or size <= self.bytes)


class ColdBytes(NamedTuple):
    """Rows `start` to `stop - 1` of a run whose bytes are not at hand, and, once fetched, those bytes."""

    run: Columns
    start: int
    stop: int
    base: int = 0
    view: memoryview | None = None


@dataclass(slots=True)
class CopySelection:
    """What one pass does. `cursor` is the router's cursor after it."""

    cursor: int
    lost: int = 0
    """Records that were lost; they come before the copies."""
    records: list[StoredRecord] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)
    size: int = 0
    by_value: bool = False
    blocked: bool = False
    """Whether the next record waits for room in the destination."""
    needs: ColdBytes | None = None
    """What has to be fetched before there is anything to do."""


def style_of(router: Router) -> CopyStyle:
    """How the copies of a router look."""
    return CopyStyle(
        bits=router.config.bits,
        router=router.name,
        source=router.source.name,
        source_id=router.source.id,
        source_epoch=router.source.epoch,
    )


def select(router: Router, room: Room, fetched: ColdBytes | None = None) -> CopySelection:
    """The records that the router copies next. Apply retention to both topics before.

    Those that do not pass the filter, went through too many routers, or are gone by intent are passed over,
    and for `exactly_once` those whose origin stands in the destination already.
    """
    if router.config.bits & EXACTLY_ONCE:
        router.origins.look(router.dest, style_of(router))
    source, picked = router.source, CopySelection(router.cursor)
    bound = _skip_lost(source, picked)
    index, left = source.index, PASS_ROWS_MAX
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
        view, base = source.view(run, file), 0
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
    """Count what the source lost at the cursor; returns where the next such range begins, or the end."""
    floors, at = source.floors, picked.cursor + 1
    picked.lost = max(max(floors.cap, floors.trim) - at, 0)
    at += picked.lost
    while (trim := source.trims.after(at - 1)) is not None and trim[0] <= at:
        picked.lost += trim[1] - at
        at = trim[1]
    picked.cursor = at - 1
    return source.index.head_seq + 1 if trim is None else trim[0]


def _is_full(picked: CopySelection) -> bool:
    return len(picked.records) >= PASS_RECORDS_MAX or picked.size >= PASS_BYTES_MAX


def _is_referable(source: Topic, dest: Topic, run: Columns, file: int) -> bool:
    """Whether a copy can be made again from the source for as long as it is in no segment itself."""
    durability = source.config.durability
    if durability not in _REFERABLE or (dest.config.durable and not source.config.durable):
        return False
    if run.segment:
        return isinstance(run.source, Segment) and not run.source.entry.cold
    return 0 <= file < ADOPTED_FROM


def _take(
    router: Router,
    room: Room,
    picked: CopySelection,
    run: Columns,
    rows: range,
    view: StoredBytes,
    base: int,
) -> bool:
    """Take over the live records of these rows, as far as there is room; whether all were dealt with."""
    match, style, hops = router.config.filter, style_of(router), router.source.hops
    is_once = bool(style.bits & EXACTLY_ONCE)
    earliest_seq = router.source.index.earliest_seq
    start = max(rows.start, earliest_seq - run.first_seq)
    live = start + np.flatnonzero(run.is_live(start, rows.stop)) if start < rows.stop else np.zeros(0, int)
    places: list[int] = live.tolist()
    for place, stored in zip(places, stored_records(run, places, view, base), strict=True):
        seq = run.first_seq + place
        if stored is None:
            # It cannot be read, and never will be: readers of the copy are told so.
            if picked.records:
                return False
            picked.lost, picked.cursor = picked.lost + 1, seq
            continue
        hop = hops.of(seq)
        is_there = is_once and router.origins.takes(seq, router.dest)
        if is_there or hop >= ROUTER_HOPS_MAX or not _passes(match, stored.tag):
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


class CopyCommit:
    """A pass that is being committed to the destination; `outcome` says whether it was."""

    __slots__ = ("_base", "_batch", "_forward", "_now_ms", "_on_published", "_reserved", "_router", "outcome")

    def __init__(
        self,
        router: Router,
        forward: CopyFrame,
        batch: EncodedBatch | None,
        *,
        now_ms: int,
        on_published: Callable[[Topic], None],
    ) -> None:
        self._router = router
        self._forward = forward
        self._batch = batch
        self._now_ms = now_ms
        self._on_published = on_published
        self._base = self._reserved = 0
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def behind(self, base: int, reserved: int) -> None:
        """So many bytes come before the copies in the same entry, and so many numbers are reserved."""
        self._base, self._reserved = base, reserved

    def committed(self, entry: Entry, position: LogPosition) -> None:
        dest = self._router.dest
        dest.reserved_seq = max(dest.reserved_seq, self._reserved)
        if self._forward.by_value:
            self._publish(lambda batch: self._publish_logged(batch, position))
        else:
            self._publish(lambda batch: dest.keep_in_memory(batch, now_ms=self._now_ms))
        self._router.logged_cursor = self._router.cursor
        self._decide(True)

    def _publish_logged(self, batch: EncodedBatch, position: LogPosition) -> None:
        at = position.offset + self._base
        self._router.dest.publish(batch, file=position.file, base=at, now_ms=self._now_ms)

    def keep(self) -> None:
        """Publish the copies of an ephemeral destination without a commit."""
        self._publish(lambda batch: self._router.dest.keep_in_memory(batch, now_ms=self._now_ms))
        self._router.logged_cursor = self._router.cursor
        self._decide(True)

    def _publish(self, show: Callable[[EncodedBatch], None]) -> None:
        router, forward = self._router, self._forward
        # First the cursor: whoever is woken by the copies finds the router where it is.
        router.cursor, router.forwarded_total = forward.cursor, forward.forwarded_total
        if forward.bits & EXACTLY_ONCE:
            router.origins.look(router.dest, style_of(router))
        at = forward.first_seq
        for run in forward.runs:
            if run.source_seq:
                router.dest.hops.add(at, run.records, run.hops)
            else:
                router.dest.mark_lost(run.records)
            at += run.records
        if self._batch is not None:
            show(self._batch)
        router.origins.passed(router.dest, router.cursor)
        self._on_published(router.dest)

    def failed(self, error: PenstockError) -> None:
        self._decide(False)

    def _decide(self, is_done: bool) -> None:
        if not self.outcome.done():
            self.outcome.set_result(is_done)


def submit(
    router: Router, picked: CopySelection, *, now_ms: int, on_published: Callable[[Topic], None]
) -> asyncio.Future[bool]:
    """Send copies and cursor on their way, together or not at all; the shard has been asked for room."""
    dest = router.dest
    dest.shard.flush_pending()
    ts_ms = max(now_ms, dest.last_ts_ms)
    batch = None
    if picked.records:
        batch = encode(
            copies(picked.records),
            topic_id=dest.id,
            first_seq=dest.next_seq + picked.lost,
            ts_ms=ts_ms,
            durable=dest.config.durable,
        )
    forward = _forward(router, picked)
    forwarding = CopyCommit(router, forward, batch, now_ms=now_ms, on_published=on_published)
    if dest.is_ephemeral:
        _take_off(dest, picked.lost, batch)
        forwarding.keep()
        return forwarding.outcome
    frames, reserved = _in_front(dest, batch)
    frames.append(forward.frame(dest.id, ts_ms))
    forwarding.behind(sum(map(len, frames)), reserved)
    copied = [batch.buffer] if batch is not None and picked.by_value else []
    dest.shard.submit(
        [*frames, *copied],
        frames=len(frames) + (len(picked.records) if copied else 0),
        sync=dest.config.durable or reserved > 0 or (picked.lost > 0 and batch is None),
        waiting=forwarding,
    )
    _take_off(dest, picked.lost, batch)
    if batch is not None and not copied:
        router.source.is_referred = True
        # It stays in memory until the next checkpoint, which has to come as if it were in the log.
        dest.shard.submitted_bytes += batch.byte_count
    on_published(dest)
    return forwarding.outcome


def _forward(router: Router, picked: CopySelection) -> CopyFrame:
    lost = (CopyRun(LOST_SOURCE, picked.lost),) if picked.lost else ()
    return CopyFrame(
        router=router.name,
        router_id=router.id,
        source=router.source.name,
        source_id=router.source.id,
        bits=router.config.bits | (BY_VALUE if picked.by_value else 0),
        cursor=picked.cursor,
        forwarded_total=router.forwarded_total + picked.lost + len(picked.records),
        first_seq=router.dest.next_seq,
        runs=(*lost, *runs_of(picked.seqs, picked.hops)),
    )


def _in_front(dest: Topic, batch: EncodedBatch | None) -> tuple[list[bytes], int]:
    """What has to stand before the copies: floors that moved, and numbers that they reserve."""
    frames, reserved = dest.moved_floors(), 0
    if batch is not None and dest.config.durability is Durability.DISK:
        reserved = dest.reservation(batch)
    if reserved:
        frames.append(encode_control(FrameType.HEAD_WATERMARK, dest.id, write_head_watermark(reserved)))
    return frames, reserved


def _take_off(dest: Topic, lost: int, batch: EncodedBatch | None) -> None:
    dest.next_seq += lost
    if batch is not None:
        dest.reserve_seqs(batch.count, batch.accounted_bytes, batch.ts_ms)
