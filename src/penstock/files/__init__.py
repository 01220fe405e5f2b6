"""Durable files: the file-system seam, whole files put in place in one step, and the data-directory lock."""

from __future__ import annotations

from penstock.files.atomic import write_durably
from penstock.files.dirlock import DirectoryLock
from penstock.fs import Buffer, FileStat, FileSystem, LockHeld, OsFileSystem, WritableFile

__all__ = [
    "Buffer",
    "DirectoryLock",
    "FileStat",
    "FileSystem",
    "LockHeld",
    "OsFileSystem",
    "WritableFile",
    "write_durably",
]
