"""Offsets that other processes commit through files in an inbox directory.

A data directory has one writer. A reader in another process, such as a Spark query, cannot write its
acknowledgements into the log, so it writes a note, `ack/inbox/<subscriber>.json`:

    {"format":"quiver-ack-inbox/1","subscriber":"spark","through":17}

The note says that the subscriber has resolved every segment up to and including `through`. The next note
replaces it as a whole and never has a lower number, so notes may be read repeatedly and in any order. The
writer of the directory reads the inbox during maintenance. If no process has the directory open, the note
waits for the next one. Notes are not removed when they are read, because a note that was replaced between
reading and removing would be lost. They are removed when their subscriber is unregistered; otherwise the next
start would register it again and keep all data for a reader that is gone.

For each note the writer registers the subscriber from the earliest segment on, if it is new, and acknowledges
every pending segment up to `through`. A reader writes a note with `through` 0 when it starts, so that nothing
is removed before its first offset.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import Corrupt, InvalidInput, MediaError, NotFound
from penstock.quiver.offsets.state import check_name
from penstock.storage import FileSystem, write_durably

_LOGGER = logging.getLogger(__name__)
_FORMAT: Final = "quiver-ack-inbox/1"
_BYTES_MAX: Final = 4096


class _Note(msgspec.Struct, kw_only=True):
    format: str
    subscriber: str
    through: int


_DECODER: Final = msgspec.json.Decoder(_Note)
_ENCODER: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAck:
    """The statement that `subscriber` has resolved every segment up to `through`; 0 means none."""

    subscriber: str
    through: int


def commit_offset(fs: FileSystem, core_dir: str, note: ExternalAck) -> None:
    """Commit the offset of another process for one core. It is durable on return.

    An offset below the committed one changes nothing. Raise `InvalidInput` for a name that is not valid for a
    subscriber, and errors of the file system.
    """
    check_name(note.subscriber)
    inbox, staging = _inbox(core_dir), _staging(core_dir)
    fs.make_dirs(inbox)
    fs.make_dirs(staging)
    existing = read_external_ack(fs, core_dir, note.subscriber)
    if existing is not None and existing.through >= note.through:
        return
    text = _ENCODER.encode(_Note(format=_FORMAT, subscriber=note.subscriber, through=note.through))
    write_durably(fs, os.path.join(inbox, _file_name(note.subscriber)), [text], staging=staging)


def read_external_ack(fs: FileSystem, core_dir: str, subscriber: str) -> ExternalAck | None:
    """Return the committed offset of one subscriber, or None if it cannot be read."""
    try:
        return _decode(fs.read(os.path.join(_inbox(core_dir), _file_name(subscriber))), subscriber)
    except (Corrupt, NotFound):
        return None


def remove_external_ack(fs: FileSystem, core_dir: str, subscriber: str) -> None:
    """Durably remove the committed offset of a subscriber, if there is one."""
    with contextlib.suppress(NotFound):
        fs.unlink(os.path.join(_inbox(core_dir), _file_name(subscriber)))
        fs.sync_dir(_inbox(core_dir))


class ExternalAcks:
    """The inbox of external acks, as read by the writer of the directory."""

    def __init__(self, fs: FileSystem, core_dir: str) -> None:
        self._fs = fs
        self._inbox = _inbox(core_dir)
        self._seen: dict[str, bytes] = {}

    def take(self) -> list[ExternalAck]:
        """Return every ack that changed since the last call. The first call returns all of them.

        An unreadable ack is logged once and skipped.
        """
        notes: list[ExternalAck] = []
        files = self._fs.list_files(self._inbox)
        for removed in self._seen.keys() - {name for name, _ in files}:
            del self._seen[removed]
        for name, stat in files:
            if not name.endswith(".json") or stat.size > _BYTES_MAX:
                continue
            note = self._changed(name)
            if note is not None:
                notes.append(note)
        return notes

    def _changed(self, name: str) -> ExternalAck | None:
        try:
            data = self._fs.read(os.path.join(self._inbox, name))
        except NotFound:
            return None
        except MediaError as error:
            _LOGGER.warning("skipping a note in the ack inbox: %s", error)
            return None
        if self._seen.get(name) == data:
            return None
        self._seen[name] = data
        try:
            return _decode(data, check_name(name.removesuffix(".json")))
        except (Corrupt, InvalidInput) as error:
            _LOGGER.warning("skipping a note in the ack inbox: %s", error)
            return None


def _decode(data: bytes, subscriber: str) -> ExternalAck:
    try:
        note = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the note of {subscriber!r} cannot be read: {error}") from error
    if note.format != _FORMAT or note.subscriber != subscriber or note.through < 0:
        raise Corrupt(f"the note of {subscriber!r} has a wrong format or belongs to another subscriber")
    return ExternalAck(subscriber=note.subscriber, through=note.through)


def _inbox(core_dir: str) -> str:
    return os.path.join(core_dir, "ack", "inbox")


def _staging(core_dir: str) -> str:
    """Return the directory for unfinished files. It is outside the inbox, so they are never read as acks."""
    return os.path.join(core_dir, "ack", "inbox.tmp")


def _file_name(subscriber: str) -> str:
    return f"{subscriber}.json"
