"""A consistent copy of a data directory, taken while its server runs.

A backup is what a crash at one moment would have left: a snapshot, the segments it names as far as it names
them, and the log from the positions it records up to a frame that was complete when it was read. Its
`backup.json` is written last; a directory without it is no backup.

The order makes it consistent. 1. The snapshot says which segments count, and how much of them. 2. Those bytes
never change, so they can be copied at leisure; where a segment has vanished there is a newer snapshot, or
soon will be, and the copy starts over from it. 3. The log is read last: whatever was done to the segments
since the snapshot, such as a deletion, is in the log before it is in them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Conflict, NotFound
from penstock.files import Buffer, FileSystem, write_durably
from penstock.files.log_file import CURRENT, file_name
from penstock.fs import stage
from penstock.topics.backup_manifest import MANIFEST, BackupManifest, CopiedFile
from penstock.topics.data_directory import (
    META,
    LogGroup,
    is_in_use,
    log_groups,
    removed_topics,
    scan_log,
    segment_path,
    snapshot_numbers,
    snapshot_path,
)
from penstock.topics.errors import Damaged
from penstock.topics.segment import Part, SegmentEntry, checksum
from penstock.topics.segment_root import LocalSegmentRoot, SegmentRoot
from penstock.topics.segment_store import SegmentStore
from penstock.topics.snapshot import LoadedSnapshot, TopicEntry, encode_snapshot, load_latest
from penstock.topics.verify import verify

__all__ = ["backup"]

_ROUNDS_MAX: Final = 10
_NEWER_SNAPSHOT_S: Final = 90.0
"""A server that has removed a segment writes a snapshot without it within its checkpoint interval."""
_LOOK_EVERY_S: Final = 0.2


class _Moved(Exception):
    """What the snapshot names is no longer there."""


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
    """Copy a data directory to `target`, which must be empty or not exist; durable and checked on return.

    Segments in the cold tier are copied from `cold`; a backup never depends on it. Raises `Damaged` when the
    directory, or the copy, does not stand up to its checksums, and `Conflict` when the server moved on
    faster than it could be copied. What a failed call leaves in `target` is no backup.
    """
    fs.stat(directory)
    if fs.list_files(target):
        raise Conflict(f"{target} is not empty; a backup needs a directory of its own")
    fs.make_dirs(target)
    copy = _Copy(fs, directory, target, cold, on_progress)
    for _ in range(_ROUNDS_MAX):
        loaded = load_latest(fs, os.path.join(directory, META))
        try:
            topics = copy.take(loaded)
        except _Moved as moved:
            _await_newer(fs, directory, loaded.number, str(moved), sleep)
            continue
        return copy.finish(loaded.number, topics, clock.now_ms())
    raise Conflict(f"the server on {directory} moved on {_ROUNDS_MAX} times while it was copied; try again")


def _await_newer(
    fs: FileSystem, directory: str, number: int, why: str, sleep: Callable[[float], None]
) -> None:
    """Return when there is a newer snapshot. Raises `Damaged` if there is nobody to write one."""
    waited_s = 0.0
    while max(snapshot_numbers(fs, directory), default=0) <= number:
        if waited_s >= _NEWER_SNAPSHOT_S or not is_in_use(fs, directory):
            raise Damaged(f"{why}; `penstock topics verify` tells more")
        sleep(_LOOK_EVERY_S)
        waited_s += _LOOK_EVERY_S


class _Copy:
    """A backup in the making. What was copied once and still counts is not copied again."""

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
        self._tell = on_progress
        self._done: dict[str, CopiedFile] = {}
        self._wanted: set[str] = set()

    def take(self, loaded: LoadedSnapshot) -> int:
        """Everything that one snapshot needs; returns the number of its topics. Raises `_Moved`."""
        self._wanted = set()
        snapshot = loaded.snapshot
        kept, missing = self._take_topics(() if snapshot is None else snapshot.topics)
        removed: set[int] = set()
        for group in log_groups(self._fs, self._directory, snapshot):
            removed |= self._take_log(group)
        if snapshot is None:
            if snapshot_numbers(self._fs, self._directory):
                raise _Moved("the log was cut while it was copied")
            return 0
        # A topic that was deleted since the snapshot may have lost its segments already.
        for topic_id in missing.keys() - removed:
            raise _Moved(missing[topic_id])
        topics = tuple(topic for topic in kept.values() if topic.id not in removed)
        content = encode_snapshot(msgspec.structs.replace(snapshot, topics=topics))
        self._put(snapshot_path(loaded.number), content)
        return len(topics)

    def finish(self, number: int, topics: int, now_ms: int) -> BackupManifest:
        """Make it durable, check it, and only then call it a backup."""
        for path in self._done.keys() - self._wanted:
            self._fs.unlink(os.path.join(self._target, path))
            del self._done[path]
        for folder in {os.path.dirname(path) for path in self._done}:
            self._fs.sync_dir(os.path.join(self._target, folder))
        report = verify(self._fs, self._target, on_progress=self._tell)
        if report.problems:
            raise Damaged(f"the copy is damaged, and so may be the original: {report.problems[0]}")
        files = [self._done[path] for path in sorted(self._done)]
        manifest = BackupManifest(created_ms=now_ms, snapshot=number, topics=topics, files=files)
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_durably(self._fs, os.path.join(self._target, MANIFEST), [content], staging=self._target)
        return manifest

    def _take_topics(self, topics: tuple[TopicEntry, ...]) -> tuple[dict[int, TopicEntry], dict[int, str]]:
        """By id: the topics whose segments are copied, and what is missing of the others."""
        kept: dict[int, TopicEntry] = {}
        missing: dict[int, str] = {}
        for topic in topics:
            try:
                kept[topic.id] = self._take_topic(topic)
            except NotFound as error:
                missing[topic.id] = f"a segment of {topic.name} is missing: {error}"
        return kept, missing

    def _take_topic(self, topic: TopicEntry) -> TopicEntry:
        """Copy its segments; the entry says afterwards that none of them is in the cold tier."""
        for entry in topic.segments:
            self._tell(f"copying {topic.name}: {len(self._done):,} files so far")
            self._take_segment(self._store_of(topic, entry), topic, entry)
        segments = tuple(msgspec.structs.replace(entry, cold=False) for entry in topic.segments)
        return msgspec.structs.replace(topic, segments=segments)

    def _store_of(self, topic: TopicEntry, entry: SegmentEntry) -> SegmentStore:
        hot = self._hot.topic(topic.id)
        if not entry.cold or hot.exists(entry.first_seq, Part.IDX):
            return hot
        if self._cold is None:
            raise Conflict(
                f"{topic.name} has records in the cold tier; give it, so that the backup has them too"
            )
        return self._cold.topic(topic.id)

    def _take_segment(self, store: SegmentStore, topic: TopicEntry, entry: SegmentEntry) -> None:
        for part, size in ((Part.DATA, entry.data_bytes), (Part.IDX, entry.idx_bytes)):
            path = segment_path(topic, entry, part)
            known = self._done.get(path)
            if known is not None and known.size == size:
                self._wanted.add(path)
            else:
                self._put(path, store.read_range(entry.first_seq, part, 0, size))
        # Of a segment that still grows the tags may be ahead of the snapshot; they can be made again.
        for part in (Part.TAGS, Part.DEL) if entry.sealed else (Part.DEL,):
            try:
                content = store.view(entry.first_seq, part)
            except NotFound:
                continue
            self._put(segment_path(topic, entry, part), content)

    def _take_log(self, group: LogGroup) -> set[int]:
        """Copy a log up to its last whole frame; returns the topics that it deletes."""
        self._tell(f"copying the log in {group.path}")
        try:
            found = scan_log(self._fs, self._directory, group, needed_only=True)
        except NotFound as error:
            raise _Moved(f"the log in {group.path} was cut while it was copied: {error}") from error
        if found.damage:
            raise _Moved(f"the log is damaged: {os.path.join(group.path, str(found.damage[0]))}")
        for file in found.files:
            self._put(os.path.join(group.path, file_name(file.number)), file.view[: file.end])
        if found.files:
            active = f"{file_name(found.files[-1].number)}\n".encode()
            self._put(os.path.join(group.path, CURRENT), active)
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
