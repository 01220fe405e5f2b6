"""The layout of a data directory, for tools that read it with or without a running server."""

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
"""The manifest of a backup. It exists only if the backup is complete."""
UNFINISHED: Final = "backup.unfinished"
"""Locked by the process that writes a backup, and present until the backup is complete."""
RESTORING: Final = "restoring"
"""The folder for files that are not in place yet. It exists until a restore is complete."""

_ATTEMPTS: Final = 10
_NAMED_MAX: Final = 5
_PREFIX, _SUFFIX = "snapshot-", ".bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGroup:
    """One log of the directory, by its relative path. `start` is the first position that a snapshot needs."""

    path: str
    start: LogPosition
    synced: LogPosition
    """The position up to which the snapshot knows the log to be durable."""


def check_data_directory(fs: FileSystem, directory: str) -> None:
    """Raise `NotFound` if there is no directory, or `Rejected` unless it is a complete data directory."""
    fs.stat(directory)
    check_complete(fs, directory)
    if not any(_exists(fs, directory, name) for name in (META, WAL, LOCK_FILE)):
        raise Rejected(
            f"{directory} is not a data directory of topics; "
            "name the one given to the server (TOPICS_DATA_DIR)"
        )


def check_complete(fs: FileSystem, directory: str) -> None:
    """Raise `Rejected` if an unfinished backup or restore left the directory incomplete."""
    if _exists(fs, directory, UNFINISHED) and not _exists(fs, directory, MANIFEST):
        raise Rejected(f"{directory} is a backup that was not finished; take it again, or remove it")
    if _exists(fs, directory, RESTORING):
        raise Rejected(f"the restore into {directory} did not finish; restore it again")


def _exists(fs: FileSystem, directory: str, name: str) -> bool:
    try:
        fs.stat(os.path.join(directory, name))
    except NotFound:
        return False
    return True


def remove_files(fs: FileSystem, directory: str, names: Iterable[str]) -> None:
    """Remove files below a directory, then the folders that are empty. Missing files are ignored."""
    folders: set[str] = set()
    for name in names:
        with contextlib.suppress(NotFound):
            fs.unlink(os.path.join(directory, name))
        while name := os.path.dirname(name):
            folders.add(name)
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(PenstockError):  # the folder has another file, or is gone
            fs.remove_dir(os.path.join(directory, folder))


def is_in_use(fs: FileSystem, directory: str) -> bool:
    """Return whether a server runs on this data directory now. Leave no trace."""
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
    """Return the numbers of the existing snapshots, oldest first."""
    names = [name for name, _ in fs.list_files(os.path.join(directory, META))]
    digits = (name[len(_PREFIX) : -len(_SUFFIX)] for name in names)
    numbers = (int(text) for text in digits if text.isascii() and text.isdigit())
    return sorted(number for number in numbers if snapshot_name(number) in names)


def snapshot_path(number: int) -> str:
    return os.path.join(META, snapshot_name(number))


def segment_path(topic: TopicEntry, entry: SegmentEntry, part: Part) -> str:
    """Return the path of a segment's file on the hot tier, even if it is only on the cold tier."""
    return os.path.join(TOPICS, topic_folder(topic.id), f"{segment_name(entry.first_seq)}.{part.value}")


def data_store(
    topic: TopicEntry, entry: SegmentEntry, hot: LocalSegmentRoot, cold: SegmentRoot | None
) -> SegmentStore | None:
    """Return the store for the data file of a segment, or None if that is a cold tier that is not given.

    Only data files leave the hot tier. The other files in the cold tier are as old as the move.
    """
    near = hot.topic(topic.id)
    if near.exists(entry.first_seq, Part.DATA):
        return near
    if cold is None:
        return None if entry.cold else near
    far = cold.topic(topic.id)
    # A snapshot from before the move is used when the newest one cannot be read.
    return far if entry.cold or far.exists(entry.first_seq, Part.DATA) else near


def unknown_segments(topic_ids: Sequence[int]) -> str:
    """Describe segments of topics that neither the snapshot nor the log names."""
    folders = ", ".join(os.path.join(TOPICS, topic_folder(number)) for number in topic_ids[:_NAMED_MAX])
    more = f" and {len(topic_ids) - _NAMED_MAX} more" if len(topic_ids) > _NAMED_MAX else ""
    return (
        f"there are segments in {folders}{more}, and neither {META} nor {WAL} names these topics: both are "
        "gone, damaged or older than the segments. Restore them from a backup, or move the segments away"
    )


def log_groups(fs: FileSystem, directory: str, snapshot: Snapshot | None) -> list[LogGroup]:
    """Return every log on disk, and every log that a snapshot needs although it is missing.

    A log that has lost all its files is still found by its `EXTENT` and `CURRENT`.
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
    """Return every frame of a log, or those from its start on.

    A log that is written during the read may look damaged, because its end is read before the extent. Such a
    scan is repeated; real damage stays.
    """
    folder = os.path.join(directory, group.path)
    start = group.start if needed_only and group.start.file else None
    for _ in range(_ATTEMPTS):
        try:
            found = scan(fs, folder, WalFormat(), start=start, in_memory=True)
        except NotFound:  # a file was dropped between the listing and the read
            continue
        if not found.damage:
            return _with_start(found, group.start)
    return _with_start(scan(fs, folder, WalFormat(), start=start, in_memory=True), group.start)


def _with_start(found: LogScan, start: LogPosition) -> LogScan:
    """Add damage to a scan if the file in which the log must begin is missing."""
    if start.file and all(file.number != start.file for file in found.files) and not found.damage:
        found.damage.append(LogDamage(file=start.file, start=0, end=None, reason="the file is missing"))
    return found


def removed_topics(found: LogScan) -> set[int]:
    """Return the ids of topics that the log deletes. Their segments are removed before the next snapshot."""
    ids: set[int] = set()
    for file in found.files:
        for run in file.runs:
            heads = read_frames(file.view, run.start, run.ends).heads
            ids.update(heads["topic_id"][heads["type"] == FrameType.TOPIC_DELETE].tolist())
    return ids
