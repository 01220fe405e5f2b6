"""The files of the acknowledgement log: outcomes are appended to `ack.log` and read back after a restart.

Records wait in memory until `sync` writes and syncs them together. Losing the last ones only causes
redelivery.

Only the process that created a file appends to it. A start continues in a new file, so nothing is ever
written after a torn tail. A failed write or sync also ends its file: it is unknown how much of it is on the
disk, and the kernel would report success for a second sync. Records that no successful sync covered are still
in memory and go into the next file with the same numbers.

Numbers are dense, so a reader of the log detects missing and repeated records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import NotFound, PenstockError, StorageFull
from penstock.quiver.errors import Closed
from penstock.quiver.offsets.records import (
    RECORD_BYTES,
    NamePart,
    OffsetRecord,
    Record,
    decode_records,
    encode_record,
)
from penstock.storage import FileSystem, FileView, WritableFile

HEADER_BYTES: Final = 32
RESERVE_BYTES: Final = 1024 * 1024

_HEADER: Final = struct.Struct("<8sHHQQ")
_CHECKSUM: Final = struct.Struct("<I")
_MAGIC: Final = b"QUIVER\0A"
_VERSION: Final = 1
_ACTIVE: Final = "ack.log"
_STAGED: Final = "ack.log.tmp"
_RESERVE: Final = "reserve"
_ROTATED: Final = re.compile(r"ack\.log\.([0-9]{1,19})")
_CHUNK_BYTES: Final = RECORD_BYTES * 25_600
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFileInfo:
    """One file of the log, with its place in the order, its size and the highest number it may hold."""

    name: str
    generation: int
    size: int
    last_number: int = 0


def encode_header(generation: int, first_number: int) -> bytes:
    """Return the 32 bytes at the start of a file with its generation and the number of its first record."""
    head = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, generation, first_number)
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head) & 0xFFFFFFFF)


def decode_header(data: bytes) -> tuple[int, int] | None:
    """Return the generation and first number, or None if the bytes are not a header of this version."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, size, generation, first_number = _HEADER.unpack_from(data)
    checksum = _CHECKSUM.unpack_from(data, _HEADER.size)[0]
    if (magic, version, size) != (_MAGIC, _VERSION, HEADER_BYTES):
        return None
    if checksum != xxh3_64_intdigest(data[: _HEADER.size]) & 0xFFFFFFFF:
        return None
    return generation, first_number


def list_logs(fs: FileSystem, directory: str) -> list[LogFileInfo]:
    """Return the files of the log, oldest first. The active one is the last."""
    found: list[LogFileInfo] = []
    active: int | None = None
    for name, stat in fs.list_files(directory):
        match = _ROTATED.fullmatch(name)
        if match is not None:
            found.append(LogFileInfo(name=name, generation=int(match[1]), size=stat.size))
        elif name == _ACTIVE:
            active = stat.size
    found.sort(key=lambda file: file.generation)
    if active is not None:
        header = decode_header(bytes(fs.open_view(os.path.join(directory, _ACTIVE))[:HEADER_BYTES]))
        below = found[-1].generation if found else 0
        generation = max(below + 1, header[0] if header is not None else 0)
        found.append(LogFileInfo(name=_ACTIVE, generation=generation, size=active))
    return found


def read_log(view: FileView) -> Iterator[Record | None]:
    """Yield every record in one file, or None for one with a wrong checksum.

    A damaged header does not affect the records, which have their own checksums and numbers.
    """
    for start in range(HEADER_BYTES, len(view), _CHUNK_BYTES):
        yield from decode_records(view.read(start, min(len(view), start + _CHUNK_BYTES)))


