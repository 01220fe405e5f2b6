"""The files of the write-ahead log: headers, positions, and the cursor below which nothing is needed.

`quiver.wal` is the active file; `quiver.wal.<N>` are the files before it. Each file starts with a header of
38 bytes and the opening, an entry that repeats the header under a checksum. A log position counts the bytes
of all entries since the log was created, without headers, so rotating and removing files does not change it.
The start position of a file is also the end of the file before it: bytes in that file after this position
were never confirmed.

The cursor is a sidecar of 24 bytes that is replaced atomically:

    magic `QUIVER\\0T` | version u16 | size u16 | wal_position u64 | xxh3 u32 of the bytes before
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import MediaError, NotFound, PenstockError, Unsupported
from penstock.quiver.model import SLOTS
from penstock.quiver.wal.entry import OPENING_BYTES, Opening, WalFormat
from penstock.storage import (
    FileSystem,
    LogDamage,
    LogHeader,
    LogPosition,
    write_durably,
)

ACTIVE: Final = "quiver.wal"
CURSOR: Final = "quiver.wal.cursor"
_MAGIC: Final = b"QUIVER\0WAL"
_VERSION: Final = 1
_HEADER = struct.Struct("<10sHH16sQ")
HEADER_BYTES: Final = _HEADER.size
_LOOK_BYTES: Final = 256
_ROTATED = re.compile(r"quiver\.wal\.([1-9][0-9]{0,17})")
_NO_SALT: Final = 1 << 64
"""A salt that matches no mark, because a mark has 64 bits."""
_CURSOR_MAGIC = b"QUIVER\0T"
_CURSOR_VERSION = 1
_CURSOR = struct.Struct("<8sHHQ")
_CURSOR_SUM = struct.Struct("<I")
_CURSOR_BYTES = _CURSOR.size + _CURSOR_SUM.size


def layout_hash() -> bytes:
    """Return a hash of 16 bytes that changes only if the meaning of a slot or the checksum changes."""
    text = "".join(f"{slot}={name}\n" for slot, name in sorted(SLOTS.items()))
    return hashlib.blake2b(f"{text}xxh3-64 seed 0\n".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The decoded start of a file. `salt` is None when the opening is damaged or missing."""

    position: int
    header_bytes: int
    first_offset: int
    number: int | None
    salt: int | None


class QuiverLayout:
    """The `LogLayout` of one Quiver log. It also converts offsets in the files to log positions.

    `base` is the first position of a log without files. It is above every position that was ever used.
    """

    def __init__(self, *, base: int = 0) -> None:
        self.base = base
        self.floor = 0
        """The lowest position for a new file. Positions below it were used, even if no file has them any
        more.
        """
        self._active: int | None = None
        self._move_unsynced = False
        self._protects = True
        self._starts: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._header_bytes: dict[int, int] = {}
        self._guessed: set[int] = set()

    def position(self, place: LogPosition) -> int:
        """Return the log position of a place in a file that was found or started."""
        return self._starts[place.file] + place.offset - self._header(place.file)

    def start(self, number: int) -> int:
        """Return the log position at which a found or started file begins."""
        return self._starts[number]

    def is_guessed(self, number: int) -> bool:
        """Return whether the start position of a file is uncertain because its first bytes are damaged."""
        return number in self._guessed

    def read_starts(self, fs: FileSystem, directory: str) -> dict[int, int]:
        """Return the start positions of the readable files."""
        starts: dict[int, int] = {}
        for number in self.find(fs, directory):
            path = os.path.join(directory, self.name(number))
            start = _read_start(fs.open_view(path)[:_LOOK_BYTES], path)
            if start is not None:
                starts[number] = start.position
        return starts

    def first_offset(self, number: int) -> int:
        return self._first.get(number, HEADER_BYTES)

    def find(self, fs: FileSystem, directory: str) -> list[int]:
        names = [name for name, _ in fs.list_files(directory)]
        numbers = sorted(int(match[1]) for match in map(_ROTATED.fullmatch, names) if match)
        self._active = None
        if ACTIVE in names:
            path = os.path.join(directory, ACTIVE)
            start = _read_start(fs.open_view(path)[:_LOOK_BYTES], path)
            number = None if start is None else start.number
            # A power cut during a rotation may leave a file under both its old and its new name.
            if number is None or number not in numbers:
                last = numbers[-1] if numbers else 0
                self._active = number if number is not None and number > last else last + 1
                numbers.append(self._active)
        return numbers

    def name(self, number: int) -> str:
        return ACTIVE if number == self._active else f"{ACTIVE}.{number}"

    def headers(self, views: Mapping[int, memoryview]) -> dict[int, LogHeader | None]:
        """Return the headers. Raise `Unsupported` for a file of another version or with other slots."""
        starts = {number: _read_start(view, self.name(number)) for number, view in views.items()}
        self._first = {number: start.first_offset for number, start in starts.items() if start}
        self._header_bytes = {number: start.header_bytes for number, start in starts.items() if start}
        self._starts = {number: start.position for number, start in starts.items() if start}
        self._guessed = set(views) - set(self._starts)
        for number in sorted(self._guessed, reverse=True):
            self._starts[number] = self._guess(number, views)
        return {
            number: None if start is None else self._previous(number, start)
            for number, start in starts.items()
        }

    def _guess(self, number: int, views: Mapping[int, memoryview]) -> int:
        """Guess the start position of a file with an unreadable start.

        Every file but the last is truncated to its content, so the size of a file gives the length of its
        data.
        """
        if number + 1 in self._starts:
            return max(0, self._starts[number + 1] - len(views[number]) + HEADER_BYTES)
        if number - 1 in self._starts:
            return self._starts[number - 1] + len(views[number - 1]) - self._header(number - 1)
        return self.base

    def _header(self, number: int) -> int:
        return self._header_bytes.get(number, HEADER_BYTES)

    def _previous(self, number: int, start: _Start) -> LogHeader:
        before = number - 1
        salt = _NO_SALT if start.salt is None else start.salt
        if before in self._starts:
            offset = start.position - self._starts[before] + self._header(before)
            return LogHeader(previous=LogPosition(before, max(0, offset)), salt=salt)
        return LogHeader(previous=LogPosition(before if start.position else 0, 0), salt=salt)

    def complaints(self, fs: FileSystem, directory: str, numbers: list[int]) -> Iterator[LogDamage]:
        """Return nothing: the file names contain all there is to check."""
        return iter(())

    def number_after(self, last: int, next_frame: int) -> int:
        return last + 1

    def head(self, number: int, header: LogHeader, carried: bytes) -> bytes:
        before = header.previous
        position = max(self.floor, self.position(before) if before.file else self.base)
        self._starts[number] = position
        fixed = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, layout_hash(), position)
        return fixed + Opening(position=position, number=number, salt=header.salt).encode() + carried

    def prepare(self, fs: FileSystem, directory: str, number: int) -> None:
        """Do nothing: the names say everything."""

    def install(self, fs: FileSystem, directory: str, staged: str, number: int) -> None:
        active = os.path.join(directory, ACTIVE)
        if self._active is not None:
            fs.rename(active, os.path.join(directory, f"{ACTIVE}.{self._active}"))
            self._active = None
            self._move_unsynced = True
        if self._move_unsynced:
            # The new file may take the old name only after the rename of the old file is durable.
            fs.sync_dir(directory)
            self._move_unsynced = False
        fs.rename(staged, active)
        fs.sync_dir(directory)
        self._active = number

    def withdraw(self, fs: FileSystem, directory: str, number: int) -> bool:
        """Undo nothing; a failed `install` left no trace as long as the file before still has its name."""
        return self._active is not None and self._active != number

    def left_behind(self, number: int) -> list[int]:
        """Return nothing: the next file takes the name of the one that failed."""
        return []

    def retire(self, fs: FileSystem, directory: str, number: int, end: int) -> None:
        path = os.path.join(directory, self.name(number))
        if fs.stat(path).size > end:
            fs.truncate(path, end)
        if self._protects:
            self._protects = fs.protect(path)

    def evidence(self, number: int) -> str | None:
        """Return nothing: recovery has already copied the damaged data."""
        return None

    def is_leftover(self, name: str) -> bool:
        return name.startswith(f"{CURSOR}.")


