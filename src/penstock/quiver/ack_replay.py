"""From the files of a core back to what its subscribers said: a checkpoint, then the log behind it.

A start writes nothing here, so doing it twice, or being cut off in it, changes nothing. Damaged files are
copied to `quarantine/` before anything else may overwrite or remove them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from penstock.errors import Conflict, PenstockError
from penstock.quiver.ack_log import LogFileInfo, list_logs, read_log
from penstock.quiver.ack_state import AckState
from penstock.quiver.checkpoint_file import CHECKPOINT, load_checkpoint
from penstock.quiver.logged_file import read_logged
from penstock.storage import FileSystem, stage

__all__ = ["Replayed", "replay"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What was read back, and from where."""

    state: AckState
    files: list[LogFileInfo]
    last_number: int
    checkpoint_number: int
    generation: int
    records: int
    """How many records were read that the checkpoint does not have."""
    is_newest: bool
    """Whether the checkpoint that was read is the newest one."""
    damage: tuple[str, ...]


@dataclass(slots=True)
class _Pass:
    """One way through the log."""

    state: AckState
    last_number: int
    records: int = 0
    lost: int = 0


def replay(fs: FileSystem, core_dir: str, *, keep_evidence: bool = True) -> Replayed:
    """Read checkpoint and log. Raises only when the disk cannot be read at all.

    Without `keep_evidence` nothing is written, for who only wants to look.
    """
    ack_dir, meta_dir = os.path.join(core_dir, "ack"), os.path.join(core_dir, "meta")
    loaded = load_checkpoint(fs, meta_dir)
    damage = list(loaded.damage)
    if loaded.damage and keep_evidence:
        _keep_evidence(fs, core_dir, meta_dir, [CHECKPOINT, f"{CHECKPOINT}.1"])
    start = loaded.state.last_number if loaded.state is not None else 0
    going = _Pass(AckState.restore(loaded.state) if loaded.state is not None else AckState(), start)
    files: list[LogFileInfo] = []
    for file in list_logs(fs, ack_dir):
        problems = _replay_file(fs, os.path.join(ack_dir, file.name), going)
        if problems:
            damage += problems
            if keep_evidence:
                _keep_evidence(fs, core_dir, ack_dir, [file.name])
        files.append(replace(file, last_number=going.last_number))
    going.state.note_logged(*read_logged(fs, meta_dir))
    if going.state.unknown_subscribers:
        damage.append(
            f"{going.state.unknown_subscribers} outcomes are of subscribers whose definition was lost"
        )
    for text in damage if keep_evidence else ():
        _LOGGER.error("acknowledgements: %s", text)
    return Replayed(
        state=going.state,
        files=files,
        last_number=going.last_number,
        checkpoint_number=start,
        generation=loaded.state.generation if loaded.state is not None else 0,
        records=going.records,
        is_newest=loaded.is_newest,
        damage=tuple(damage),
    )


def _replay_file(fs: FileSystem, path: str, going: _Pass) -> list[str]:
    """Apply what is new in one file; what is wrong with it, in words."""
    problems: list[str] = []
    unreadable = 0
    view = fs.open_view(path)
    for record in read_log(view):
        if record is None:
            unreadable += 1
            continue
        if unreadable:
            problems.append(f"{path}: {unreadable} records before number {record.number} cannot be read")
            unreadable = 0
        if record.number <= going.last_number:
            continue
        lost = record.number - going.last_number - 1
        if lost and going.last_number:
            problems.append(f"{path}: {lost} records before number {record.number} are missing")
            going.lost += lost
        going.state.apply(record)
        going.last_number = record.number
        going.records += 1
    # Other bytes at the end of a file are a write that a crash cut off: it was never durable.
    problems += [f"{path}: the device cannot read bytes {start} to {end}" for start, end in view.bad]
    return problems


def _keep_evidence(fs: FileSystem, core_dir: str, directory: str, names: list[str]) -> None:
    """Copy damaged files aside. A copy that cannot be made stops nothing."""
    for name in names:
        try:
            quarantine = os.path.join(core_dir, "quarantine")
            fs.make_dirs(quarantine)
            data = fs.open_view(os.path.join(directory, name))[:]
            stage(fs, os.path.join(quarantine, f"{name}-{len(data)}"), [data])
            fs.sync_dir(quarantine)
        except Conflict:
            continue  # copied before
        except PenstockError as error:
            _LOGGER.warning("a damaged file could not be copied aside: %s", error)
