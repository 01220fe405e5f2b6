"""Verification of a data directory: compare every checksum of snapshots, segments and the log.

Verification only reads. If a server is running, apparent damage is checked again, because the server keeps
writing; real damage stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.findings import Finding, Severity, problems_in
from penstock.storage import (
    EXTENT,
    FileSystem,
    LogHeader,
    LogPosition,
    LogScan,
    ScannedFile,
    file_name,
    lost_bytes,
    read_extent,
)
from penstock.topics.checkpoints.layout import (
    META,
    TOPICS,
    LogGroup,
    check_data_directory,
    data_store,
    is_in_use,
    log_groups,
    removed_topics,
    scan_log,
    segment_path,
    snapshot_numbers,
    snapshot_path,
    unknown_segments,
)
from penstock.topics.checkpoints.snapshot import Snapshot, TopicEntry, decode_snapshot
from penstock.topics.errors import Damaged
from penstock.topics.log.frame import FrameType
from penstock.topics.log.frame_scan import WalFormat, read_frames
from penstock.topics.segments.format import (
    HOLE,
    LOST,
    IndexRows,
    Part,
    SegmentEntry,
    damaged_rows,
    decode_deleted,
    read_index,
)
from penstock.topics.segments.store import LocalSegmentRoot, LocalSegmentStore, SegmentRoot, SegmentStore
from penstock.topics.segments.tags import decode_tags


def pluralise(count: int, noun: str) -> str:
    """Format a count with its noun: `1 record`, `2,000 records`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFinding(Finding):
    """A finding about a file or a range of its bytes. The subject is its path in the data directory."""

    start: int | None = None
    end: int | None = None
    topic: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f", bytes {self.start} to {self.end}"
        return f"{self.subject}{where}: {self.text}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """The result of a verification: the files examined and the findings."""

    directory: str
    findings: list[FileFinding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    topics: int = 0
    stored_records: int = 0
    """The number of records read in segments, including deleted ones."""
    log_frames: int = 0

    @property
    def problems(self) -> list[FileFinding]:
        return problems_in(self.findings)

    def count(self, size: int) -> None:
        """Count a file that was read, up to its valid size."""
        self.files += 1
        self.bytes += size


_FORMAT = WalFormat()


class LogCheck:
    """The check of all log directories, relative to the newest readable snapshot."""

    def __init__(self, fs: FileSystem, report: VerifyReport, snapshot: Snapshot | None) -> None:
        self._fs = fs
        self._report = report
        self._snapshot = snapshot
        # An unreadable newer snapshot may need a log that this one does not name.
        self._is_newest = not report.problems
        self._known = {topic.id for topic in snapshot.topics} if snapshot is not None else set()
        self._nameless: dict[int, list[tuple[str, int, int]]] = {}

    def run(self, on_progress: Callable[[str], None]) -> set[int]:
        """Add problems to the report. Return the topics that the log deletes."""
        removed: set[int] = set()
        for group in log_groups(self._fs, self._report.directory, self._snapshot):
            on_progress(f"checking the log in {group.path}")
            # Read this before the log: while a server runs, the log only grows.
            extent = read_extent(self._fs, os.path.join(self._report.directory, group.path))
            found = scan_log(self._fs, self._report.directory, group)
            if not extent.readable:
                text = "it cannot be read: a loss at the end of the log may not be noticed"
                place = os.path.join(group.path, EXTENT)
                self._report.findings.append(FileFinding(severity=Severity.PROBLEM, subject=place, text=text))
            self._check_files(group, found)
            for damage in lost_bytes(extent, found, group.start, group.synced)[0]:
                self._add(Severity.PROBLEM, group, damage.file, damage.reason, damage.start, damage.end)
            self._check_beginning(group, found)
            if not self._is_covered(group):
                self._sort_topics(group, found)
            removed |= removed_topics(found)
        self._report_nameless(removed)
        return removed

    def check_segments(self, stored: Iterable[int], removed: set[int]) -> None:
        """Report segments of topics that neither the snapshot nor the log names."""
        next_id = 1 if self._snapshot is None else self._snapshot.next_topic_id
        if strangers := sorted(number for number in {*stored} - self._known - removed if number >= next_id):
            text = unknown_segments(strangers)
            self._report.findings.append(FileFinding(severity=Severity.PROBLEM, subject=TOPICS, text=text))

    def _is_covered(self, group: LogGroup) -> bool:
        """Return whether a start skips this log, because the newest snapshot does not name it."""
        return self._snapshot is not None and self._is_newest and not group.start.file

    def _check_files(self, group: LogGroup, found: LogScan) -> None:
        for file in found.files:
            self._report.count(file.end)
            self._report.log_frames += file.frame_count
        for damage in found.damage:
            # A file with an invalid header, or the wrong file, is damaged as a whole and not in a range.
            whole = damage.end is None or damage.start >= damage.end or damage.start == 0
            read = damage.file >= group.start.file if whole else (damage.file, damage.end) > group.start
            if read and not self._is_covered(group):
                self._add(Severity.PROBLEM, group, damage.file, damage.reason, damage.start, damage.end)
            else:
                text = f"{damage.reason}; no start reads this part, because a newer snapshot covers it"
                self._add(Severity.NOTE, group, damage.file, text, damage.start, damage.end)
        if found.torn:
            last = found.files[-1]
            text = "the last write was cut off; the next start removes it"
            self._add(Severity.NOTE, group, last.number, text, last.end, last.size)

    def _check_beginning(self, group: LogGroup, found: LogScan) -> None:
        """Report a log that continues a snapshot if there is no readable snapshot."""
        if self._snapshot is not None or not found.files:
            return
        first = found.files[0]
        header = LogHeader.decode(_FORMAT, first.bytes_of(0, min(first.end, found.first_offset)))
        if header is not None and header.previous.file:
            text = f"it continues a snapshot, but {META} has no readable one"
            self._add(Severity.PROBLEM, group, found.files[0].number, text)

    def _sort_topics(self, group: LogGroup, found: LogScan) -> None:
        """Record which topics are created here, and which ones have records."""
        for file in found.files:
            for heads in _heads(file, group.start):
                ids, kinds = heads["topic_id"], heads["type"]
                self._known.update(ids[kinds == FrameType.TOPIC_CREATE].tolist())
                appended, counts = np.unique(ids[kinds == FrameType.APPEND], return_counts=True)
                for topic_id, count in zip(appended.tolist(), counts.tolist(), strict=True):
                    self._nameless.setdefault(topic_id, []).append((group.path, file.number, count))

    def _report_nameless(self, removed: set[int]) -> None:
        for topic_id in self._nameless.keys() - self._known - removed:
            for path, number, count in self._nameless[topic_id]:
                text = f"{pluralise(count, 'record')} of topic {topic_id}, which no snapshot or log names"
                place = os.path.join(path, file_name(number))
                self._report.findings.append(FileFinding(severity=Severity.PROBLEM, subject=place, text=text))

    def _add(
        self,
        severity: Severity,
        group: LogGroup,
        number: int,
        text: str,
        start: int | None = None,
        end: int | None = None,
    ) -> None:
        place = os.path.join(group.path, file_name(number))
        start = None if end is None else start
        self._report.findings.append(
            FileFinding(severity=severity, subject=place, text=text, start=start, end=end)
        )


def _heads(file: ScannedFile, start: LogPosition) -> Iterator[npt.NDArray[np.void]]:
    """Yield the heads of the frames that a start reads."""
    for run in file.runs:
        table = read_frames(file.view, run.start, run.ends)
        if file.number > start.file:
            yield table.heads
        elif file.number == start.file:
            yield table.heads[table.starts >= start.offset]


_Bad: TypeAlias = list[tuple[int, Damaged]]


class SegmentCheck:
    """The check of one segment, up to the sizes in its metadata.

    `hot` has all files except perhaps the data file, which is read from `data`, or not checked if that is
    None.
    """

    def __init__(
        self,
        report: VerifyReport,
        topic: TopicEntry,
        entry: SegmentEntry,
        *,
        hot: SegmentStore,
        data: SegmentStore | None,
    ) -> None:
        self._report = report
        self._topic = topic
        self._entry = entry
        self._hot = hot
        self._data = data

    def run(self) -> None:
        """Add problems to the report."""
        entry = self._entry
        index = self._read(self._hot, Part.IDX, entry.idx_bytes)
        data = self._read_data()
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
        if entry.sealed:  # the tags of a growing segment may be ahead of the snapshot
            self._check_tags(rows)

    def _read_data(self) -> memoryview | None:
        if self._data is not None:
            return self._read(self._data, Part.DATA, self._entry.data_bytes)
        records = pluralise(self._entry.count, "record")
        text = f"{records} of {self._topic.name} not checked: they are in the cold tier; give --cold"
        path = segment_path(self._topic, self._entry, Part.DATA)
        self._report.findings.append(FileFinding(severity=Severity.NOTE, subject=path, text=text))
        return None

    def _check_records(self, data: memoryview, rows: IndexRows) -> None:
        first_seq = self._entry.first_seq
        self._report.stored_records += int(np.count_nonzero(rows["length"]))
        for bad in _neighbours(damaged_rows(data, rows, first_seq), rows, first_seq):
            (low, error), (high, _) = bad[0], bad[-1]
            text = str(error) if len(bad) == 1 else f"{len(bad):,} records cannot be read; the first: {error}"
            start, end = _span(rows[low - first_seq], rows[high - first_seq])
            self._damaged(Part.DATA, text, start, end, (low, high))

    def _check_deleted(self) -> None:
        raw = self._whole(Part.DEL)
        wanted = self._entry.deleted
        if raw is None:
            if wanted:
                lost = pluralise(wanted, "deleted record")
                self._damaged(Part.DEL, f"the file is missing; it listed {lost}")
            return
        try:
            known = int(decode_deleted(raw, self._entry.first_seq, self._entry.count).sum())
        except Damaged as error:
            self._damaged(Part.DEL, str(error), 0, len(raw))
            return
        if known < wanted:
            text = f"it lists {pluralise(known, 'deleted record')} instead of {wanted:,}"
            self._damaged(Part.DEL, text, 0, len(raw))

    def _check_tags(self, rows: IndexRows) -> None:
        raw = self._whole(Part.TAGS)
        if raw is not None:
            try:
                decode_tags(raw, self._entry.first_seq, rows)
            except Damaged as error:
                self._damaged(Part.TAGS, f"{error}; it can be made again from the records", 0, len(raw))

    def _read(self, store: SegmentStore, part: Part, size: int) -> memoryview | None:
        try:
            content = self._around_bad(store, part, size)
            if content is None:
                content = store.read_range(self._entry.first_seq, part, 0, size)
        except NotFound:
            where = "" if store is self._hot else " in the cold tier"
            self._damaged(part, f"the file is missing{where}")
            return None
        except Damaged as error:
            self._damaged(part, str(error))
            return None
        self._report.count(size)
        return content

    def _around_bad(self, store: SegmentStore, part: Part, size: int | None) -> memoryview | None:
        """Read a file with zeros for unreadable parts, and report these parts.

        Return None if the file is not local, or is too short.
        """
        if not isinstance(store, LocalSegmentStore):
            return None
        view = store.opened(self._entry.first_seq, part)
        if size is not None and len(view) < size:
            return None
        content = view[:size]
        for start, end in view.bad:
            # The lost records are reported individually.
            self._report.findings.append(
                FileFinding(
                    severity=Severity.PROBLEM,
                    subject=segment_path(self._topic, self._entry, part),
                    text="the device cannot read this part; keep the file, and check the device",
                    start=start,
                    end=end,
                )
            )
        return content

    def _whole(self, part: Part) -> memoryview | None:
        try:
            content = self._around_bad(self._hot, part, None)
            if content is None:
                content = self._hot.view(self._entry.first_seq, part)
        except NotFound:
            return None
        self._report.count(len(content))
        return content

    def _damaged(
        self,
        part: Part,
        text: str,
        start: int | None = None,
        end: int | None = None,
        seqs: tuple[int, int] | None = None,
    ) -> None:
        first, last = (self._entry.first_seq, self._entry.end_seq - 1) if seqs is None else seqs
        self._report.findings.append(
            FileFinding(
                severity=Severity.PROBLEM,
                subject=segment_path(self._topic, self._entry, part),
                text=text,
                start=start,
                end=end,
                topic=self._topic.name,
                first_seq=first,
                last_seq=last,
            )
        )


def _neighbours(bad: _Bad, rows: IndexRows, first_seq: int) -> Iterator[_Bad]:
    """Group adjacent damaged records, ignoring holes. Records without bytes are grouped separately."""
    places = np.cumsum((rows["flags"] & HOLE) == 0)
    lost = (rows["flags"] & LOST) != 0
    group: _Bad = []
    for seq, error in bad:
        if group:
            here, before = seq - first_seq, group[-1][0] - first_seq
            if places[here] != places[before] + 1 or lost[here] != lost[before]:
                yield group
                group = []
        group.append((seq, error))
    if group:
        yield group


def _span(low: np.void, high: np.void) -> tuple[int | None, int | None]:
    """Return the bytes from one record to another, or None if they never had any."""
    if not low["length"]:
        return None, None
    return int(low["offset"]), int(high["offset"]) + int(high["length"])


_ROUNDS_MAX: Final = 5


def verify(
    fs: FileSystem,
    directory: str,
    *,
    cold: SegmentRoot | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Check a data directory or a backup. Records in the cold tier are read only if `cold` is given.

    Damage is reported as a finding. Raises `NotFound` if there is no such directory, `Rejected` if it is not
    a complete data directory, and read errors.
    """
    check_data_directory(fs, directory)
    for _ in range(_ROUNDS_MAX - 1):
        report = verify_files(fs, directory, cold=cold, on_progress=on_progress)
        if not report.problems or not is_in_use(fs, directory):
            return report
    return verify_files(fs, directory, cold=cold, on_progress=on_progress)


