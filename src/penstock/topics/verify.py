"""Every checksum of a data directory, compared with the bytes: snapshots, segments and the log.

Reads only. Beside a running server it looks again at what seems wrong, because the server moves on meanwhile:
damage stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from penstock.errors import NotFound, PenstockError
from penstock.files import FileSystem
from penstock.files.log_file import file_name
from penstock.topics.data_directory import (
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
from penstock.topics.segment import IndexRows, Part, SegmentEntry, damaged_rows, read_index
from penstock.topics.segment_deleted import decode_deleted
from penstock.topics.segment_root import LocalSegmentRoot, SegmentRoot
from penstock.topics.segment_store import SegmentStore
from penstock.topics.segment_tags import decode_tags
from penstock.topics.snapshot import Snapshot, TopicEntry, decode_snapshot

__all__ = ["Finding", "Severity", "VerifyReport", "verify"]

_ROUNDS_MAX: Final = 5


class Severity(StrEnum):
    """Damage, or something worth knowing."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A file, perhaps a range of its bytes, and what is wrong; `path` is relative to the data directory."""

    severity: Severity
    path: str
    text: str
    start: int | None = None
    end: int | None = None
    topic: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f", bytes {self.start} to {self.end}"
        return f"{self.path}{where}: {self.text}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What was looked at and what was found."""

    directory: str
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    topics: int = 0
    stored_records: int = 0
    """Records in segments, deleted ones included."""
    log_frames: int = 0

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is Severity.PROBLEM]

    def count(self, size: int) -> None:
        """One more file was read, or as much of it as counts."""
        self.files += 1
        self.bytes += size


