"""Durable files: the file-system seam, whole files put in place in one step, the data-directory lock, and the
log: frames appended to preallocated files, committed by groups, and read back after a crash.
"""

from __future__ import annotations

from penstock.storage.append_log import AppendLog
from penstock.storage.atomic import write_durably
from penstock.storage.dirlock import DirectoryLock
from penstock.storage.file_access import DATA_MODE, data_modes
from penstock.storage.fs import (
    Buffer,
    FileStat,
    FileSystem,
    FileView,
    LockHeld,
    LogFile,
    OsFileSystem,
    WritableFile,
    explain,
    publish,
    stage,
)
from penstock.storage.group_commit import CommitStats, Entry, GroupCommitter, QueueFull, commit_entries
from penstock.storage.log_extent import EXTENT, ExtentFile, LostBytes, lost_bytes, read_extent
from penstock.storage.log_file import CURRENT, LogDamage, LogHeader, LogPosition, file_name, file_number
from penstock.storage.log_format import FrameEnds, LogFormat, chase
from penstock.storage.log_layout import LogLayout, NumberedLayout
from penstock.storage.log_scan import FrameRun, LogScan, ScannedFile, exact, repair_tail, scan
from penstock.storage.mounts import VOLATILE, device_kind

__all__ = [
    "CURRENT",
    "DATA_MODE",
    "EXTENT",
    "VOLATILE",
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
    "LostBytes",
    "NumberedLayout",
    "OsFileSystem",
    "QueueFull",
    "ScannedFile",
    "WritableFile",
    "chase",
    "commit_entries",
    "data_modes",
    "device_kind",
    "exact",
    "explain",
    "file_name",
    "file_number",
    "lost_bytes",
    "publish",
    "read_extent",
    "repair_tail",
    "scan",
    "stage",
    "write_durably",
]
