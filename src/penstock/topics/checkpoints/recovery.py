"""Recovery: rebuild the state of an engine from the files of its data directory.

1. The newest readable snapshot names the topics, their floors and their segments.
2. The index entries of those segments form the index.
3. Every existing log directory is read from its snapshot position on, however many shards wrote it. Frames go
   to their topics by id. A record that already exists is left alone, so recovery is idempotent.
4. A torn tail is cut off, and so is an incomplete write.
5. Damage elsewhere is reported and stays on disk. Records lost to it are known to be missing, and readers get
   a tombstone or an error for them.
6. If a log ends before its durable end, the lost records are unknown. Each topic that may be affected
   continues after every number that it can have used, and readers get a tombstone. Topics created in the lost
   part are unknown, so every later topic starts above the numbers that they can have used.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from penstock.errors import Corrupt
from penstock.storage import (
    EXTENT,
    FileSystem,
    FileView,
    FrameRun,
    LogDamage,
    LogHeader,
    LogPosition,
    LogScan,
    LostBytes,
    ScannedFile,
    lost_bytes,
    read_extent,
    scan,
)
from penstock.topics.checkpoints.layout import META, WAL, LogGroup, log_groups, unknown_segments
from penstock.topics.checkpoints.snapshot import LoadedSnapshot, Snapshot, TopicEntry, load_latest
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import Damaged
from penstock.topics.limits import ROUTER_PASS_RECORDS_MAX
from penstock.topics.log.control import Deletion, TopicChange, Watermarks, read_head_watermark
from penstock.topics.log.frame import (
    APPEND_FRAME_BYTES_MIN,
    CURSOR_FRAME_BYTES_MIN,
    FRAME_BYTES_MIN,
    MORE,
    FrameType,
)
from penstock.topics.log.frame_scan import FrameTable, WalFormat, read_frames
from penstock.topics.log.wal import shard_folders, shard_number
from penstock.topics.routers.copy_frame import CopyFrame
from penstock.topics.routers.copy_replay import CopyReplay, LostOriginals, RouterRecovery, SourceFrames
from penstock.topics.routers.model import RouterEntry
from penstock.topics.segments.columns import DELETED, Columns, pack_row
from penstock.topics.segments.format import LOST, Part, SegmentEntry
from penstock.topics.segments.store import Stored
from penstock.topics.segments.tiering import Tiers
from penstock.topics.topic.index import TopicIndex
from penstock.topics.topic.lease_log import LEASES_RESERVED_MAX, replay_lease
from penstock.topics.topic.topic import Topic
from penstock.topics.topic.topic_log import ATTACHED_FROM
from penstock.topics.topic.watermarks import LostRanges

_CONFIG = msgspec.json.Decoder(TopicConfig)
_FORMAT = WalFormat()
_FOLLOWED: Final = (FrameType.APPEND, FrameType.ROUTER_CURSOR)
"""Frames that may be a part of something larger."""
_NUMBERED: Final = (FrameType.APPEND, FrameType.ROUTER_CURSOR)
"""Frames that assign sequence numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLog:
    """One log directory, by its path relative to the data directory."""

    path: str
    found: LogScan


@dataclass(slots=True, kw_only=True)
class Recovered:
    """The state that an engine starts with."""

    topics: list[Topic]
    next_topic_id: int
    lost_seq: int
    """The highest number that a topic lost with log files can have used."""
    snapshot_number: int
    """The number of the next snapshot to be written."""
    loaded_number: int
    """The number of the snapshot that was read, or 0."""
    wal: dict[str, LogPosition]
    """The position from which each log of the previous start is still needed."""
    logs: list[FoundLog]
    folders: list[str]
    """Every log directory that exists."""
    moved: bool
    """Whether the logs differ from those that the snapshot names, or records are in the wrong log.

    If so, a snapshot is taken before the first write, because the records of a topic must never be in two
    logs.
    """
    stored: Stored
    """All segments in the hot tier, referenced or not."""
    problems: list[str] = field(default_factory=list)
    """The damage that was found, one sentence each."""
    routers: list[RouterEntry] = field(default_factory=list)
    referred: dict[int, list[SegmentEntry]] = field(default_factory=dict)
    """By topic id: segments of deleted topics whose copies are not in a segment yet."""
    strangers: set[int] = field(default_factory=set)
    """Ids of topics that nothing names. Their segments are not removed by this start."""


