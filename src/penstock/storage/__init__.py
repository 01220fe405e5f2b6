"""Durable files: the file-system seam, whole files put in place in one step, the data-directory lock, and the
log: frames appended to preallocated files, committed by groups, and read back after a crash.
"""

from __future__ import annotations

from penstock.storage.append_log import AppendLog
from penstock.storage.atomic import write_durably
from penstock.storage.dirlock import DirectoryLock
from penstock.storage.fs import (
    Buffer,
    FileStat,
    FileSystem,
    FileView,
    LockHeld,
    LogFile,
    OsFileSystem,
    WritableFile,
)
from penstock.storage.group_commit import CommitStats, Entry, GroupCommitter, QueueFull, commit_entries
from penstock.storage.log_extent import ExtentFile
from penstock.storage.log_file import LogDamage, LogHeader, LogPosition
from penstock.storage.log_format import FrameEnds, LogFormat, chase
from penstock.storage.log_layout import LogLayout, NumberedLayout
from penstock.storage.log_scan import FrameRun, LogScan, ScannedFile, repair_tail, scan

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
