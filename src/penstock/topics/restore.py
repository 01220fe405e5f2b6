"""From a backup to a data directory that a server can start on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from penstock.errors import NotFound, Rejected
from penstock.files import DirectoryLock, FileSystem
from penstock.fs import stage
from penstock.topics.backup_manifest import BackupManifest, CopiedFile, read_manifest
from penstock.topics.data_directory import LOCK_FILE, META, TOPICS, WAL
from penstock.topics.errors import Damaged
from penstock.topics.segment import checksum
from penstock.topics.verify import verify

__all__ = ["restore"]

_STAGING: Final = "restoring"


def restore(
    fs: FileSystem, backup: str, directory: str, *, on_progress: Callable[[str], None] = lambda _: None
) -> BackupManifest:
    """Fill an empty data directory from a backup; durable and checked on return.

    Raises `LockHeld` when a server runs there, `Rejected` when the directory is not empty or the backup is
    none, and `Damaged` when a file of the backup is not what was stored; then nothing is in place yet.
    """
    manifest = read_manifest(fs, backup)
    _check_empty(fs, directory)
    with DirectoryLock(fs, directory, name=LOCK_FILE, note="pid="):
        for number, file in enumerate(manifest.files, start=1):
            on_progress(f"restoring file {number:,} of {len(manifest.files):,}")
            _restore_file(fs, backup, os.path.join(directory, _STAGING), file)
        _put_in_place(fs, directory, manifest)
        report = verify(fs, directory, on_progress=on_progress)
    if report.problems:
        raise Damaged(f"what was restored is damaged: {report.problems[0]}")
    return manifest


def _check_empty(fs: FileSystem, directory: str) -> None:
    """A lock file alone is fine: whether somebody holds it is found out by taking it."""
    names = [name for name, _ in fs.list_files(directory)]
    others = [name for name in names if name != LOCK_FILE]
    if not others:
        return
    if LOCK_FILE in names:
        with DirectoryLock(fs, directory, name=LOCK_FILE, note="pid="):
            pass  # nobody holds it: what is wrong is that there is something here
    raise Rejected(f"{directory} is not empty (it has {others[0]}); restore into an empty directory")


def _restore_file(fs: FileSystem, backup: str, staging: str, file: CopiedFile) -> None:
    source = os.path.join(backup, file.path)
    try:
        content = fs.read(source)
    except NotFound as error:
        raise Damaged(f"{source} is missing from the backup") from error
    if len(content) != file.size or f"{checksum(content):016x}" != file.xxh3:
        raise Damaged(f"{source}, bytes 0 to {file.size}: not what was backed up")
    target = os.path.join(staging, file.path)
    fs.make_dirs(os.path.dirname(target))
    stage(fs, target, [content])


def _put_in_place(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Move the parts from the staging directory to where they belong.

    Snapshots first: a server that is started after a crash in between misses what they name and says so.
    The other way round it would find a log without a snapshot and believe that this is all.
    """
    staging = os.path.join(directory, _STAGING)
    for folder in {os.path.dirname(file.path) for file in manifest.files}:
        fs.sync_dir(os.path.join(staging, folder))
    for part in (META, TOPICS, WAL):
        if any(file.path.startswith(f"{part}/") for file in manifest.files):
            fs.sync_dir(os.path.join(staging, part))
            fs.rename(os.path.join(staging, part), os.path.join(directory, part))
            fs.sync_dir(directory)
    if manifest.files:
        fs.remove_dir(staging)
        fs.sync_dir(directory)
