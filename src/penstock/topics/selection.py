"""Which records a router deals with next: those behind its cursor, as far as its destination has room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from penstock.topics.columns import Columns
from penstock.topics.config import Durability
from penstock.topics.copying import CopyStyle, StoredRecord, stored_records, styled
from penstock.topics.limits import ROUTER_HOPS_MAX, ROUTER_PASS_RECORDS_MAX
from penstock.topics.model import Predicate
from penstock.topics.recovery import ADOPTED_FROM
from penstock.topics.rendering import is_meant
from penstock.topics.router import EXACTLY_ONCE
from penstock.topics.router_table import Router
from penstock.topics.segment_reader import Segment
from penstock.topics.stored_bytes import StoredBytes
from penstock.topics.topic import Topic

__all__ = [
    "PASS_BYTES_MAX",
    "PASS_RECORDS_MAX",
    "PASS_ROWS_MAX",
    "ColdBytes",
    "Room",
    "Selection",
    "select",
    "style_of",
]

PASS_RECORDS_MAX: Final = ROUTER_PASS_RECORDS_MAX
PASS_BYTES_MAX: Final = 1024**2
"""Accounted bytes of one pass, unless a single record has more."""
PASS_ROWS_MAX: Final = 1024
"""Rows that one pass looks at, however few of them it takes: meanwhile nobody else gets a turn."""
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
class Selection:
    """What one pass does. `cursor` is where the router stands after it."""

    cursor: int
    lost: int = 0
    """Records that are gone; they come before the copies."""
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


def select(router: Router, room: Room, fetched: ColdBytes | None = None) -> Selection:
    """The records that the router deals with next; retention of both topics comes before.

    Those that do not pass the filter, went through too many routers, or are gone by intent are passed over,
    and for `exactly_once` those whose origin stands in the destination already.
    """
    if router.config.bits & EXACTLY_ONCE:
        router.origins.look(router.dest, style_of(router))
    source, picked = router.source, Selection(router.cursor)
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


def _skip_lost(source: Topic, picked: Selection) -> int:
    """Count what the source lost at the cursor; returns where the next such range begins, or the end."""
    floors, at = source.floors, picked.cursor + 1
    picked.lost = max(max(floors.cap, floors.trim) - at, 0)
    at += picked.lost
    while (trim := source.trims.after(at - 1)) is not None and trim[0] <= at:
        picked.lost += trim[1] - at
        at = trim[1]
    picked.cursor = at - 1
    return source.index.head_seq + 1 if trim is None else trim[0]


def _is_full(picked: Selection) -> bool:
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
    picked: Selection,
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
