"""Recovery of routers: which ones existed, and the copies that the log only refers to.

The log of a destination names the records of the source that were copied. Every record that such a frame
names is still on disk. No checkpoint is taken while copies are being committed, so each named record was live
at the last checkpoint or was written after it. It is in a segment that the snapshot names, or in the log
after it. A record that was deleted or evicted meanwhile is only marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import Corrupt
from penstock.topics.errors import Damaged
from penstock.topics.log.frame import FrameType, encode
from penstock.topics.log.frame_scan import FrameTable
from penstock.topics.routers.copy_frame import (
    CopyFrame,
    CopyStyle,
    StoredRecord,
    copies,
    stored_records,
    styled,
)
from penstock.topics.routers.model import RouterEntry, decode_created
from penstock.topics.segments.columns import Columns
from penstock.topics.segments.reader import Segment
from penstock.topics.topic.topic import Topic


class LostOriginals(NamedTuple):
    """Consecutive copied records of a source that cannot be found."""

    source_id: int
    first_seq: int
    records: int
    ts_ms: int
    """The timestamp of the copies."""


class SourceFrames:
    """The records of one topic on disk, live or not: `tables` of its log, `runs` of its segments."""

    def __init__(self, tables: Sequence[FrameTable], runs: Sequence[Columns]) -> None:
        self._runs = runs
        self._tables = [_appended(table) for table in tables]
        self._seqs: list[npt.NDArray[np.uint64]] = [table.heads["seq"] for table in self._tables]

    def records(self, first_seq: int, count: int) -> Iterator[StoredRecord | None]:
        """Yield the records one by one, or None for a record that is missing or unreadable."""
        at, end = first_seq, first_seq + count
        while at < end:
            found = self._from_log(at, end) or self._from_segment(at, end)
            for record in found or [None]:
                yield record
                at += 1

    def _from_log(self, first_seq: int, end_seq: int) -> list[StoredRecord | None]:
        """Return the records from `first_seq` on that are consecutive in one file."""
        for table, seqs in zip(self._tables, self._seqs, strict=True):
            low, high = np.searchsorted(seqs, np.array([first_seq, end_seq], np.uint64)).tolist()
            if low == high or int(seqs[low]) != first_seq:
                continue
            jumps = np.flatnonzero(np.diff(seqs[low:high].astype(np.int64)) != 1)
            places = np.arange(low, low + int(jumps[0]) + 1 if len(jumps) else high)
            run = Columns(first_seq)
            run.append_rows(0, 0, table.of(places).index_rows())
            return list(stored_records(run, range(run.count), table.view))
        return []

    def _from_segment(self, first_seq: int, end_seq: int) -> list[StoredRecord | None]:
        for run in self._runs:
            if not run.first_seq <= first_seq < run.end_seq or not isinstance(run.source, Segment):
                continue
            start, stop = first_seq - run.first_seq, min(end_seq, run.end_seq) - run.first_seq
            try:
                base, view = run.source.read(start, stop)
            except Damaged:
                return []
            return list(stored_records(run, range(start, stop), view, base))
        return []


class CopyReplay:
    """The replay of copies. `frames_of` returns the records of a topic; `lost` is called for missing ones."""

    def __init__(
        self, frames_of: Callable[[int], SourceFrames], lost: Callable[[Topic, LostOriginals], None]
    ) -> None:
        self._frames_of = frames_of
        self._lost = lost

    def apply(self, topic: Topic, copy: CopyFrame, ts_ms: int) -> None:
        """Restore the copies of one pass. Copies that the destination already has are left alone."""
        at = copy.first_seq
        for run in copy.runs:
            known = max(min(topic.log.index.head_seq + 1 - at, run.records), 0)
            if known < run.records:
                if not run.source_seq:
                    topic.mark_lost(run.records - known)
                elif not copy.by_value:
                    self._copy(topic, copy, run.source_seq + known, run.records - known, ts_ms)
            if run.source_seq:
                topic.log.hops.add(at, run.records, run.hops)
            at += run.records

    def _copy(self, topic: Topic, copy: CopyFrame, source_seq: int, count: int, ts_ms: int) -> None:
        style = CopyStyle(
            bits=copy.bits,
            router=copy.router,
            source=copy.source,
            source_id=copy.source_id,
            source_epoch=copy.source_id,
        )
        found = self._frames_of(copy.source_id).records(source_seq, count)
        for _, group in groupby(found, key=lambda record: record is not None):
            part = list(group)
            records = [styled(record, style) for record in part if record is not None]
            source_seq += len(part)
            if not records:
                first_seq = source_seq - len(part)
                self._lost(topic, LostOriginals(copy.source_id, first_seq, len(part), ts_ms))
                continue
            topic.log.restore_copies(
                encode(
                    copies(records),
                    topic_id=topic.id,
                    first_seq=topic.log.index.head_seq + 1,
                    ts_ms=ts_ms,
                    durable=topic.config.durable,
                )
            )


def _appended(table: FrameTable) -> FrameTable:
    """Return the record frames, in order of their sequence numbers."""
    places = np.flatnonzero(table.heads["type"] == FrameType.APPEND)
    return table.of(places[np.argsort(table.heads["seq"][places], kind="stable")])


class RouterRecovery:
    """The routers that frames describe. `found` returns the result."""

    def __init__(self, entries: Iterable[RouterEntry]) -> None:
        self._entries = {entry.id: entry for entry in entries}
        self._gone: set[int] = set()
        self._passes: dict[int, CopyFrame] = {}
        self.sources: set[int] = set()
        """The ids of topics whose records must be copied again."""
        self.lowered = False
        """Whether a source has fewer records than its router had seen. See `found`."""
        self.problems: list[str] = []

    @property
    def ids(self) -> set[int]:
        """Return every id that a router has or had."""
        return self._entries.keys() | self._gone | self._passes.keys()

    def feeds(self, topic_id: int) -> bool:
        """Return whether a router copies, or copied, into this topic."""
        return any(entry.dest_id == topic_id for entry in self._entries.values())

    def read(self, frames: FrameTable) -> None:
        """Read frames that belong to no topic, in the order in which they were written."""
        kinds, ids = frames.heads["type"], frames.heads["seq"]
        for place in np.flatnonzero((kinds == FrameType.ROUTER_CREATE) | (kinds == FrameType.ROUTER_DELETE)):
            router_id = int(ids[place])
            if kinds[place] == FrameType.ROUTER_DELETE:
                self._gone.add(router_id)
                continue
            try:
                entry = decode_created(router_id, frames.body(int(place)))
            except Corrupt as error:
                self.problems.append(f"a router is lost: {error}")
                continue
            known = self._entries.get(router_id)
            if known is not None:
                entry = _advanced(entry, known.cursor, known.forwarded_total)
            self._entries[router_id] = entry

    def note(self, copy: CopyFrame) -> None:
        """Record a pass, in the order of its destination's log."""
        self._passes[copy.router_id] = copy
        if not copy.by_value:
            self.sources.add(copy.source_id)

    def found(self, topics: Mapping[int, Topic]) -> list[RouterEntry]:
        """Return the routers between these topics, as they were before the start.

        A source without a durability promise may have lost records that were copied. Later records reuse
        their numbers, so the cursor goes back to the head. Until a snapshot stores this, the log would move
        it forward again.
        """
        found: dict[str, RouterEntry] = {}
        for router_id, entry in sorted(self._entries.items()):
            source, dest = topics.get(entry.source_id), topics.get(entry.dest_id)
            if router_id in self._gone or source is None or dest is None:
                continue
            last = self._passes.get(router_id)
            if last is not None:
                entry = _advanced(entry, last.cursor, last.forwarded_total)
            if entry.cursor > source.log.index.head_seq:
                self.lowered = True
                entry = msgspec.structs.replace(entry, cursor=source.log.index.head_seq)
            found[entry.name] = entry
        return list(found.values())


def _advanced(entry: RouterEntry, cursor: int, forwarded_total: int) -> RouterEntry:
    """Return the entry with its cursor and total raised to at least these values."""
    return msgspec.structs.replace(
        entry,
        cursor=max(entry.cursor, cursor),
        forwarded_total=max(entry.forwarded_total, forwarded_total),
    )
