"""The file system as a seam: what durable code asks of it, the machine's own one, locks between processes.

Another platform is another implementation of `FileSystem`, beside `posix`, with its own locks and modes.
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
