"""The layout of a data directory, for tools that read it beside its server or without one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import NotFound, PenstockError, Rejected
from penstock.storage import (
    CURRENT,
    EXTENT,
    FileSystem,
    LockHeld,
    LogDamage,
    LogPosition,
    LogScan,
    file_number,
    scan,
)
from penstock.topics.checkpoints.snapshot import Snapshot, TopicEntry, snapshot_name
from penstock.topics.log.frame import FrameType
from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.segments.format import Part, SegmentEntry, segment_name
from penstock.topics.segments.store import LocalSegmentRoot, SegmentRoot, SegmentStore, topic_folder

LOCK_FILE: Final = ".topics.lock"
META: Final = "meta"
TOPICS: Final = "topics"
WAL: Final = "wal"
MANIFEST: Final = "backup.json"
"""Where it is, a backup is whole."""
UNFINISHED: Final = "backup.unfinished"
"""Locked by the process that writes a backup, and present until the backup is complete."""
RESTORING: Final = "restoring"
"""The folder for what is not in place yet; there until a restore is complete."""

_LOOKS: Final = 10
_NAMED_MAX: Final = 5
_PREFIX, _SUFFIX = "snapshot-", ".bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGroup:
    """One log of the directory, by its relative path; `start` is from where on a snapshot needs it."""

    path: str
    start: LogPosition
    synced: LogPosition
    """What the snapshot knows to have been durable."""


def check_data_directory(fs: FileSystem, directory: str) -> None:
    """Raises `NotFound` unless there is a directory, `Rejected` unless it is one of topics, and complete."""
    fs.stat(directory)
    check_complete(fs, directory)
    if not any(_exists(fs, directory, name) for name in (META, WAL, LOCK_FILE)):
        raise Rejected(
            f"{directory} is no data directory of topics; name the one given to the server (TOPICS_DATA_DIR)"
        )


def check_complete(fs: FileSystem, directory: str) -> None:
    """Raises `Rejected` for what an unfinished backup or restore left."""
    if _exists(fs, directory, UNFINISHED) and not _exists(fs, directory, MANIFEST):
        raise Rejected(f"{directory} is a backup that was not finished; take it again, or remove it")
    if _exists(fs, directory, RESTORING):
        raise Rejected(f"{directory} was not restored to the end; restore it again")


def _exists(fs: FileSystem, directory: str, name: str) -> bool:
    try:
        fs.stat(os.path.join(directory, name))
    except NotFound:
        return False
    return True


def remove_files(fs: FileSystem, directory: str, names: Iterable[str]) -> None:
    """Remove files below a directory, and the folders that are empty then; nothing there is fine."""
    folders: set[str] = set()
    for name in names:
        with contextlib.suppress(NotFound):
            fs.unlink(os.path.join(directory, name))
        while name := os.path.dirname(name):
            folders.add(name)
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(PenstockError):  # another file is in it, or it is gone
            fs.remove_dir(os.path.join(directory, folder))


def is_in_use(fs: FileSystem, directory: str) -> bool:
    """Whether a server runs on this data directory now. Leaves no trace."""
    path = os.path.join(directory, LOCK_FILE)
    try:
        fs.stat(path)
        with fs.lock(path, shared=True, wait=False):
            return False
    except LockHeld:
        return True
    except PenstockError:
        return False


def snapshot_numbers(fs: FileSystem, directory: str) -> list[int]:
    """The snapshots that are there, oldest first."""
    names = [name for name, _ in fs.list_files(os.path.join(directory, META))]
    digits = (name[len(_PREFIX) : -len(_SUFFIX)] for name in names)
    numbers = (int(text) for text in digits if text.isascii() and text.isdigit())
    return sorted(number for number in numbers if snapshot_name(number) in names)


def snapshot_path(number: int) -> str:
    return os.path.join(META, snapshot_name(number))


def segment_path(topic: TopicEntry, entry: SegmentEntry, part: Part) -> str:
    """Return the path of a segment's file on the hot tier, even if it is on the cold tier only."""
    return os.path.join(TOPICS, topic_folder(topic.id), f"{segment_name(entry.first_seq)}.{part.value}")


