"""From a backup to a data directory that a server can start on."""

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
    """Fill an empty data directory from a backup; durable and checked on return.

    Raises `LockHeld` when a server runs there, `Rejected` when the directory is not empty or the backup is
    none, and `Damaged` when a file of the backup is not what was stored; then nothing is in place. A failed
    call removes what it wrote; what it could not remove, the next one does.
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
        raise Damaged(f"what the backup holds is damaged: {report.problems[0]}")
    _put_in_place(fs, directory, manifest)


def _check_empty(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Raises `LockHeld` if the directory is in use, else `Rejected` unless it is as good as empty."""
    try:
        _check_strangers(fs, directory, manifest)
    except Rejected:
        if _exists(fs, directory, LOCK_FILE):
            with DirectoryLock(fs, directory, name=LOCK_FILE, note="pid="):
                pass  # no process holds it: the fault is that the directory is not empty
        raise


def _check_strangers(fs: FileSystem, directory: str, manifest: BackupManifest) -> None:
    """Raises `Rejected` if there is more than a lock file and what an attempt with this backup left.

    A server that was started in between has written files of its own: those are not ours to remove.
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
    """Remove what an unfinished restore left; the staging directory last, because it marks one."""
    staging = os.path.join(directory, RESTORING)
    named = [file.path for file in manifest.files]
    if _exists(fs, directory, RESTORING):
        remove_files(fs, directory, named)
        remove_files(fs, staging, [*(name for name, _ in fs.list_files(staging)), *named])
        with contextlib.suppress(PenstockError):  # a folder in it is not ours
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
    """Move the parts from the staging directory to where they belong.

    Snapshots first: a server that is started after a crash in between misses what they name and says so.
    The other way round it would find a log without a snapshot and believe that this is all.
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
