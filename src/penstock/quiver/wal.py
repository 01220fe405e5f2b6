"""The write-ahead log of one core: where every accepted bundle is before anybody hears of it."""

from __future__ import annotations

import threading

from penstock.quiver.wal_cursor import write_cursor
from penstock.quiver.wal_entry import OPENING_BYTES, WalFormat
from penstock.quiver.wal_layout import HEADER_BYTES
from penstock.quiver.wal_replay import WalReplay
from penstock.storage import AppendLog, FileSystem, LogPosition

__all__ = ["Wal"]


class Wal:
    """An open log and its cursor: the lowest position that is still needed.

    The cursor never goes back. Files that end at or before it are removed, after it is durable; the active
    file always stays. `log` is for the one who commits; everything else may be called by any thread.
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
        """Continue the log behind what `replay` read, in a new file.

        Cuts a torn tail. What was damaged has been copied before, if it is to be kept.
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
        """The lowest position that is still needed, as the sidecar says it."""
        return self._cursor

    @property
    def oldest(self) -> int:
        """The position at which the oldest file starts."""
        return self._layout.start(self.log.files()[0])

    @property
    def active_start(self) -> int:
        """The position at which the active file starts. For the one who commits, or while nobody does."""
        return self._layout.start(self.log.files()[-1])

    @property
    def rotated_count(self) -> int:
        """How many files there are besides the active one."""
        return len(self.log.files()) - 1

    @property
    def data_bytes(self) -> int:
        """The bytes of the files that hold something, without what is allocated ahead."""
        end = self._layout.position(self.log.end)
        return end - self.oldest + HEADER_BYTES * (self.rotated_count + 1)

    def disk_bytes(self) -> int:
        """All that the log takes on disk, with what is allocated ahead."""
        return sum(stat.size for _, stat in self._fs.list_files(self._directory))

    def position(self, place: LogPosition) -> int:
        return self._layout.position(place)

    def advance(self, position: int) -> bool:
        """Move the cursor to `position`, durably, and remove the files that end there; False if it was there.

        After an error the cursor may or may not have moved; it is never before what was there.
        """
        with self._mutex:
            if position <= self._cursor:
                return False
            write_cursor(self._fs, self._directory, position)
            self._cursor = position
            self._drop(position)
            return True

    def tidy(self) -> None:
        """Remove what ends at or before the cursor, if something of it is left."""
        with self._mutex:
            self._drop(self._cursor)

    def _drop(self, position: int) -> None:
        needed = [number for number in self.log.files() if self._layout.start(number) <= position]
        if needed:
            self.log.drop_before(needed[-1])

    @property
    def has_entries(self) -> bool:
        """Whether the files hold anything beyond the start of an empty one."""
        return self.rotated_count > 0 or self.log.end.offset > HEADER_BYTES + OPENING_BYTES

    def clear(self) -> None:
        """Remove every entry: a new, empty file takes the place of all others.

        For a log that nobody appends to any more and of which nothing is needed.
        """
        if self.has_entries:
            self.log.rotate()
            self.advance(self.active_start)
            self.tidy()

    def close(self) -> None:
        """Release the active file, and remove what was made ahead; syncs nothing."""
        self.log.discard_prepared()
        self.log.close()