def data_store(
    topic: TopicEntry, entry: SegmentEntry, hot: LocalSegmentRoot, cold: SegmentRoot | None
) -> SegmentStore | None:
    """Return where the data file of a segment is read; None if that is a cold tier that is not given.

    Only data files leave the hot tier. What the cold one has beside them is as old as the move.
    """
    near = hot.topic(topic.id)
    if near.exists(entry.first_seq, Part.DATA):
        return near
    if cold is None:
        return None if entry.cold else near
    far = cold.topic(topic.id)
    # A snapshot from before the move still counts when the newest one cannot be read.
    return far if entry.cold or far.exists(entry.first_seq, Part.DATA) else near


def unknown_segments(topic_ids: Sequence[int]) -> str:
    """Report segments of topics that neither the snapshot nor the log names."""
    folders = ", ".join(os.path.join(TOPICS, topic_folder(number)) for number in topic_ids[:_NAMED_MAX])
    more = f" and {len(topic_ids) - _NAMED_MAX} more" if len(topic_ids) > _NAMED_MAX else ""
    return (
        f"there are segments in {folders}{more}, and neither {META} nor {WAL} names these topics: both are "
        "gone, damaged or older than the segments. Restore them from a backup, or move the segments away"
    )


def log_groups(fs: FileSystem, directory: str, snapshot: Snapshot | None) -> list[LogGroup]:
    """Every log on disk, and those that a snapshot needs although they are not there.

    A log that has lost all its files is still there: its `EXTENT` and `CURRENT` name them.
    """
    folders = {
        os.path.join(WAL, os.path.dirname(path)).rstrip("/")
        for path, _ in fs.list_files(os.path.join(directory, WAL))
        if os.path.basename(path) in (CURRENT, EXTENT) or file_number(os.path.basename(path)) is not None
    }
    starts: dict[str, LogPosition] = {}
    for name, start in (snapshot.wal if snapshot is not None else {}).items():
        folder = WAL if name in ("", WAL) else os.path.join(WAL, name.removeprefix(f"{WAL}/"))
        starts[folder] = LogPosition(start.file, start.offset)
    none = LogPosition(0, 0)
    synced = {} if snapshot is None else snapshot.synced
    return [
        LogGroup(
            path=path,
            start=starts.get(path, none),
            synced=LogPosition(synced[path].file, synced[path].offset) if path in synced else none,
        )
        for path in sorted(folders | set(starts))
    ]


def scan_log(fs: FileSystem, directory: str, group: LogGroup, *, needed_only: bool = False) -> LogScan:
    """Every frame of a log, or those from its start on.

    A log that is being written while it is read may look damaged: its end was read before, and what vouches
    for it after it was written. So it is read again; damage stays.
    """
    folder = os.path.join(directory, group.path)
    start = group.start if needed_only and group.start.file else None
    for _ in range(_LOOKS):
        try:
            found = scan(fs, folder, WalFormat(), start=start, in_memory=True)
        except NotFound:  # a file was dropped between listing and reading it
            continue
        if not found.damage:
            return _with_start(found, group.start)
    return _with_start(scan(fs, folder, WalFormat(), start=start, in_memory=True), group.start)


def _with_start(found: LogScan, start: LogPosition) -> LogScan:
    """A scan that also misses the file in which the log has to begin."""
    if start.file and all(file.number != start.file for file in found.files) and not found.damage:
        found.damage.append(LogDamage(file=start.file, start=0, end=None, reason="the file is missing"))
    return found


def removed_topics(found: LogScan) -> set[int]:
    """Ids of topics that the log says are deleted: their segments go before the next snapshot is written."""
    ids: set[int] = set()
    for file in found.files:
        for run in file.runs:
            heads = read_frames(file.view, run.start, run.ends).heads
            ids.update(heads["topic_id"][heads["type"] == FrameType.TOPIC_DELETE].tolist())
    return ids