def verify(
    fs: FileSystem,
    directory: str,
    *,
    cold: SegmentRoot | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Check a data directory. Segments in the cold tier are read only if it is given.

    Damage is a finding. Raises `NotFound` when there is no such directory, and what reading raises.
    """
    fs.stat(directory)
    for _ in range(_ROUNDS_MAX - 1):
        report = _verify_once(fs, directory, cold, on_progress)
        if not report.problems or not is_in_use(fs, directory):
            return report
    return _verify_once(fs, directory, cold, on_progress)


def _verify_once(
    fs: FileSystem, directory: str, cold: SegmentRoot | None, tell: Callable[[str], None]
) -> VerifyReport:
    report = VerifyReport(directory=directory)
    hot = LocalSegmentRoot(fs, directory)
    snapshot = _check_snapshots(fs, report)
    removed: set[int] = set()
    for group in log_groups(fs, directory, snapshot):
        tell(f"checking the log in {group.path}")
        removed |= _check_log(fs, group, report)
    for topic in () if snapshot is None else snapshot.topics:
        if topic.id in removed:
            continue
        report.topics += 1
        for entry in topic.segments:
            tell(f"checking {topic.name}: {report.stored_records:,} records so far")
            store: SegmentStore | None = hot.topic(topic.id)
            if entry.cold and not hot.topic(topic.id).exists(entry.first_seq, Part.IDX):
                store = None if cold is None else cold.topic(topic.id)
            if store is None:
                text = f"{entry.count:,} records of {topic.name} are in the cold tier, which was not given"
                path = segment_path(topic, entry, Part.DATA)
                report.findings.append(Finding(severity=Severity.NOTE, path=path, text=text))
            else:
                _SegmentCheck(report, store, topic, entry).run()
    return report


def _check_snapshots(fs: FileSystem, report: VerifyReport) -> Snapshot | None:
    """Every snapshot; returns the newest that can be read."""
    newest: Snapshot | None = None
    for number in snapshot_numbers(fs, report.directory):
        path = snapshot_path(number)
        try:
            raw = fs.read(os.path.join(report.directory, path))
        except NotFound:  # a newer one has replaced it a moment ago
            continue
        report.count(len(raw))
        try:
            newest = decode_snapshot(raw)
        except PenstockError as error:
            text = f"the snapshot cannot be read: {error}"
            report.findings.append(
                Finding(severity=Severity.PROBLEM, path=path, text=text, start=0, end=len(raw))
            )
    return newest


def _check_log(fs: FileSystem, group: LogGroup, report: VerifyReport) -> set[int]:
    """One log; returns the topics that it deletes."""
    found = scan_log(fs, report.directory, group)
    for file in found.files:
        report.count(file.end)
        report.log_frames += file.frame_count
    for damage in found.damage:
        needed = damage.end is None or (damage.file, damage.end) > group.start
        report.findings.append(
            Finding(
                severity=Severity.PROBLEM if needed else Severity.NOTE,
                path=os.path.join(group.path, file_name(damage.file)),
                text=damage.reason if needed else f"{damage.reason}; a snapshot has what it held",
                start=None if damage.end is None else damage.start,
                end=damage.end,
            )
        )
    if found.torn:
        last = found.files[-1]
        report.findings.append(
            Finding(
                severity=Severity.NOTE,
                path=os.path.join(group.path, file_name(last.number)),
                text="the last write was cut off; the next start removes it",
                start=last.end,
                end=len(last.view),
            )
        )
    return removed_topics(found)


class _SegmentCheck:
    """The files of one segment, as far as the metadata says that they count."""

    def __init__(
        self, report: VerifyReport, store: SegmentStore, topic: TopicEntry, entry: SegmentEntry
    ) -> None:
        self._report = report
        self._store = store
        self._topic = topic
        self._entry = entry

    def run(self) -> None:
        entry = self._entry
        index = self._read(Part.IDX, entry.idx_bytes)
        data = self._read(Part.DATA, entry.data_bytes)
        if index is None:
            return
        try:
            rows = read_index(index, entry.first_seq, entry.idx_xxh3)
        except Damaged as error:
            self._damaged(Part.IDX, str(error), 0, entry.idx_bytes)
            return
        if data is not None:
            self._check_records(data, rows)
        self._check_deleted()
        if entry.sealed:  # the tags of a segment that still grows may be ahead of the snapshot
            self._check_tags(rows)

    def _check_records(self, data: memoryview, rows: IndexRows) -> None:
        self._report.stored_records += int(np.count_nonzero(rows["length"]))
        for seq, error in damaged_rows(data, rows, self._entry.first_seq):
            row = rows[seq - self._entry.first_seq]
            start = int(row["offset"])
            self._damaged(Part.DATA, str(error), start, start + int(row["length"]), seq)

    def _check_deleted(self) -> None:
        raw = self._whole(Part.DEL)
        wanted = self._entry.deleted
        if raw is None:
            if wanted:
                self._damaged(Part.DEL, f"the file is missing; it told of {wanted:,} deleted records")
            return
        try:
            known = int(decode_deleted(raw, self._entry.first_seq, self._entry.count).sum())
        except Damaged as error:
            self._damaged(Part.DEL, str(error), 0, len(raw))
            return
        if known < wanted:
            self._damaged(
                Part.DEL, f"it tells of {known:,} deleted records instead of {wanted:,}", 0, len(raw)
            )

    def _check_tags(self, rows: IndexRows) -> None:
        raw = self._whole(Part.TAGS)
        if raw is not None:
            try:
                decode_tags(raw, self._entry.first_seq, rows)
            except Damaged as error:
                self._damaged(Part.TAGS, f"{error}; it can be made again from the records", 0, len(raw))

    def _read(self, part: Part, size: int) -> memoryview | None:
        try:
            content = self._store.read_range(self._entry.first_seq, part, 0, size)
        except NotFound:
            self._damaged(part, "the file is missing")
            return None
        except Damaged as error:
            self._damaged(part, str(error))
            return None
        self._report.count(size)
        return content

    def _whole(self, part: Part) -> memoryview | None:
        try:
            content = self._store.view(self._entry.first_seq, part)
        except NotFound:
            return None
        self._report.count(len(content))
        return content

    def _damaged(
        self, part: Part, text: str, start: int | None = None, end: int | None = None, seq: int | None = None
    ) -> None:
        self._report.findings.append(
            Finding(
                severity=Severity.PROBLEM,
                path=segment_path(self._topic, self._entry, part),
                text=text,
                start=start,
                end=end,
                topic=self._topic.name,
                first_seq=self._entry.first_seq if seq is None else seq,
                last_seq=self._entry.end_seq - 1 if seq is None else seq,
            )
        )
