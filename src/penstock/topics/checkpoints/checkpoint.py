"""Checkpoints: move records from the log into segments, to keep the log short and reads cheap.

A checkpoint captures all topics in one step of the event loop. Everything committed before that step is in
the captured state. Everything later is after the captured log positions.

1. `capture` copies the rows that are only in the log, and the floors, deletions and segments of every topic.
2. `store` writes segments and deletion files, then a snapshot that names them. The snapshot marks segments
   that were already copied to the cold tier as cold. Nothing refers to the new files until the snapshot is
   durable, so a crash at any point leaves the earlier state.
3. The engine adds the new segments to the index, and removes unneeded log files and segments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
import numpy as np

from penstock.storage import FileSystem, LogPosition
from penstock.topics.checkpoints.snapshot import LogStart, Snapshot, TopicEntry, write_snapshot
from penstock.topics.config import EngineConfig
from penstock.topics.errors import Damaged
from penstock.topics.routers.model import RouterEntry
from penstock.topics.segments.columns import Columns, StoredBytes
from penstock.topics.segments.format import DeletedRows, SegmentEntry
from penstock.topics.segments.growth import FramesLost, Growth, SegmentProcess, grow, sealed
from penstock.topics.segments.reader import Segment
from penstock.topics.segments.tiering import Tiers, TopicTier
from penstock.topics.topic.topic import Topic

_CONFIG = msgspec.json.Encoder()
_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TopicCut:
    """One topic at the moment of the cut, and the files written for it."""

    topic: Topic
    version: int
    entry: TopicEntry
    rows: list[Columns]
    """Copies of the rows that are only in the log and have live records, split at long holes."""
    views: dict[int, StoredBytes]
    """The bytes of the log files that the rows point into."""
    files: dict[int, str] | None
    """The same files by path. None if some of the bytes are only in memory."""
    deleted: dict[int, DeletedRows]
    """By first sequence number: the deleted rows of segments whose deletion file must be rewritten."""
    dead: list[int]
    """Segments without a live record."""
    segments: list[SegmentEntry] = field(default_factory=list)
    grown: list[Segment] = field(default_factory=list)
    """Segments that are new, have grown, were sealed, or have moved."""
    moved: list[SegmentEntry] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Cut:
    """All topics at one moment, with the position of that moment in each log."""

    topics: list[TopicCut]
    wal: Mapping[str, LogPosition]
    next_topic_id: int
    now_ms: int
    routers: tuple[RouterEntry, ...] = ()
    synced: Mapping[str, LogPosition] = field(default_factory=dict)
    """How far each log was durable at that moment."""
    lost_seq: int = 0


Known: TypeAlias = Mapping[int, tuple[int, TopicEntry]]
"""By topic id: the version of the topic that was stored last, and its entry."""
_NOTHING_KNOWN: Final[Known] = {}


def capture(
    topics: Iterable[Topic],
    wal: Mapping[str, LogPosition],
    next_topic_id: int,
    now_ms: int,
    routers: Iterable[RouterEntry] = (),
    known: Known = _NOTHING_KNOWN,
) -> Cut:
    """Capture the content of a snapshot of this moment.

    No step of the event loop may come between this call and reading the positions. `known` is the state
    stored by the last checkpoint; topics that have not changed since are not captured again.
    """
    return Cut(
        topics=[_capture_topic(topic, known.get(topic.id)) for topic in topics],
        wal=dict(wal),
        next_topic_id=next_topic_id,
        now_ms=now_ms,
        routers=tuple(routers),
    )


def _capture_topic(topic: Topic, known: tuple[int, TopicEntry] | None) -> TopicCut:
    version = topic.version
    if known is not None and known[0] == version:
        # Nothing has changed since the last cut. With many topics, this holds for most of them.
        return TopicCut(
            topic=topic,
            version=version,
            entry=known[1],
            rows=[],
            views={},
            files=None,
            deleted={},
            dead=[],
            segments=list(topic.log.segments),
        )
    index, floors = topic.log.index, topic.log.floors
    index.drop_dead_runs()
    stored = {run.first_seq for run in index.runs if run.segment}
    dead = {segment.first_seq for segment in topic.log.segments if segment.first_seq not in stored}
    kept_through = topic.log.kept_through
    first, last = max(index.first_log_seq, index.earliest_seq), kept_through
    parts = index.stretches(first, last) if first <= last and index.live else ()
    rows = [part for part in (index.copy(*ends) for ends in parts) if part.live]
    cap_floor = floors.cap
    if topic.is_ephemeral and index.head_seq > kept_through and index.earliest_seq > kept_through:
        # Records that are only in memory are lost with the process. Readers must get a tombstone for them.
        cap_floor = max(cap_floor, index.head_seq + 1) if index.live else cap_floor
    entry = TopicEntry(
        name=topic.name,
        id=topic.id,
        epoch=topic.epoch,
        config=_CONFIG.encode(topic.config),
        head_seq=index.head_seq,
        cap_floor=cap_floor,
        ttl_floor=floors.ttl,
        trim_floor=floors.trim,
        delete_below=topic.log.delete_below,
        reserved_head=topic.log.reserved_seq,
        last_write_ms=topic.log.last_write_ms,
        checkpointed_seq=kept_through,
        queue=None if topic.queue is None else topic.queue.entry(),
        trims=tuple(topic.log.trims.ranges),
        lost=tuple(floors.lost),
    )
    files = {file for part in rows for file in part.files()}
    return TopicCut(
        topic=topic,
        version=version,
        entry=entry,
        rows=rows,
        views={file: topic.log.log_view(file) for file in files},
        files=topic.log.log_paths(files),
        deleted=_new_deletions(topic, dead),
        dead=sorted(dead),
        segments=[segment for segment in topic.log.segments if segment.first_seq not in dead],
    )


def _new_deletions(topic: Topic, dead: set[int]) -> dict[int, DeletedRows]:
    known = {segment.first_seq: segment.deleted for segment in topic.log.segments}
    changed: dict[int, DeletedRows] = {}
    for run in topic.log.index.runs:
        if run.segment and run.changed and run.first_seq in known and run.first_seq not in dead:
            rows = topic.log.deleted_rows(run)
            if int(np.count_nonzero(rows)) > known[run.first_seq]:
                changed[run.first_seq] = rows
    return changed


def store(
    cut: Cut,
    *,
    fs: FileSystem,
    meta_dir: str,
    number: int,
    previous: int,
    tiers: Tiers,
    config: EngineConfig,
    copied: Mapping[tuple[int, int], SegmentEntry],
    process: SegmentProcess | None = None,
) -> None:
    """Write segments and a snapshot, durable on return. Blocks. After an error the earlier state holds.

    `copied` lists segments that are in the cold tier, by topic id and first sequence number. Raises
    `OutcomeUnknown` if the snapshot may be in place; it must be removed before anything is stored again.
    """
    for topic_cut in cut.topics:
        tier = tiers.topic(topic_cut.entry.id)
        for rows in topic_cut.rows:
            _store_rows(topic_cut, rows, tier, config, cut.now_ms, process)
        _seal_by_age(topic_cut, tier, config, cut.now_ms)
        _store_deletions(topic_cut, tier)
        _record_moves(topic_cut, copied)
    snapshot = Snapshot(
        next_topic_id=cut.next_topic_id,
        created_ms=cut.now_ms,
        wal={path: LogStart(position.file, position.offset) for path, position in cut.wal.items()},
        topics=tuple(
            msgspec.structs.replace(topic.entry, segments=tuple(topic.segments)) for topic in cut.topics
        ),
        routers=cut.routers,
        synced={path: LogStart(position.file, position.offset) for path, position in cut.synced.items()},
        lost_seq=cut.lost_seq,
    )
    for topic_cut in cut.topics:
        _load_grown(topic_cut, tiers.topic(topic_cut.entry.id))
    write_snapshot(fs, meta_dir, number, snapshot, previous=previous or None)


def _store_rows(
    cut: TopicCut,
    rows: Columns,
    tier: TopicTier,
    config: EngineConfig,
    now_ms: int,
    process: SegmentProcess | None,
) -> None:
    growth = Growth(
        topic_id=cut.entry.id,
        segments=cut.segments,
        rows=rows,
        now_ms=now_ms,
        events_max=config.segment_max_events,
        bytes_max=config.segment_max_bytes,
    )
    grown = None
    try:
        if process is not None and cut.files is not None:
            grown = process.grow(growth, cut.files)
        if grown is None:
            grown = grow(growth, tier, cut.views.__getitem__)
    except FramesLost as error:
        # After a failed sync the kernel may have dropped a page. The log still has the written bytes in
        # memory.
        fresh = {file: cut.topic.log.log_view(file) for file in cut.views}
        grown = grow(growth, tier, fresh.__getitem__, give_up_lost=True)
        _LOGGER.error('topic "%s": %s', cut.entry.name, error)
    tier.forget_views(entry for entry in grown if entry not in cut.segments)
    cut.segments = grown


def _seal_by_age(cut: TopicCut, tier: TopicTier, config: EngineConfig, now_ms: int) -> None:
    """Seal segments that are old, or that cannot grow because another segment follows."""
    for place, entry in enumerate(cut.segments):
        is_last = place == len(cut.segments) - 1
        old = config.segment_max_age_ms and now_ms - entry.created_ms >= config.segment_max_age_ms
        if not entry.sealed and (old or not is_last):
            cut.segments[place] = sealed(tier, entry)


def _store_deletions(cut: TopicCut, tier: TopicTier) -> None:
    for place, entry in enumerate(cut.segments):
        rows = cut.deleted.get(entry.first_seq)
        if rows is not None:
            # The active segment may have grown since the cut. The added records were live then.
            padded = np.zeros(entry.count, np.bool_)
            padded[: len(rows)] = rows
            cut.segments[place] = tier.write_deleted(entry, padded)


def _record_moves(cut: TopicCut, copied: Mapping[tuple[int, int], SegmentEntry]) -> None:
    """Mark segments as cold whose records are in the cold tier."""
    for place, entry in enumerate(cut.segments):
        copy = copied.get((cut.entry.id, entry.first_seq))
        if copy is not None and not entry.cold and copy.idx_xxh3 == entry.idx_xxh3:
            cut.segments[place] = msgspec.structs.replace(entry, cold=True)
            cut.moved.append(cut.segments[place])


def _load_grown(cut: TopicCut, tier: TopicTier) -> None:
    """Open changed segments for the index."""
    known = {entry.first_seq: entry for entry in cut.topic.log.segments}
    for entry in cut.segments:
        before = known.get(entry.first_seq)
        if before is None or (before.count, before.cold, before.sealed) != (
            entry.count,
            entry.cold,
            entry.sealed,
        ):
            try:
                cut.grown.append(tier.load(entry))
            except Damaged:
                if before is None or before.count != entry.count:
                    raise
                # It was already damaged. Its rows stay as they are.
