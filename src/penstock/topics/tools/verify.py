"""Every checksum of a data directory, compared with the bytes: snapshots, segments and the log.

Reads only. Beside a running server it looks again at what seems wrong, because the server moves on meanwhile:
damage stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.storage import FileSystem
from penstock.topics.data_directory import (
    check_data_directory,
    data_store,
    is_in_use,
    snapshot_numbers,
    snapshot_path,
)
from penstock.topics.segment_root import LocalSegmentRoot, SegmentRoot
from penstock.topics.snapshot import Snapshot, decode_snapshot
from penstock.topics.tools.verify_log import LogCheck
from penstock.topics.tools.verify_report import Finding, Severity, VerifyReport
from penstock.topics.tools.verify_segment import SegmentCheck

__all__ = ["Finding", "Severity", "VerifyReport", "verify", "verify_files"]

_ROUNDS_MAX: Final = 5


def verify(
    fs: FileSystem,
    directory: str,
    *,
    cold: SegmentRoot | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Check a data directory or a backup. Records in the cold tier are read only if it is given.

    Damage is a finding. Raises `NotFound` when there is no such directory, `Rejected` when it is no data
    directory or an unfinished one, and what reading raises.
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
    """Check the files of a directory once, whether or not it is finished."""
    report = VerifyReport(directory=directory)
    hot = LocalSegmentRoot(fs, directory)
    snapshot = _check_snapshots(fs, report)
    log = LogCheck(fs, report, snapshot)
    removed = log.run(on_progress)
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
    """Every snapshot; returns the newest that can be read."""
    newest: Snapshot | None = None
    for number in snapshot_numbers(fs, report.directory):
        path = snapshot_path(number)
        try:
            raw = fs.read(os.path.join(report.directory, path))
        except NotFound:  # a newer one has replaced it a moment ago
            continue
        except MediaError as error:
            end = error.offset + error.length
            text = f"the snapshot cannot be read: {error}"
            report.findings.append(
                Finding(severity=Severity.PROBLEM, path=path, text=text, start=error.offset, end=end)
            )
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