def recover(
    fs: FileSystem,
    data_dir: str,
    tiers: Tiers,
    *,
    folders: Sequence[str],
    now_ms: int,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Recovered:
    """Read a data directory without changing it. `folders` are the log directories for later writes.

    Raises `Damaged` if there are snapshots but none can be read: an engine never starts empty over data.
    """
    loaded = load_latest(fs, os.path.join(data_dir, META))
    return _Recovery(fs, data_dir, tiers, loaded, folders, now_ms, on_progress).run()


@dataclass(slots=True)
class _Piece:
    """Frames of one topic in one file, in the order in which they were written."""

    log: str
    file: int
    view: memoryview | FileView
    frames: FrameTable
    damaged: bool


class _Recovery:
    """The state of one recovery."""

    def __init__(
        self,
        fs: FileSystem,
        data_dir: str,
        tiers: Tiers,
        loaded: LoadedSnapshot,
        folders: Sequence[str],
        now_ms: int,
        on_progress: Callable[[float], None],
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._tiers = tiers
        self._snapshot = loaded.snapshot or Snapshot(next_topic_id=1, created_ms=0, wal={}, topics=())
        self._loaded = loaded
        self._folders = folders
        self._now_ms = now_ms
        self._on_progress = on_progress
        self._problems = list(loaded.rejected)
        self._topics: dict[int, Topic] = {}
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)
        self._named: set[str] = set()
        self._was_ephemeral: set[int] = set()
        self._next_attached = ATTACHED_FROM
        self._routers = RouterRecovery(self._snapshot.routers)
        self._copy_replay = CopyReplay(self._source_frames, self._lose_copies)
        self._source_runs: dict[int, list[Columns]] = {}
        """The segments of topics, live or not, for copies that must be made again."""
        self._sources: dict[int, SourceFrames] = {}
        self._stored = tiers.stored()
        self._strangers: set[int] = set()
        """Topics that have segments but that nothing names."""
        self._lost: dict[str, list[LostBytes]] = {}
        """By log: its durable parts that cannot be read."""

    def run(self) -> Recovered:
        there = log_groups(self._fs, self._data_dir, self._snapshot)
        groups = [group for group in there if not self._is_covered(group)]
        self._named = {group.path for group in groups if group.start.file}
        logs = [self._read_log(group) for group in groups]
        self._check_beginning(logs)
        gone = self._deleted_topics()
        for entry in self._snapshot.topics:
            if entry.id not in gone:
                self._topics[entry.id] = self._from_snapshot(entry)
        self._create_topics(gone)
        self._report_nameless(gone, logs)
        self._check_segments(gone)
        for done, topic in enumerate(self._topics.values()):
            self._replay(topic)
            self._on_progress(0.5 + 0.5 * (done + 1) / len(self._topics))
        self._on_progress(1.0)
        routers = self._routers.found(self._topics)
        self._problems += self._routers.problems
        for source_id in self._topics.keys() & self._routers.sources:
            # Its copies are in memory again. If it is deleted, its segments must wait for them.
            self._topics[source_id].is_referred = True
        return Recovered(
            topics=sorted(self._topics.values(), key=lambda topic: topic.name),
            next_topic_id=self._lost_ids()
            + max([self._snapshot.next_topic_id, *(number + 1 for number in self._seen_ids())]),
            lost_seq=self._snapshot.lost_seq + self._lost_topic_numbers(),
            snapshot_number=self._loaded.next_number,
            loaded_number=self._loaded.number,
            wal={group.path: group.start for group in groups},
            logs=logs,
            folders=[group.path for group in there],
            # Losses are derived from the logs as they are now, so a snapshot stores them before the logs
            # change.
            moved=self._has_moved() or self._routers.lowered or any(self._lost.values()),
            stored=self._stored,
            problems=self._problems,
            routers=routers,
            referred={
                entry.id: list(entry.segments)
                for entry in self._snapshot.topics
                if entry.id in gone and entry.id in self._routers.sources
            },
            strangers=self._strangers,
        )

    def _is_covered(self, group: LogGroup) -> bool:
        """Return whether the newest snapshot covers a log completely, because it does not name it.

        An older snapshot, used because the newest cannot be read, does not prove this.
        """
        return self._loaded.snapshot is not None and not self._loaded.rejected and not group.start.file

    def _has_moved(self) -> bool:
        strangers = any(
            piece.log != self._home(number) for number in self._topics for piece in self._pieces[number]
        )
        return strangers or (self._loaded.snapshot is not None and self._named != set(self._folders))

    def _seen_ids(self) -> Iterator[int]:
        yield from self._topics
        yield from self._pieces
        yield from self._routers.ids
        yield from self._strangers

    # ---- the log -------------------------------------------------------------------------------------

    def _read_log(self, group: LogGroup) -> FoundLog:
        folder = os.path.join(self._data_dir, group.path)
        found = scan(self._fs, folder, _FORMAT, start=group.start if group.start.file else None)
        extent = read_extent(self._fs, folder)
        damage, self._lost[group.path] = lost_bytes(extent, found, group.start, group.synced)
        found.damage.extend(damage)
        self._problems += [f"{group.path}/{damage}" for damage in found.damage]
        if not extent.readable:
            self._problems.append(
                f"{group.path}/{EXTENT} cannot be read: a loss at the end of the log may not be noticed. "
                "This start replaces the file; check the device"
            )
        found = _without_half_writes(found)
        for file in found.files:
            for run in file.runs:
                self._sort_frames(group.path, file, run, damaged=bool(found.damage))
        return FoundLog(path=group.path, found=found)

    def _sort_frames(self, log: str, file: ScannedFile, run: FrameRun, *, damaged: bool) -> None:
        """Distribute the frames of one run to their topics."""
        table = read_frames(file.view, run.start, run.ends)
        ids = table.heads["topic_id"]
        order = np.argsort(ids, kind="stable")
        borders = np.flatnonzero(np.diff(ids[order])) + 1
        for places in np.split(order, borders):
            topic_id = int(ids[places[0]]) if len(places) else 0
            if not topic_id:
                self._routers.read(table.of(places))
            else:
                piece = _Piece(log, file.number, file.view, table.of(places), damaged)
                self._pieces[topic_id].append(piece)

    def _deleted_topics(self) -> set[int]:
        """Return the ids of topics that the log deletes."""
        return {
            topic_id
            for topic_id, pieces in self._pieces.items()
            if any(np.any(piece.frames.heads["type"] == FrameType.TOPIC_DELETE) for piece in pieces)
        }

    def _check_beginning(self, logs: Sequence[FoundLog]) -> None:
        """Raise `Damaged` if the log continues a snapshot and there is no snapshot."""
        if self._loaded.snapshot is not None:
            return
        for log in logs:
            header = _header(log.found)
            if header is not None and header.previous.file:
                raise Damaged(
                    f"the beginning of {log.path} is in a snapshot, but {META} has none; "
                    "restore it from a backup"
                )

    def _check_segments(self, gone: set[int]) -> None:
        """Raise `Damaged` if there are segments of topics that neither the snapshot nor the log names.

        Both are then gone or older than the segments, and the segments would be removed as leftovers. If
        damage to the log explains it, the segments are kept and everything else starts.
        """
        self._strangers = {
            number
            for number in self._stored.topics.keys() - self._topics.keys() - gone
            if number >= self._snapshot.next_topic_id
        }
        if self._strangers and not self._problems:
            raise Damaged(unknown_segments(sorted(self._strangers)))
        if self._strangers:
            self._problems.append(unknown_segments(sorted(self._strangers)))

    def _report_nameless(self, gone: set[int], logs: Sequence[FoundLog]) -> None:
        """Report records whose topic is unknown, and keep their files."""
        found = {log.path: log.found for log in logs}
        for topic_id, pieces in self._pieces.items():
            if topic_id in self._topics or topic_id in gone:
                continue
            for piece in pieces:
                seqs = piece.frames.heads["seq"][piece.frames.heads["type"] == FrameType.APPEND]
                if len(seqs):
                    which = f"records {seqs.min()} to {seqs.max()} of topic {topic_id}"
                    reason = f"{which}, whose creation cannot be read"
                    damage = LogDamage(file=piece.file, start=0, end=len(piece.view), reason=reason)
                    found[piece.log].damage.append(damage)
                    self._problems.append(f"{piece.log}/{damage}")

    def _create_topics(self, gone: set[int]) -> None:
        """Create the topics that only the log knows."""
        for topic_id, pieces in self._pieces.items():
            for piece in pieces:
                kinds = piece.frames.heads["type"]
                for place in np.flatnonzero(kinds == FrameType.TOPIC_CREATE).tolist():
                    if topic_id not in self._topics and topic_id not in gone:
                        change = TopicChange.decode(piece.frames.body(place))
                        config = _CONFIG.decode(change.config)
                        self._topics[topic_id] = topic = Topic(name=change.name, id=topic_id, config=config)
                        if change.lost_seq:
                            topic.log.mark_log_lost(change.lost_seq)

    # ---- a topic -------------------------------------------------------------------------------------

    def _from_snapshot(self, entry: TopicEntry) -> Topic:
        index = TopicIndex()
        segments: list[SegmentEntry] = []
        for named in entry.segments:
            segment = named
            if self._loaded.rejected or self._has_left(entry.id, named):
                there = self._tiers.topic(entry.id).as_it_is_now(named)
                if there is None and self._loaded.rejected:
                    self._problems.append(
                        f'topic "{entry.name}": segment {named.first_seq} is gone; the newest snapshot, '
                        "which cannot be read, may no longer have needed it"
                    )
                    continue
                segment = there or named
            run = self._load(entry, segment)
            index.add_run(run)
            self._source_runs.setdefault(entry.id, []).append(run)
            # A segment that cannot be opened must not grow, because no checkpoint could open it.
            segments.append(
                segment if run.source is not None else msgspec.structs.replace(segment, sealed=True)
            )
        index.skip_to(entry.head_seq)
        topic = Topic(name=entry.name, id=entry.id, config=_CONFIG.decode(entry.config), index=index)
        topic.log.segments = segments
        topic.log.floors.merge(cap=entry.cap_floor, ttl=entry.ttl_floor, trim=entry.trim_floor)
        topic.log.trims = LostRanges(entry.trims)
        topic.log.floors.lost = [(first, end) for first, end in entry.lost]
        topic.log.delete_below = entry.delete_below
        topic.log.reserved_seq = entry.reserved_head
        if topic.queue is not None and entry.queue is not None:
            topic.queue.leases.restore(entry.queue)
        topic.log.last_write_ms = entry.last_write_ms
        latest = [int(run.ts[-1]) for run in index.runs[-1:]]
        topic.log.last_ts_ms = max(entry.last_write_ms or 0, *latest, 0)
        index.delete_prefix(max(topic.log.floors.floor, entry.delete_below))
        return topic

    def _has_left(self, topic_id: int, entry: SegmentEntry) -> bool:
        """Whether the data of a segment is not in the hot tier, where the snapshot has it.

        The snapshot may be an older one, although no other can be seen.
        """
        return not entry.cold and Part.DATA not in self._stored.topics.get(topic_id, {}).get(
            entry.first_seq, ()
        )

    def _load(self, topic: TopicEntry, entry: SegmentEntry) -> Columns:
        try:
            segment = self._tiers.topic(topic.id).load(entry)
        except Damaged as error:
            self._problems.append(f'topic "{topic.name}": {error}')
            return _lost_run(entry)
        run = Columns.of_segment(entry.first_seq, segment.rows, source=segment)
        run.mark(np.flatnonzero(segment.deleted), DELETED)
        return run

    def _replay(self, topic: Topic) -> None:
        for piece in self._in_order(self._pieces.get(topic.id, [])):
            file = self._file_number(topic, piece)
            kinds = piece.frames.heads["type"]
            start = 0
            for place in np.flatnonzero(kinds != FrameType.APPEND).tolist():
                self._append(topic, piece, file, start, place)
                self._control(topic, piece.frames, place)
                start = place + 1
            self._append(topic, piece, file, start, len(kinds))
        known_seq = topic.log.index.head_seq
        lost = self._lost_numbers(topic)
        if lost:
            lost = max(lost, topic.log.reserved_seq - known_seq)
            self._problems.append(
                f'topic "{topic.name}": records from {known_seq + 1} on are lost with the log, at most up to '
                f"{known_seq + lost}; the next record gets number {known_seq + lost + 1}"
            )
            topic.log.mark_log_lost(lost)
        self._skip_lost_leases(topic)
        if topic.config.durability in (Durability.DISK, Durability.MEMORY, Durability.FSYNC):
            topic.log.index.skip_to(topic.log.reserved_seq)
        gone = max(topic.log.floors.floor, topic.log.delete_below)
        # Lost or deleted records existed, if only in memory, so their numbers are used.
        topic.log.index.skip_to(gone - 1)
        topic.log.index.delete_prefix(gone)
        topic.settle(self._now_ms)

    # ---- losses with the log -------------------------------------------------------------------------

    def _lost_numbers(self, topic: Topic) -> int:
        """Return how many numbers after the topic's last record the lost parts of the logs can have used.

        Losses before a readable record are known exactly; see `_bridge`.
        """
        if topic.is_ephemeral:
            return 0
        last: dict[str, LogPosition] = {}
        for piece in self._pieces.get(topic.id, []):
            given = np.flatnonzero(np.isin(piece.frames.heads["type"], _NUMBERED))
            if len(given):
                position = LogPosition(piece.file, int(piece.frames.starts[given[-1]]))
                last[piece.log] = max(last.get(piece.log, position), position)
        size = sum(
            part.count
            for log, parts in self._lost.items()
            if self._may_hold(log, topic.id)
            for part in parts
            if log not in last or part.position > last[log]
        )
        return _copies_in(size) if self._routers.feeds(topic.id) else _records_in(size)

    def _may_hold(self, log: str, topic_id: int) -> bool:
        """Return whether a log can have held frames of a topic."""
        folders = shard_folders(WAL, len(self._named)) if self._named else []
        return log not in folders or log == folders[shard_number(topic_id, len(folders))]

    def _skip_lost_leases(self, topic: Topic) -> None:
        """Skip the lease numbers that the lost parts of the logs can have reserved."""
        lost = [part for log, parts in self._lost.items() if self._may_hold(log, topic.id) for part in parts]
        if topic.queue is not None and lost:
            frames = sum(part.count // FRAME_BYTES_MIN + 1 for part in lost)
            topic.queue.leases.saw_lease_id(
                topic.queue.leases.next_lease_id - 1 + frames * LEASES_RESERVED_MAX
            )

    def _lost_topic_numbers(self) -> int:
        """Return how many numbers a topic created in the lost parts of the logs can have used.

        A router may have copied into it, and may be lost as well.
        """
        return _copies_in(sum(part.count for parts in self._lost.values() for part in parts))

    def _lost_ids(self) -> int:
        """Return how many topics and routers the lost parts of the logs can have created."""
        return sum(part.count // APPEND_FRAME_BYTES_MIN for parts in self._lost.values() for part in parts)

    def _home(self, topic_id: int) -> str:
        """Return the log directory that a topic will be written to."""
        return self._folders[shard_number(topic_id, len(self._folders))]

    def _file_number(self, topic: Topic, piece: _Piece) -> int:
        if piece.log == self._home(topic.id):
            return piece.file
        self._next_attached += 1
        topic.log.attach_file(self._next_attached, piece.view)
        return self._next_attached

    def _append(self, topic: Topic, piece: _Piece, file: int, start: int, stop: int) -> None:
        """Append records that the topic does not have yet, and account for missing numbers before them."""
        if start >= stop:
            return
        index = topic.log.index
        seqs = piece.frames.heads["seq"][start:stop].astype(np.int64)
        fresh = start + np.flatnonzero(seqs > index.head_seq)
        jumps = np.flatnonzero(np.diff(piece.frames.heads["seq"][fresh].astype(np.int64)) != 1) + 1
        for places in np.split(fresh, jumps):
            if not len(places):
                continue
            part = piece.frames.of(places)
            first_seq, ts_ms = int(part.heads["seq"][0]), int(part.heads["ts"][0])
            if first_seq <= index.head_seq:
                continue
            self._bridge(topic, first_seq, ts_ms, damaged=piece.damaged)
            index.append_rows(part.index_rows(), file=file)
            topic.log.tags.append(first_seq, part.tags())
            topic.log.last_write_ms = topic.log.last_ts_ms = int(part.heads["ts"][-1])

    def _bridge(self, topic: Topic, first_seq: int, ts_ms: int, *, damaged: bool) -> None:
        missing = first_seq - 1 - topic.log.index.head_seq
        if missing <= 0:
            return
        if (first_seq - 1 <= topic.log.reserved_seq or topic.id in self._was_ephemeral) and not damaged:
            # The numbers were reserved before a crash and not used, or their records were ephemeral.
            topic.log.index.skip_to(first_seq - 1)
            return
        topic.log.index.append_damaged(missing, ts_ms)
        self._problems.append(
            f'topic "{topic.name}": records {first_seq - missing} to {first_seq - 1} are missing in the log'
        )

    def _control(self, topic: Topic, frames: FrameTable, place: int) -> None:
        kind, body = frames.heads["type"][place], frames.body(place)
        if kind in (FrameType.CONFIG_UPDATE, FrameType.DELETE):
            # Writes in flight at the submission had already evicted records before this change applied.
            topic.log.retain(0)
        try:
            if kind == FrameType.CONFIG_UPDATE:
                if topic.is_ephemeral:
                    self._was_ephemeral.add(topic.id)
                config = _CONFIG.decode(TopicChange.decode(body).config)
                if topic.queue is not None and not (topic.config.leases_durable and config.leases_durable):
                    # The log lacks lease events of that time. Leases that outlive the process follow this
                    # frame.
                    topic.queue.leases.end_leases()
                topic.set_config(config)
            elif kind == FrameType.DELETE:
                topic.log.delete(Deletion.decode(body))
            elif kind == FrameType.EVICT_WATERMARK:
                marks = Watermarks.decode(body)
                topic.log.floors.merge(cap=marks.cap, ttl=marks.ttl, trim=marks.trim)
                topic.log.index.delete_prefix(topic.log.floors.floor)
            elif kind == FrameType.HEAD_WATERMARK:
                topic.log.reserved_seq = max(topic.log.reserved_seq, read_head_watermark(body))
            elif kind == FrameType.LEASE and topic.queue is not None:
                at_ms = int(frames.heads["ts"][place])
                replay_lease(topic.queue.leases, int(frames.heads["seq"][place]), body, at_ms)
            elif kind == FrameType.ROUTER_CURSOR:
                self._copy_frame(topic, CopyFrame.decode(body), int(frames.heads["ts"][place]))
        except (Corrupt, msgspec.MsgspecError) as error:
            self._problems.append(f'topic "{topic.name}": {error}')

    def _copy_frame(self, topic: Topic, copy: CopyFrame, ts_ms: int) -> None:
        self._routers.note(copy)
        self._bridge(topic, copy.first_seq, ts_ms, damaged=False)
        self._copy_replay.apply(topic, copy, ts_ms)

    def _source_frames(self, topic_id: int) -> SourceFrames:
        if topic_id not in self._sources:
            runs = self._source_runs.get(topic_id)
            if runs is None:
                # The topic was deleted since. Its segments stay until a snapshot has the copies.
                entries = [entry for entry in self._snapshot.topics if entry.id == topic_id]
                runs = [self._load(entry, segment) for entry in entries for segment in entry.segments]
            tables = [piece.frames for piece in self._pieces.get(topic_id, [])]
            self._sources[topic_id] = SourceFrames(tables, runs)
        return self._sources[topic_id]

    def _lose_copies(self, topic: Topic, lost: LostOriginals) -> None:
        """Account for copies whose originals are missing: not durable in their source, or damaged."""
        first_seq, count = topic.log.index.head_seq + 1, lost.records
        was_stored = any(
            entry.id == lost.source_id and lost.first_seq <= entry.head_seq for entry in self._snapshot.topics
        )
        if topic.config.durability is not Durability.FSYNC and not was_stored:
            topic.log.index.skip_to(first_seq + count - 1)
            return
        topic.log.index.append_damaged(count, lost.ts_ms)
        self._problems.append(
            f'topic "{topic.name}": records {first_seq} to {first_seq + count - 1} are copies of '
            "records that cannot be read"
        )

    def _in_order(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Sort pieces so that each log stays in order, and logs that the snapshot names come first."""
        lowest: dict[str, int] = {}
        for piece in pieces:
            appends = piece.frames.heads["type"] == FrameType.APPEND
            if appends.any():
                low = int(piece.frames.heads["seq"][appends].min())
                lowest[piece.log] = min(lowest.get(piece.log, low), low)
        return sorted(
            pieces,
            key=lambda piece: (piece.log not in self._named, lowest.get(piece.log, 0), piece.log, piece.file),
        )


def _records_in(size: int) -> int:
    """Return an upper bound on the records in `size` lost bytes of frames."""
    return size // APPEND_FRAME_BYTES_MIN + bool(size)


def _copies_in(size: int) -> int:
    """Return the same bound for a topic that a router may copy into: one frame stands for many copies."""
    return size * ROUTER_PASS_RECORDS_MAX // CURSOR_FRAME_BYTES_MIN + bool(size)


def _header(found: LogScan) -> LogHeader | None:
    if not found.files:
        return None
    first = found.files[0]
    return LogHeader.decode(_FORMAT, first.bytes_of(0, min(first.end, found.first_offset)))


def _lost_run(entry: SegmentEntry) -> Columns:
    """Return rows for a segment whose index cannot be read: every record of it is missing."""
    rows = pack_row(0, 0, entry.created_ms, LOST, 0) * entry.count
    return Columns.of_segment(entry.first_seq, rows)


def _without_half_writes(found: LogScan) -> LogScan:
    """Return the scan without incomplete writes at its end, whose last record is missing."""
    if not found.files or not found.files[-1].runs:
        return found
    last = found.files[-1]
    run = last.runs[-1]
    table = read_frames(last.view, run.start, run.ends)
    kinds, flags = table.heads["type"], table.heads["flags"]
    place = len(table)
    while place and kinds[place - 1] in _FOLLOWED and flags[place - 1] & MORE:
        place -= 1
    if place == len(table):
        return found
    cut = int(table.starts[place])
    runs = [*last.runs[:-1], replace(run, ends=run.ends[:place])]
    return replace(found, files=[*found.files[:-1], replace(last, runs=runs, end=cut, torn=True)])