def verify_files(
    fs: FileSystem,
    directory: str,
    *,
    cold: SegmentRoot | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Check the files of a directory once, even if it is unfinished."""
    report = VerifyReport(directory=directory)
    hot = LocalSegmentRoot(fs, directory)
    # Read these before snapshot and log: a running server only adds topics there.
    stored = hot.scan().topics.keys()
    snapshot = _check_snapshots(fs, report)
    log = LogCheck(fs, report, snapshot)
    removed = log.run(on_progress)
    log.check_segments(stored, removed)
    for topic in () if snapshot is None else snapshot.topics:
        if topic.id in removed:
            continue
        report.topics += 1
        for entry in topic.segments:
            on_progress(f"checking {topic.name}: {report.stored_records:,} records so far")
            data = data_store(topic, entry, hot, cold)
            SegmentCheck(report, topic, entry, hot=hot.topic(topic.id), data=data).run()
    return report


def _check_snapshots(fs: FileSystem, report: VerifyReport) -> Snapshot | None:
    """Check every snapshot. Return the newest readable one."""
    newest: Snapshot | None = None
    for number in snapshot_numbers(fs, report.directory):
        path = snapshot_path(number)
        try:
            raw = fs.read(os.path.join(report.directory, path))
        except NotFound:  # a newer one has just replaced it
            continue
        except MediaError as error:
            end = error.offset + error.length
            text = f"the snapshot cannot be read: {error}"
            report.findings.append(
                FileFinding(severity=Severity.PROBLEM, subject=path, text=text, start=error.offset, end=end)
            )
            continue
        report.count(len(raw))
        try:
            newest = decode_snapshot(raw)
        except PenstockError as error:
            text = f"the snapshot cannot be read: {error}"
            report.findings.append(
                FileFinding(severity=Severity.PROBLEM, subject=path, text=text, start=0, end=len(raw))
            )
    return newest
