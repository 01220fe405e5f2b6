"""The interface of the file system, its implementation for this machine, and locks between processes.

Another platform needs another implementation of `FileSystem` next to `posix`, with its own locks and modes.
"""

from __future__ import annotations

from penstock.storage.fs.file_system import (
    Buffer,
    FileStat,
    FileSystem,
    FileView,
    LogFile,
    WritableFile,
    explain,
    publish,
    stage,
    write_durably,
)
from penstock.storage.fs.locks import DATA_MODE, DirectoryLock, LockHeld, data_modes
from penstock.storage.fs.posix import VOLATILE, OsFileSystem, device_kind

__all__ = [
    "DATA_MODE",
    "VOLATILE",
    "Buffer",
    "DirectoryLock",
    "FileStat",
    "FileSystem",
    "FileView",
    "LockHeld",
    "LogFile",
    "OsFileSystem",
    "WritableFile",
    "data_modes",
    "device_kind",
    "explain",
    "publish",
    "stage",
    "write_durably",
]
