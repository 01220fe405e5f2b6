"""The writer's side of one core's write-ahead log, and the record of how far the log is durable.

`meta/logged` records how far the log is durable, in 32 bytes that every commit overwrites:

    magic `QUIVER\\0L` | version u16 | size u16 | wal_position u64 | wal_seq u64 | xxh3 u32 of all before

The last file of a log ends with its last entry. If synced bytes are removed from its end, the remaining bytes
do not show the loss, but this file does. It is written after the sync and before any writer is notified, so
it is never ahead of the log. It is not synced itself: the offset log stores the same values durably a little
later.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.quiver.wal.entry import OPENING_BYTES, WalFormat
from penstock.quiver.wal.layout import CURSOR, HEADER_BYTES, decode_cursor, write_cursor
from penstock.quiver.wal.replay import WalReplay
from penstock.storage import AppendLog, FileSystem, LogFile, LogPosition, write_durably

LOGGED: Final = "logged"
_LOGGED_MAGIC = b"QUIVER\0L"
_LOGGED_VERSION = 1
_LOGGED_FIXED = struct.Struct("<8sHHQQ")
_LOGGED_SUM = struct.Struct("<I")
_LOGGED_BYTES = _LOGGED_FIXED.size + _LOGGED_SUM.size


class Wal:
    """An open log and its cursor, the lowest position that is still needed.

    The cursor never moves backwards. Files that end at or before it are removed once the cursor is durable.
    The active file always stays. Only the committer uses `log`; every other method may be called from any
    thread.
    """

    def __init__(self, fs: FileSystem, directory: str, replay: WalReplay, log: AppendLog) -> None:
        self._fs = fs
        self._directory = directory
        self._layout = replay.layout
        self._cursor = replay.cursor
        self._mutex = threading.Lock()
        self.log = log

    @classmethod
    def open(cls, fs: FileSystem, directory: str, replay: WalReplay, *, rotation_bytes: int) -> Wal:
        """Continue the log in a new file, after the entries that `replay` read.

        Truncate a torn tail. Copy damaged data with `quarantine_damage` first if it must be kept.
        """
        fs.make_dirs(directory)
        if replay.sidecar is not None and replay.sidecar < replay.cursor:
            write_cursor(fs, directory, replay.cursor)
        log = AppendLog.open(
            fs,
            directory,
            WalFormat(),
            found=replay.found,
            file_bytes=rotation_bytes,
            layout=replay.layout,
            reserve_only=True,
        )
        wal = cls(fs, directory, replay, log)
        if replay.is_short and wal.cursor >= wal.active_start:
            wal.tidy()
        return wal

    @property
    def cursor(self) -> int:
        """The lowest position that is still needed, as stored in the sidecar."""
        return self._cursor

    @property
    def oldest(self) -> int:
        """The position at which the oldest file starts."""
        return self._layout.start(self.log.files()[0])

    @property
    def active_start(self) -> int:
        """The position at which the active file starts. Use it only on the committer, or while none runs."""
        return self._layout.start(self.log.files()[-1])

    @property
    def rotated_count(self) -> int:
        """The number of files besides the active one."""
        return len(self.log.files()) - 1

    @property
    def data_bytes(self) -> int:
        """The size of the data in the files, without preallocated space."""
        end = self._layout.position(self.log.end)
        return end - self.oldest + HEADER_BYTES * (self.rotated_count + 1)

    def disk_bytes(self) -> int:
        """Return the size of the log on disk, including preallocated space."""
        return sum(stat.size for _, stat in self._fs.list_files(self._directory))

    def position(self, place: LogPosition) -> int:
        return self._layout.position(place)

    def advance(self, position: int) -> bool:
        """Move the cursor to `position` durably and remove the files that end there.

        Return False if the cursor was already there. After an error the cursor is at its old or its new
        position.
        """
        with self._mutex:
            if position <= self._cursor:
                return False
            write_cursor(self._fs, self._directory, position)
            self._cursor = position
            self._drop(position)
            return True

    def tidy(self) -> None:
        """Remove files that end at or before the cursor, if any are left."""
        with self._mutex:
            self._drop(self._cursor)

    def _drop(self, position: int) -> None:
        needed = [number for number in self.log.files() if self._layout.start(number) <= position]
        if needed:
            self.log.drop_before(needed[-1])

    @property
    def has_entries(self) -> bool:
        """Whether the files contain any entry."""
        return self.rotated_count > 0 or self.log.end.offset > HEADER_BYTES + OPENING_BYTES

    def clear(self) -> None:
        """Remove every entry by replacing all files with a new, empty one.

        Use it only for a log that has no writers and whose entries are no longer needed.
        """
        if self.has_entries:
            self.log.rotate()
            self.advance(self.active_start)
            self.tidy()

    def close(self) -> None:
        """Release the active file and remove prepared files. Sync nothing."""
        self.log.discard_prepared()
        self.log.close()


def encode_logged(position: int, seq: int) -> bytes:
    fixed = _LOGGED_FIXED.pack(_LOGGED_MAGIC, _LOGGED_VERSION, _LOGGED_BYTES, position, seq)
    return fixed + _LOGGED_SUM.pack(xxh3_64_intdigest(fixed) & 0xFFFFFFFF)


def decode_logged(data: bytes) -> tuple[int, int]:
    """Return the position and the last bundle number before it, or (0, 0) if the bytes are damaged."""
    if len(data) != _LOGGED_BYTES:
        return 0, 0
    _, _, _, position, seq = _LOGGED_FIXED.unpack_from(data)
    return (position, seq) if encode_logged(position, seq) == data else (0, 0)


def read_logged(fs: FileSystem, directory: str) -> tuple[int, int]:
    """Return the durable position and the last bundle number before it, or (0, 0) if the file is unusable."""
    try:
        return decode_logged(fs.read(os.path.join(directory, LOGGED)))
    except (MediaError, NotFound):
        return 0, 0


def unreadable_notes(fs: FileSystem, core_dir: str) -> Iterator[tuple[str, str]]:
    """Yield each unreadable file that notes how far the log reaches, with the reason.

    A start loses nothing without these notes, but may not notice that the log did. The next write replaces
    them.
    """
    for subject in (f"wal/{CURSOR}", f"meta/{LOGGED}"):
        try:
            data = fs.read(os.path.join(core_dir, subject))
        except NotFound:
            continue
        except MediaError as error:
            yield subject, str(error)
            continue
        # The other one is written in place, so a power cut may leave it torn.
        if subject.endswith(CURSOR) and decode_cursor(data) is None:
            yield subject, "is damaged"


class LoggedFile:
    """The open file `logged` of a core. A lost update only makes it report less, so no method raises."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._file: LogFile | None = None
        path = os.path.join(directory, LOGGED)
        with contextlib.suppress(PenstockError):
            fs.make_dirs(directory)
            known = read_logged(fs, directory)
            if not any(known):
                write_durably(fs, path, [encode_logged(0, 0)], staging=directory)
            self._file = fs.open_log(path)

    def reach(self, position: int, seq: int) -> None:
        """Record that the log is durable up to `position`, with `seq` as the last bundle before it."""
        if self._file is None:
            return
        try:
            self._file.write_at(0, [encode_logged(position, seq)])
        except PenstockError:
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(PenstockError):
                file.close()