class OffsetLogWriter:
    """The log as written by one process. Any thread may call any method.

    `synced_number` is the last number that a successful sync covers. Records up to it survive a power cut.
    """

    def __init__(self, fs: FileSystem, directory: str, *, files: list[LogFileInfo], next_number: int) -> None:
        self._fs = fs
        self._directory = directory
        self._files = [file for file in files if file.name != _ACTIVE]
        self._previous = next((file for file in files if file.name == _ACTIVE), None)
        self._generation = max((file.generation for file in files), default=0)
        self._next = next_number
        self._synced = 0
        self._pending: list[bytes] = []
        self._file: WritableFile | None = None
        self._file_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._io = threading.RLock()

    @property
    def last_number(self) -> int:
        return self._next - 1

    @property
    def synced_number(self) -> int:
        return self._synced

    @property
    def has_pending(self) -> bool:
        """Whether there are records that no sync covers."""
        return bool(self._pending)

    @property
    def byte_count(self) -> int:
        """The size of all files of the log, in bytes."""
        previous = self._previous.size if self._previous is not None else 0
        return sum(file.size for file in self._files) + previous + self._file_bytes

    @property
    def current_bytes(self) -> int:
        """The size of the active file, in bytes."""
        return self._file_bytes

    def trust(self, number: int) -> None:
        """Count everything up to this number as durable, because a checkpoint contains it."""
        self._synced = max(self._synced, number)

    def append(
        self,
        kind: int,
        *,
        outcome: int = 0,
        subscriber: int = 0,
        segment_seq: int = 0,
        bundle: int = 0,
        attempt: int = 0,
        ts_ns: int = 0,
    ) -> int:
        """Add a record in memory and return its number."""
        with self._lock:
            record = OffsetRecord(
                kind=kind,
                outcome=outcome,
                subscriber=subscriber,
                segment_seq=segment_seq,
                bundle=bundle,
                attempt=attempt,
                ts_ns=ts_ns,
                number=self._next,
            )
            return self._add(encode_record(record))

    def append_name(self, subscriber: int, part: int, text: bytes) -> int:
        """Add a piece of a name in memory and return its number."""
        with self._lock:
            record = NamePart(subscriber=subscriber, part=part, text=text, number=self._next)
            return self._add(encode_record(record))

    def _add(self, encoded: bytes) -> int:
        self._pending.append(encoded)
        self._next += 1
        return self._next - 1

    def sync(self) -> None:
        """Return when every record appended so far is durable.

        Raise `Closed` after `close`, and errors of the disk. After such an error the file is abandoned, the
        records stay in memory, and the next call writes all of them into a new file.
        """
        with self._io:
            with self._lock:
                records, through = list(self._pending), self._next - 1
            if not records:
                return
            if self._is_closed:
                raise Closed("the acknowledgement log is closed")
            try:
                self._write(records)
            except StorageFull:
                # Nothing can be deleted without an ack, so a full disk would stay full.
                if not self.spend_reserve():
                    raise
                self._write(records)
            with self._lock:
                del self._pending[: len(records)]
                self._synced = max(self._synced, through)

    def _write(self, records: list[bytes]) -> None:
        file = self._file if self._file is not None else self._start(len(records))
        data = b"".join(records)
        try:
            file.write([data])
            file.datasync()
        except BaseException:
            self._give_up()
            raise
        self._file_bytes += len(data)

    def _give_up(self) -> None:
        """Abandon this file. It is renamed before the next one is started."""
        file, self._file = self._file, None
        self._previous = LogFileInfo(name=_ACTIVE, generation=self._generation, size=self._file_bytes)
        if self._file_bytes <= HEADER_BYTES:
            self._previous = None  # no sync ever covered a record in it, so the next file replaces it
        self._file_bytes = 0
        if file is not None:
            with contextlib.suppress(PenstockError):
                file.close()

    def _start(self, pending: int) -> WritableFile:
        """Create a new active file. Its name and header are durable on return."""
        self._move_aside()
        generation = self._generation + 1
        staged, path = os.path.join(self._directory, _STAGED), os.path.join(self._directory, _ACTIVE)
        with contextlib.suppress(NotFound):
            self._fs.unlink(staged)
        file = self._fs.create(staged)
        try:
            file.write([encode_header(generation, self._next - pending)])
            file.datasync()
            self._fs.rename(staged, path)
            self._fs.sync_dir(self._directory)
        except BaseException:
            with contextlib.suppress(PenstockError):
                file.close()
            raise
        self._file, self._generation, self._file_bytes = file, generation, HEADER_BYTES
        return file

    def _move_aside(self) -> None:
        """Durably rename the previously active file to its number before another file gets its name."""
        if self._previous is None:
            return
        name = f"{_ACTIVE}.{self._previous.generation}"
        with contextlib.suppress(NotFound):
            self._fs.rename(os.path.join(self._directory, _ACTIVE), os.path.join(self._directory, name))
        self._fs.sync_dir(self._directory)
        last = max(self._previous.last_number, self._synced)
        self._files.append(
            LogFileInfo(
                name=name, generation=self._previous.generation, size=self._previous.size, last_number=last
            )
        )
        self._previous = None

    def rotate(self) -> None:
        """Start a new file with the next record. Everything must be synced before."""
        with self._io:
            if self._file is None:
                return
            file, self._file = self._file, None
            self._previous = LogFileInfo(
                name=_ACTIVE,
                generation=self._generation,
                size=self._file_bytes,
                last_number=self._synced,
            )
            self._file_bytes = 0
            with contextlib.suppress(PenstockError):
                file.close()

    def drop_through(self, number: int) -> None:
        """Remove files without records after this number. A file that cannot be removed is left for later."""
        with self._io:
            obsolete = [file for file in self._files if file.last_number <= number]
            try:
                for file in obsolete:
                    with contextlib.suppress(NotFound):
                        self._fs.unlink(os.path.join(self._directory, file.name))
                    self._files.remove(file)
            except PenstockError as error:
                _LOGGER.warning("cannot remove an old file of the ack log: %s", error)

    def keep_reserve(self) -> None:
        """Reserve some disk space for the acks of a full disk, if there is any."""
        with self._io, contextlib.suppress(PenstockError):
            path = os.path.join(self._directory, _RESERVE)
            with contextlib.suppress(NotFound):
                self._fs.stat(path)
                return
            self._fs.allocate(path, RESERVE_BYTES)

    def spend_reserve(self) -> bool:
        """Release the reserved disk space. Return False if none is left."""
        with self._io:
            try:
                self._fs.unlink(os.path.join(self._directory, _RESERVE))
            except PenstockError:
                return False
            return True

    def close(self) -> None:
        """Close the file. Unsynced records are lost, and nothing is written after this."""
        with self._io:
            self._is_closed = True
            file, self._file = self._file, None
            if file is not None:
                file.close()
