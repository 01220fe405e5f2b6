"""Durable files: the file-system seam, whole files put in place in one step, the data-directory lock, and the
log: frames appended to preallocated files, committed by groups, and read back after a crash.
"""

from __future__ import annotations

from penstock.files.append_log import AppendLog
from penstock.files.atomic import write_durably
from penstock.files.dirlock import DirectoryLock
from penstock.files.group_commit import CommitStats, Entry, GroupCommitter, QueueFull, commit_entries
from penstock.files.log_extent import ExtentFile
from penstock.files.log_file import LogDamage, LogHeader, LogPosition
from penstock.files.log_format import FrameEnds, LogFormat, chase
from penstock.files.log_layout import LogLayout, NumberedLayout
from penstock.files.log_scan import FrameRun, LogScan, ScannedFile, repair_tail, scan
from penstock.fs import (
    Buffer,
    FileStat,
    FileSystem,
    FileView,
    LockHeld,
    LogFile,
    OsFileSystem,
    WritableFile,
)

__all__ = [
    "AppendLog",
    "Buffer",
    "CommitStats",
    "DirectoryLock",
    "Entry",
    "ExtentFile",
    "FileStat",
    "FileSystem",
    "FileView",
    "FrameEnds",
    "FrameRun",
    "GroupCommitter",
    "LockHeld",
    "LogDamage",
    "LogFile",
    "LogFormat",
    "LogHeader",
    "LogLayout",
    "LogPosition",
    "LogScan",
    "NumberedLayout",
    "OsFileSystem",
    "QueueFull",
    "ScannedFile",
    "WritableFile",
    "chase",
    "commit_entries",
    "repair_tail",
    "scan",
    "write_durably",
]
