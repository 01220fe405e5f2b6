"""The way of copies into their destination: encoded, committed together with the cursor, published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.control import write_head_watermark
from penstock.topics.copying import copies
from penstock.topics.forward import BY_VALUE, LOST_SOURCE, CopyRun, Forward, runs_of
from penstock.topics.frame import EncodedBatch, FrameType, encode, encode_control
from penstock.topics.router import EXACTLY_ONCE
from penstock.topics.router_table import Router
from penstock.topics.selection import Selection, style_of
from penstock.topics.topic import Topic

__all__ = ["Forwarding", "submit"]


class Forwarding:
    """A pass that is on its way into the destination; `outcome` says whether it got there."""

    __slots__ = ("_base", "_batch", "_forward", "_now_ms", "_on_published", "_reserved", "_router", "outcome")

    def __init__(
        self,
        router: Router,
        forward: Forward,
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
                router.dest.lose(run.records)
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
    router: Router, picked: Selection, *, now_ms: int, on_published: Callable[[Topic], None]
) -> asyncio.Future[bool]:
    """Send copies and cursor on their way, together or not at all; the shard has been asked for room."""
    dest = router.dest
    dest.shard.send_held()
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
    forwarding = Forwarding(router, forward, batch, now_ms=now_ms, on_published=on_published)
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


def _forward(router: Router, picked: Selection) -> Forward:
    lost = (CopyRun(LOST_SOURCE, picked.lost),) if picked.lost else ()
    return Forward(
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
        dest.take_off(batch.count, batch.accounted_bytes, batch.ts_ms)
