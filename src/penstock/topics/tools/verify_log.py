"""The log of a data directory: every frame that a start looks for, and whether its topic is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

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
from penstock.topics.data_directory import META, LogGroup, log_groups, removed_topics, scan_log
from penstock.topics.frame import FrameType
from penstock.topics.frame_scan import WalFormat, read_frames
from penstock.topics.snapshot import Snapshot
from penstock.topics.tools.verify_report import Finding, Severity, VerifyReport
from penstock.topics.wording import counted

__all__ = ["LogCheck"]

_FORMAT = WalFormat()


class LogCheck:
    """All log directories, seen from the newest snapshot that can be read."""

    def __init__(self, fs: FileSystem, report: VerifyReport, snapshot: Snapshot | None) -> None:
        self._fs = fs
        self._report = report
        self._snapshot = snapshot
        # Whether an unreadable newer snapshot may have needed a log that this one does not name is not known.
        self._is_newest = not report.problems
        self._known = {topic.id for topic in snapshot.topics} if snapshot is not None else set()
        self._nameless: dict[int, list[tuple[str, int, int]]] = {}

    def run(self, tell: Callable[[str], None]) -> set[int]:
        """Add what is wrong to the report; returns the topics that the log deletes."""
        removed: set[int] = set()
        for group in log_groups(self._fs, self._report.directory, self._snapshot):
            tell(f"checking the log in {group.path}")
            # Before the log is read: beside a running server the log only grows.
            extent = read_extent(self._fs, os.path.join(self._report.directory, group.path))
            found = scan_log(self._fs, self._report.directory, group)
            if not extent.readable:
                text = "it cannot be read: a loss at the end of the log may go unnoticed until the next start"
                place = os.path.join(group.path, EXTENT)
                self._report.findings.append(Finding(severity=Severity.NOTE, path=place, text=text))
            self._check_files(group, found)
            for damage in lost_bytes(extent, found, group.start, group.synced)[0]:
                self._add(Severity.PROBLEM, group, damage.file, damage.reason, damage.start, damage.end)
            self._check_beginning(group, found)
            if not self._is_covered(group):
                self._sort_topics(group, found)
            removed |= removed_topics(found)
        self._tell_nameless(removed)
        return removed

    def _is_covered(self, group: LogGroup) -> bool:
        """Whether a start does not read this log, because the newest snapshot does not name it."""
        return self._snapshot is not None and self._is_newest and not group.start.file

    def _check_files(self, group: LogGroup, found: LogScan) -> None:
        for file in found.files:
            self._report.count(file.end)
            self._report.log_frames += file.frame_count
        for damage in found.damage:
            # A file that says nothing of itself, or is not the one it should be, is no matter of a range.
            whole = damage.end is None or damage.start >= damage.end or damage.start == 0
            read = damage.file >= group.start.file if whole else (damage.file, damage.end) > group.start
            if read and not self._is_covered(group):
                self._add(Severity.PROBLEM, group, damage.file, damage.reason, damage.start, damage.end)
            else:
                text = f"{damage.reason}; no start reads this part any more, a newer snapshot stands for it"
                self._add(Severity.NOTE, group, damage.file, text, damage.start, damage.end)
        if found.torn:
            last = found.files[-1]
            text = "the last write was cut off; the next start removes it"
            self._add(Severity.NOTE, group, last.number, text, last.end, last.size)

    def _check_beginning(self, group: LogGroup, found: LogScan) -> None:
        """A log that goes on where a snapshot ended needs that snapshot."""
        if self._snapshot is not None or not found.files:
            return
        first = found.files[0]
        header = LogHeader.decode(_FORMAT, first.bytes_of(0, min(first.end, found.first_offset)))
        if header is not None and header.previous.file:
            text = f"what was before it is in a snapshot, and there is none in {META} that can be read"
            self._add(Severity.PROBLEM, group, found.files[0].number, text)

    def _sort_topics(self, group: LogGroup, found: LogScan) -> None:
        """Which topics are created here, and of which ones there are records."""
        for file in found.files:
            for heads in _heads(file, group.start):
                ids, kinds = heads["topic_id"], heads["type"]
                self._known.update(ids[kinds == FrameType.TOPIC_CREATE].tolist())
                appended, counts = np.unique(ids[kinds == FrameType.APPEND], return_counts=True)
                for topic_id, count in zip(appended.tolist(), counts.tolist(), strict=True):
                    self._nameless.setdefault(topic_id, []).append((group.path, file.number, count))

    def _tell_nameless(self, removed: set[int]) -> None:
        for topic_id in self._nameless.keys() - self._known - removed:
            for path, number, count in self._nameless[topic_id]:
                text = f"{counted(count, 'record')} of topic {topic_id}, which no snapshot and no log names"
                place = os.path.join(path, file_name(number))
                self._report.findings.append(Finding(severity=Severity.PROBLEM, path=place, text=text))

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
        self._report.findings.append(Finding(severity=severity, path=place, text=text, start=start, end=end))


def _heads(file: ScannedFile, start: LogPosition) -> Iterator[npt.NDArray[np.void]]:
    """The heads of the frames that a start reads."""
    for run in file.runs:
        table = read_frames(file.view, run.start, run.ends)
        if file.number > start.file:
            yield table.heads
        elif file.number == start.file:
            yield table.heads[table.starts >= start.offset]
