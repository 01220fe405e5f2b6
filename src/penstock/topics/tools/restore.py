"""Restore a backup to a data directory that a server can start on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from penstock.errors import NotFound, PenstockError, Rejected
from penstock.storage import DirectoryLock, FileSystem, stage
from penstock.topics.checkpoints.layout import LOCK_FILE, META, RESTORING, TOPICS, WAL, remove_files
from penstock.topics.errors import Damaged
from penstock.topics.segments.format import checksum
from penstock.topics.tools.backup import BackupManifest, CopiedFile, read_manifest
from penstock.topics.tools.verify import verify_files


def restore(
    fs: FileSystem, backup: str, directory: str, *, on_progress: Callable[[str], None] = lambda _: None
) -> BackupManifest:
    """Fill an empty data directory from a backup. Durable and verified on return.

    Raises `LockHeld` if a server runs there, `Rejected` if the directory is not empty or the backup is not
    valid, and `Damaged` if a file of the backup has changed; then nothing is in place. A failed call removes
    what it wrote; the next call removes the rest.
    """
    manifest = read_manifest(fs, backup)
    _check_empty(fs, directory, manifest)
    with DirectoryLock(fs, directory, name=LOCK_FILE, note="pid="):
        _check_strangers(fs, directory, manifest)  # no other process writes here from now on
        _remove_remains(fs, directory, manifest)
        try:
            _restore(fs, backup, directory, manifest, on_progress)
        except BaseException:
            with contextlib.suppress(PenstockError):
                _remove_remains(fs, directory, manifest)
            raise
    return manifest


def _restore(
    fs: FileSystem,
    backup: str,
    directory: str,
    manifest: BackupManifest,
    on_progress: Callable[[str], None],
) -> None:
    staging = os.path.join(directory, RESTORING)
    fs.make_dirs(staging)
    for number, file in enumerate(manifest.files, start=1):
        on_progress(f"restoring file {number:,} of {len(manifest.files):,}")
        _restore_file(fs, backup, staging, file)
    report = verify_files(fs, staging, on_progress=on_progress)
    if report.problems:
        raise Damaged(f"the content of the backup is damaged: {report.problems[0]}")
    _put_in_place(fs, directory, manifest)


def _check_empty(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Raise `LockHeld` if the directory is in use, or `Rejected` unless it has no files of its own."""
    try:
        _check_strangers(fs, directory, manifest)
    except Rejected:
        if _exists(fs, directory, LOCK_FILE):
            with DirectoryLock(fs, directory, name=LOCK_FILE, note="pid="):
                pass  # no process holds it, so the directory is not empty
        raise


def _check_strangers(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Raise `Rejected` if there is more than a lock file and the files of an unfinished restore.

    A server that was started in between has written its own files, which must not be removed.
    """
    ours: dict[str, int] = {}
    if _exists(fs, directory, RESTORING):
        ours = {file.path: file.size for file in manifest.files}
    for name, found in fs.list_files(directory):
        staged = name.startswith(f"{RESTORING}/")
        if name != LOCK_FILE and not staged and ours.get(name) != found.size:
            raise Rejected(f"{directory} is not empty (it has {name}); restore into an empty directory")


def _exists(fs: FileSystem, directory: str, name: str) -> bool:
    try:
        fs.stat(os.path.join(directory, name))
    except NotFound:
        return False
    return True


def _remove_remains(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Remove the files of an unfinished restore, and last the staging directory, which marks it."""
    staging = os.path.join(directory, RESTORING)
    named = [file.path for file in manifest.files]
    if _exists(fs, directory, RESTORING):
        remove_files(fs, directory, named)
        remove_files(fs, staging, [*(name for name, _ in fs.list_files(staging)), *named])
        with contextlib.suppress(PenstockError):  # another program's folder is in it
            fs.remove_dir(staging)


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
    """Move the parts from the staging directory to their final place.

    Snapshots are moved first. A server that starts after a crash in between reports the missing segments and
    log. In the opposite order it would find a log without a snapshot and treat it as complete.
    """
    staging = os.path.join(directory, RESTORING)
    for folder in {os.path.dirname(file.path) for file in manifest.files}:
        fs.sync_dir(os.path.join(staging, folder))
    for part in (META, TOPICS, WAL):
        if any(file.path.startswith(f"{part}/") for file in manifest.files):
            fs.sync_dir(os.path.join(staging, part))
            fs.rename(os.path.join(staging, part), os.path.join(directory, part))
            fs.sync_dir(directory)
    fs.remove_dir(staging)
    fs.sync_dir(directory)
