"""`backup.json`: what a backup consists of. It is written last, so where it is the backup is whole."""

from __future__ import annotations

import os
import re
from typing import Final

import msgspec

from penstock.errors import NotFound, Rejected, Unsupported
from penstock.storage import FileSystem
from penstock.topics.data_directory import MANIFEST, META, TOPICS, WAL
from penstock.topics.errors import Damaged

__all__ = ["MANIFEST", "BackupManifest", "CopiedFile", "is_backup_path", "read_manifest"]

_VERSION: Final = 1
_PATH = re.compile(rf"({META}|{TOPICS}|{WAL})(/[A-Za-z0-9][A-Za-z0-9._-]*)+")


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup; `path` is relative to it."""

    path: str
    size: int
    xxh3: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup consists of, and of which moment it is."""

    version: int = _VERSION
    created_ms: int
    snapshot: int
    """The number of the snapshot in it, or 0 if all of it is in the log."""
    topics: int
    files: list[CopiedFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def is_backup_path(path: str) -> bool:
    """Whether a file of a backup may have this path, which is relative to it."""
    return _PATH.fullmatch(path) is not None


def read_manifest(fs: FileSystem, directory: str) -> BackupManifest:
    """What the backup in a directory consists of.

    Raises `Rejected` when there is none or it was never finished, `Damaged` when its list cannot be right.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        manifest = msgspec.json.decode(fs.read(path), type=BackupManifest)
    except NotFound:
        raise Rejected(
            f"{directory} is no backup: it has no {MANIFEST}, which is written when a backup is complete"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if manifest.version != _VERSION:
        raise Unsupported(f"{path} has version {manifest.version}, this program reads {_VERSION}")
    for file in manifest.files:
        if not is_backup_path(file.path):
            raise Damaged(f"{path} names {file.path[:100]!r}, which is no file of a backup")
    return manifest
