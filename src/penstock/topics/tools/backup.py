"""A consistent copy of a data directory, taken while its server runs.

A backup contains what a crash at one moment would have left: a snapshot, the segments that it names up to the
recorded sizes, and the log from the recorded positions up to a complete frame. `backup.json` is written last;
a directory without it is not a backup. Until then `backup.unfinished` exists, and the next attempt may remove
what is there.

The order makes the copy consistent:

1. The snapshot says which segments count, and up to which size.
2. Those bytes never change, so they can be copied at any time. If a segment is gone, there is or soon will
   be a newer snapshot, and the copy starts over from it.
3. The log is read last. Later changes to segments, such as a deletion, are in the log before they are in the
   segments.

The shards of the log are read one after the other while they grow. The shard of a destination may refer to
copies whose originals were written to the source's shard after it was read. A start from such a backup could
not make these copies again. So each log is copied up to the first frame that refers to unread records, which
is a valid earlier moment of that log. Other frames may refer to what is cut off, so this repeats until
nothing changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Conflict, Corrupt, MediaError, NotFound, PenstockError, Rejected, Unsupported
from penstock.storage import (
    CURRENT,
    Buffer,
    DirectoryLock,
    FileSystem,
    LogPosition,
    LogScan,
    file_name,
    stage,
    write_durably,
)
from penstock.topics.checkpoints.layout import (
    MANIFEST,
    META,
    TOPICS,
    UNFINISHED,
    WAL,
    LogGroup,
    check_data_directory,
    data_store,
    is_in_use,
    log_groups,
    remove_files,
    removed_topics,
    scan_log,
    segment_path,
    snapshot_numbers,
    snapshot_path,
)
from penstock.topics.checkpoints.snapshot import (
    LoadedSnapshot,
    Snapshot,
    TopicEntry,
    encode_snapshot,
    load_latest,
)
from penstock.topics.errors import Damaged
from penstock.topics.log.frame import FrameType
from penstock.topics.log.frame_scan import read_frames
from penstock.topics.routers.copy_frame import CopyFrame
from penstock.topics.segments.format import Part, SegmentEntry, checksum
from penstock.topics.segments.store import LocalSegmentRoot, SegmentRoot, SegmentStore
from penstock.topics.tools.verify import verify_files

_VERSION: Final = 1
_PATH = re.compile(rf"({META}|{TOPICS}|{WAL})(/[A-Za-z0-9][A-Za-z0-9._-]*)+")


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup. `path` is relative to the backup."""

    path: str
    size: int
    xxh3: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a backup, and when it was taken."""

    version: int = _VERSION
    created_ms: int
    snapshot: int
    """The number of the snapshot in the backup, or 0 if everything is in the log."""
    topics: int
    files: list[CopiedFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def is_backup_path(path: str) -> bool:
    """Return whether a file of a backup may have this relative path."""
    return _PATH.fullmatch(path) is not None


def read_manifest(fs: FileSystem, directory: str) -> BackupManifest:
    """Read the manifest of the backup in a directory.

    Raises `Rejected` if there is none or the backup is unfinished, and `Damaged` if its list is invalid.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        manifest = msgspec.json.decode(fs.read(path), type=BackupManifest)
    except NotFound:
        raise Rejected(
            f"{directory} is not a backup: it has no {MANIFEST}, which is written when a backup is complete"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if manifest.version != _VERSION:
        raise Unsupported(f"{path} has version {manifest.version}, this program reads {_VERSION}")
    for file in manifest.files:
        if not is_backup_path(file.path):
            raise Damaged(f"{path} names {file.path[:100]!r}, which is not a file of a backup")
    return manifest


@dataclass(frozen=True, slots=True)
class Agreement:
    """The logs up to where they are copied, and the topics that may be needed to make copies again."""

    logs: dict[str, LogScan]
    referred: set[int]


@dataclass(slots=True)
class _Reference:
    """A router pass whose copies are made again from these records of a source."""

    log: str
    at: LogPosition
    source_id: int
    last_seq: int


def agree(logs: Mapping[str, LogScan], snapshot: Snapshot | None) -> Agreement:
    """Cut every log before the first frame that refers to records in no log and no segment."""
    references = [found for path, log in logs.items() for found in _references(path, log)]
    stored = {} if snapshot is None else {topic.id: topic.head_seq for topic in snapshot.topics}
    kept = dict(logs)
    while True:
        heads = _heads(kept, {one.source_id for one in references})
        dangling = [one for one in references if one.last_seq > _reach(one.source_id, heads, stored)]
        if not dangling:
            return Agreement(kept, {one.source_id for one in references})
        first = min(dangling, key=lambda one: (one.log, one.at))
        kept[first.log] = _until(kept[first.log], first.at)
        references = [one for one in references if one.log != first.log or one.at < first.at]


def _reach(source_id: int, heads: Mapping[int, int], stored: Mapping[int, int]) -> int:
    return max(heads.get(source_id, 0), stored.get(source_id, 0))


def _references(path: str, log: LogScan) -> list[_Reference]:
    found: list[_Reference] = []
    for file in log.files:
        for run in file.runs:
            table = read_frames(file.view, run.start, run.ends)
            for place in np.flatnonzero(table.heads["type"] == FrameType.ROUTER_CURSOR).tolist():
                try:
                    copy = CopyFrame.decode(table.body(place))
                except Corrupt:
                    continue  # the next start reports it
                last_seq = max((one.source_seq + one.records - 1 for one in copy.runs), default=0)
                if not copy.by_value and last_seq:
                    at = LogPosition(file.number, int(table.starts[place]))
                    found.append(_Reference(path, at, copy.source_id, last_seq))
    return found


def _heads(logs: Mapping[str, LogScan], sources: set[int]) -> dict[int, int]:
    """Return the last record of each source that is in a log."""
    heads: dict[int, int] = {}
    for log in logs.values():
        for file in log.files:
            for run in file.runs:
                table = read_frames(file.view, run.start, run.ends)
                appended = table.heads[table.heads["type"] == FrameType.APPEND]
                for source in sources:
                    seqs = appended["seq"][appended["topic_id"] == source]
                    if len(seqs):
                        heads[source] = max(heads.get(source, 0), int(seqs.max()))
    return heads


def _until(log: LogScan, end: LogPosition) -> LogScan:
    """Return the log without the part from `end` on."""
    files = [file for file in log.files if file.number <= end.file]
    last = files[-1]
    runs = [
        replace(run, ends=run.ends[run.ends <= end.offset]) for run in last.runs if run.start < end.offset
    ]
    files[-1] = replace(last, runs=runs, end=end.offset, torn=True)
    return replace(log, files=files)


_ROUNDS_MAX: Final = 10
_NEWER_SNAPSHOT_S: Final = 90.0
"""A server that has removed a segment writes a snapshot without it within its checkpoint interval."""
_LOOK_EVERY_S: Final = 0.2


class _Moved(Exception):
    """A file that the snapshot names no longer exists."""


def backup(
    fs: FileSystem,
    directory: str,
    target: str,
    *,
    cold: SegmentRoot | None = None,
    clock: Clock = SYSTEM_CLOCK,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BackupManifest:
    """Copy a data directory to `target`, which must be empty or not exist. Durable and verified on return.

    Records in the cold tier are copied from `cold`; a backup never depends on the cold tier. Raises
    `Rejected` if `directory` is not a data directory, `target` has other files, or `cold` is needed and not
    given. Raises `Damaged` if the directory or the copy does not match its checksums, `LockHeld` if another
    backup is being written there, and `Conflict` if the server changed its files faster than they could be
    copied. A failed call removes what it wrote; the next call removes the rest.
    """
    check_data_directory(fs, directory)
    _check_target(fs, target)
    with DirectoryLock(fs, target, name=UNFINISHED, note="pid="):
        _check_target(fs, target)  # no other process writes here from now on
        remove_files(fs, target, _remains(fs, target))
        try:
            copy = _Copy(fs, directory, target, cold, on_progress)
            manifest = _copy_in_rounds(copy, fs, directory, clock, sleep)
        except BaseException:
            with contextlib.suppress(PenstockError):
                remove_files(fs, target, [*_remains(fs, target), UNFINISHED])
            raise
        fs.unlink(os.path.join(target, UNFINISHED))
    return manifest


def _check_target(fs: FileSystem, target: str) -> None:
    names = [name for name, _ in fs.list_files(target)]
    if not names:
        return
    strangers = [name for name in names if name != UNFINISHED and not _is_ours(name)]
    if strangers or UNFINISHED not in names:
        raise Rejected(
            f"{target} is not empty (it has {(strangers or names)[0]}); a backup needs a directory of its own"
        )


def _is_ours(name: str) -> bool:
    """Return whether an unfinished backup may have left this file: a part of it, or its staged manifest."""
    return is_backup_path(name) or name.startswith(f"{MANIFEST}.")


def _remains(fs: FileSystem, target: str) -> list[str]:
    return [name for name, _ in fs.list_files(target) if _is_ours(name)]


def _copy_in_rounds(
    copy: _Copy, fs: FileSystem, directory: str, clock: Clock, sleep: Callable[[float], None]
) -> BackupManifest:
    for _ in range(_ROUNDS_MAX):
        loaded = load_latest(fs, os.path.join(directory, META))
        try:
            topics = copy.take(loaded)
        except _Moved as moved:
            _await_newer(fs, directory, loaded.number, str(moved), sleep)
            continue
        return copy.finish(loaded.number, topics, clock.now_ms())
    raise Conflict(
        f"the server on {directory} changed its files {_ROUNDS_MAX} times during the copy; try again"
    )


def _await_newer(
    fs: FileSystem, directory: str, number: int, why: str, sleep: Callable[[float], None]
) -> None:
    """Wait for a newer snapshot. Raise `Damaged` if no server writes one."""
    waited_s = 0.0
    while max(snapshot_numbers(fs, directory), default=0) <= number:
        if waited_s >= _NEWER_SNAPSHOT_S or not is_in_use(fs, directory):
            raise Damaged(why)
        sleep(_LOOK_EVERY_S)
        waited_s += _LOOK_EVERY_S


class _Copy:
    """A backup in progress. A file that was copied and still counts is not copied again."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        target: str,
        cold: SegmentRoot | None,
        on_progress: Callable[[str], None],
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._target = target
        self._hot = LocalSegmentRoot(fs, directory)
        self._cold = cold
        self._on_progress = on_progress
        self._done: dict[str, CopiedFile] = {}
        self._wanted: set[str] = set()
        self._unreadable: list[str] = []
        """Every file and range that the device cannot read, so that one attempt reports all of them."""

    def take(self, loaded: LoadedSnapshot) -> int:
        """Copy every file that one snapshot needs. Return the number of its topics. Raise `_Moved`."""
        self._wanted = set()
        snapshot = loaded.snapshot
        self._unreadable = []
        kept, missing = self._take_topics(() if snapshot is None else snapshot.topics)
        groups = log_groups(self._fs, self._directory, snapshot)
        try:
            logs = {group.path: self._read_log(group) for group in groups}
        except _Moved as moved:
            if self._unreadable:
                self._unreadable.append(str(moved))
                raise self._unreadable_error() from moved
            raise
        if self._unreadable:
            raise self._unreadable_error()
        agreed = agree(logs, snapshot)
        removed: set[int] = set()
        for path, log in agreed.logs.items():
            removed |= self._take_log(path, log)
        if snapshot is None:
            if snapshot_numbers(self._fs, self._directory):
                raise _Moved("the log was cut while it was copied")
            return 0
        # A topic deleted since the snapshot may already have lost its segments. If copies are made from it, a
        # newer snapshot has them.
        left_out = removed - agreed.referred
        for topic_id in missing.keys() - left_out:
            raise _Moved(missing[topic_id])
        topics = tuple(topic for topic in kept.values() if topic.id not in left_out)
        content = encode_snapshot(msgspec.structs.replace(snapshot, topics=topics))
        self._put(snapshot_path(loaded.number), content)
        return len(topics)

    def _unreadable_error(self) -> Damaged:
        return Damaged(f"there is no backup, because it would be incomplete: {'; '.join(self._unreadable)}")

    def finish(self, number: int, topics: int, now_ms: int) -> BackupManifest:
        """Make the copy durable, verify it, and only then write its manifest."""
        for path in self._done.keys() - self._wanted:
            self._fs.unlink(os.path.join(self._target, path))
            del self._done[path]
        if not self._done:
            raise Rejected(f"there is nothing in {self._directory} to back up yet")
        for folder in {os.path.dirname(path) for path in self._done}:
            self._fs.sync_dir(os.path.join(self._target, folder))
        report = verify_files(self._fs, self._target, on_progress=self._on_progress)
        if report.problems:
            raise Damaged(f"the copy is damaged, and so may be the original: {report.problems[0]}")
        files = [self._done[path] for path in sorted(self._done)]
        manifest = BackupManifest(created_ms=now_ms, snapshot=number, topics=topics, files=files)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_durably(self._fs, os.path.join(self._target, MANIFEST), [content], staging=self._target)
        return manifest

    def _take_topics(self, topics: tuple[TopicEntry, ...]) -> tuple[dict[int, TopicEntry], dict[int, str]]:
        """Return, by id, the topics whose segments were copied, and the missing parts of the others."""
        kept: dict[int, TopicEntry] = {}
        missing: dict[int, str] = {}
        for topic in topics:
            try:
                kept[topic.id] = self._take_topic(topic)
            except NotFound as error:
                missing[topic.id] = f"a segment of {topic.name} is missing: {error}"
        return kept, missing

    def _take_topic(self, topic: TopicEntry) -> TopicEntry:
        """Copy the segments of a topic. Return its entry without segments in the cold tier."""
        for entry in topic.segments:
            self._on_progress(f"copying {topic.name}: {len(self._done):,} files so far")
            self._take_segment(topic, entry)
        segments = tuple(msgspec.structs.replace(entry, cold=False) for entry in topic.segments)
        return msgspec.structs.replace(topic, segments=segments)

    def _take_segment(self, topic: TopicEntry, entry: SegmentEntry) -> None:
        hot, data = self._hot.topic(topic.id), data_store(topic, entry, self._hot, self._cold)
        if data is None:
            raise Rejected(
                f"{topic.name} has records in the cold tier, and the backup must have them too; "
                "name it with --cold"
            )
        for part, store, size in ((Part.DATA, data, entry.data_bytes), (Part.IDX, hot, entry.idx_bytes)):
            path = segment_path(topic, entry, part)
            known = self._done.get(path)
            if known is not None and known.size == size:
                self._wanted.add(path)
            else:
                self._take_part(topic, entry, part, store, size)
        # The tags of a growing segment may be ahead of the snapshot. They can be derived again.
        for part in (Part.TAGS, Part.DEL) if entry.sealed else (Part.DEL,):
            with contextlib.suppress(NotFound):
                self._take_part(topic, entry, part, hot, None)

    def _take_part(
        self, topic: TopicEntry, entry: SegmentEntry, part: Part, store: SegmentStore, size: int | None
    ) -> None:
        """Copy a file up to its valid size. An unreadable file is reported at the end."""
        path, first_seq = segment_path(topic, entry, part), entry.first_seq
        try:
            content = (
                store.view(first_seq, part) if size is None else store.read_range(first_seq, part, 0, size)
            )
        except Damaged as error:
            if not isinstance(error.__cause__, MediaError):
                raise
            self._unreadable.append(str(error))
        else:
            self._put(path, content)

    def _read_log(self, group: LogGroup) -> LogScan:
        """Read a log up to its last complete frame."""
        self._on_progress(f"copying the log in {group.path}")
        try:
            found = scan_log(self._fs, self._directory, group, needed_only=True)
        except NotFound as error:
            raise _Moved(f"the log in {group.path} was cut while it was copied: {error}") from error
        if found.damage:
            raise _Moved(f"the log is damaged: {os.path.join(group.path, str(found.damage[0]))}")
        return found

    def _take_log(self, path: str, found: LogScan) -> set[int]:
        """Copy a log up to where it was read. Return the topics that it deletes."""
        for file in found.files:
            self._put(os.path.join(path, file_name(file.number)), file.bytes_of(0, file.end))
        if found.files:
            active = f"{file_name(found.files[-1].number)}\n".encode()
            self._put(os.path.join(path, CURRENT), active)
        return removed_topics(found)

    def _put(self, path: str, content: Buffer) -> None:
        target = os.path.join(self._target, path)
        if path in self._done:
            self._fs.unlink(target)
        else:
            self._fs.make_dirs(os.path.dirname(target))
        stage(self._fs, target, [content])
        self._done[path] = CopiedFile(path=path, size=len(content), xxh3=f"{checksum(content):016x}")
        self._wanted.add(path)