def _read_start(view: memoryview, path: str) -> _Start | None:
    """Read the start of a file. The opening takes precedence over the header, because it has a checksum."""
    fixed = _read_header(view, path)
    size = HEADER_BYTES if fixed is None else fixed[0]
    opening = Opening.decode(view, size)
    if opening is not None:
        return _Start(
            position=opening.position,
            header_bytes=size,
            first_offset=size + OPENING_BYTES,
            number=opening.number,
            salt=opening.salt,
        )
    if fixed is None:
        return None
    first = _first_entry(view, size)
    return _Start(position=fixed[1], header_bytes=size, first_offset=first, number=None, salt=None)


def _first_entry(view: memoryview, header_bytes: int) -> int:
    """Find the first entry of a file without a readable opening: after a damaged opening, or at the start."""
    after_opening = header_bytes + OPENING_BYTES
    ends = (WalFormat().frame_end(view, offset, len(view)) for offset in (header_bytes, after_opening))
    at_start, after_damage = ends
    return after_opening if at_start is None and after_damage is not None else header_bytes


def _read_header(view: memoryview, path: str) -> tuple[int, int] | None:
    """Return the header size and start position, or None if the header is damaged. Raise `Unsupported`."""
    if len(view) < HEADER_BYTES:
        return None
    magic, version, size, meaning, position = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        return None
    if version != _VERSION:
        raise Unsupported(
            f"{path} is a log of version {version}, this is {_VERSION}; use the release that wrote it"
        )
    if meaning != layout_hash():
        raise _other_meaning(path)
    return (size, position) if size >= HEADER_BYTES else None


def _other_meaning(path: str) -> PenstockError:
    return Unsupported(
        f"{path} was written with another table of slots or another checksum; "
        "use the release that wrote it to deliver what it holds"
    )


def encode_cursor(position: int) -> bytes:
    fixed = _CURSOR.pack(_CURSOR_MAGIC, _CURSOR_VERSION, _CURSOR_BYTES, position)
    return fixed + _CURSOR_SUM.pack(xxh3_64_intdigest(fixed) & 0xFFFFFFFF)


def decode_cursor(data: bytes) -> int | None:
    """Return the position, or None if the bytes are not a valid cursor."""
    if len(data) != _CURSOR_BYTES:
        return None
    magic, version, size, position = _CURSOR.unpack_from(data)
    known = magic == _CURSOR_MAGIC and version == _CURSOR_VERSION and size == _CURSOR_BYTES
    return int(position) if known and encode_cursor(position) == data else None


def read_cursor(fs: FileSystem, directory: str) -> int | None:
    """Return the position in the sidecar, or None if it is unusable. Without it the whole log is read."""
    try:
        return decode_cursor(fs.read(os.path.join(directory, CURSOR)))
    except (MediaError, NotFound):
        return None


def write_cursor(fs: FileSystem, directory: str, position: int) -> None:
    """Replace the sidecar durably."""
    write_durably(fs, os.path.join(directory, CURSOR), [encode_cursor(position)], staging=directory)
