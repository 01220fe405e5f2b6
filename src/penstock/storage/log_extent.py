"""The recorded extent of a log, in a file next to it, which reveals that the log has lost its end.

The last file of a log ends where its frames end. If its last synced bytes are removed, the rest looks like an
interrupted write. A second file, `EXTENT`, therefore lists every file of the log with the limit of its bytes,
and the offset up to which the active file was durable.

The list becomes durable when a file is started, which syncs anyway. The offset is written after every sync
and is not synced itself, so after a power failure it may be old, but it is never ahead of the log.
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from dataclasses import dataclass, field
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.storage.fs import FileSystem, LogFile, publish, stage
from penstock.storage.log_layout import LogDamage, LogPosition
from penstock.storage.log_scan import LogScan

EXTENT: Final = "EXTENT"
FILE_BYTES_UNKNOWN: Final = 64 * 1024**2
"""The assumed size of a lost file whose size is unknown."""

_MAGIC: Final = b"EXT1"
_HEAD = struct.Struct("<4sI")
_FILE = struct.Struct("<QQQ")
_SLOT = struct.Struct("<QQB")
_SUM = struct.Struct("<Q")
_ALIGN: Final = 512


@dataclass(frozen=True, slots=True)
class FileExtent:
    """The extent of a file: it is durable at least up to `durable`, and has no frames after `bound`."""

    durable: int
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extents of the files of a log, by number. `readable` is False if `EXTENT` is damaged."""

    files: dict[int, FileExtent] = field(default_factory=dict)
    readable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBytes:
    """At most `count` bytes of frames that are lost, starting at `position`."""

    position: LogPosition
    count: int


def encode_table(files: dict[int, FileExtent]) -> bytes:
    """Encode the durable part, padded so that the offset after it is in another sector."""
    body = _HEAD.pack(_MAGIC, len(files))
    body += b"".join(_FILE.pack(number, one.durable, one.bound) for number, one in sorted(files.items()))
    body += _SUM.pack(xxh3_64_intdigest(body))
    return body + bytes(-len(body) % _ALIGN)


def encode_slot(number: int, durable: int, *, closed: bool) -> bytes:
    """Encode the offset up to which the active file is durable. `closed` means that the file ends there."""
    body = _SLOT.pack(number, durable, closed)
    return body + _SUM.pack(xxh3_64_intdigest(body))


def decode_extent(raw: bytes) -> Extent:
    """Decode the file. A torn slot counts as empty."""
    if len(raw) < _HEAD.size:
        return Extent(readable=False)
    magic, count = _HEAD.unpack_from(raw)
    end = _HEAD.size + count * _FILE.size
    if magic != _MAGIC or end + _SUM.size > len(raw):
        return Extent(readable=False)
    if _SUM.unpack_from(raw, end)[0] != xxh3_64_intdigest(raw[:end]):
        return Extent(readable=False)
    files = {
        number: FileExtent(durable, bound)
        for number, durable, bound in _FILE.iter_unpack(raw[_HEAD.size : end])
    }
    slot_start = end + _SUM.size
    slot_start += -slot_start % _ALIGN
    slot = raw[slot_start : slot_start + _SLOT.size + _SUM.size]
    if len(slot) == _SLOT.size + _SUM.size:
        number, durable, closed = _SLOT.unpack_from(slot)
        is_sound = _SUM.unpack_from(slot, _SLOT.size)[0] == xxh3_64_intdigest(slot[: _SLOT.size])
        if is_sound and number in files and durable <= files[number].bound:
            files[number] = FileExtent(durable, durable if closed else files[number].bound)
    return Extent(files=files)


def read_extent(fs: FileSystem, directory: str) -> Extent:
    """Read the extent of the log in a directory. It is empty for a log that was written without one."""
    try:
        return decode_extent(fs.read(os.path.join(directory, EXTENT)))
    except NotFound:
        return Extent()
    except MediaError:
        return Extent(readable=False)


def lost_bytes(
    extent: Extent, found: LogScan, start: LogPosition, synced: LogPosition
) -> tuple[list[LogDamage], list[LostBytes]]:
    """Compare a scan with the extent. Return the missing durable data as damage, and the bytes it may cost.

    `start` is the position up to which a snapshot replaces the log. `synced` is the position that the
    snapshot recorded as durable. Both are (0, 0) without a snapshot. Damage that the scan reported is
    counted, but not reported again. Data before `start` is not lost with the log.
    """
    damage: list[LogDamage] = []
    lost: list[LostBytes] = []
    ends = {file.number: file.end for file in found.files}
    missing = {one.file for one in found.damage if one.end is None}

    def add_lost(number: int, low: int, bound: int) -> None:
        low = max(low, found.first_offset, start.offset if number == start.file else 0)
        if bound > low:
            lost.append(LostBytes(position=LogPosition(number, low), count=bound - low))

    for one in found.damage:
        if one.end is not None and one.file >= start.file:
            add_lost(one.file, one.start, one.end)
    expected = {*extent.files, *missing, *([synced.file] if synced.file in ends else [])}
    # A file that was started and not used is in the extent if only the sync of its new name failed.
    for number in sorted(number for number in expected - {*found.strays} if number >= start.file):
        known = extent.files.get(number, FileExtent(0, 0))
        durable, end = known.durable, ends.get(number, 0)
        if number == synced.file:
            durable = max(durable, synced.offset)
            if _is_blank_before(found, synced):
                end = min(end, synced.offset - 1)
        if number in ends and end >= durable:
            continue
        if number in ends:
            reason = "the file ends before the end of its durable data"
            damage.append(_damage(found, number, end, durable, reason))
        elif number not in missing:
            damage.append(_damage(found, number, 0, None, "the file is missing"))
        add_lost(number, end, max(known.bound or durable + FILE_BYTES_UNKNOWN, durable))
    return damage, lost


def _damage(found: LogScan, number: int, start: int, end: int | None, reason: str) -> LogDamage:
    return LogDamage(file=number, start=start, end=end, reason=reason, name=found.name_of(number))


def _is_blank_before(found: LogScan, position: LogPosition) -> bool:
    """Return whether the frame that ended here is lost: its checksum is zero, or past the end of the file."""
    view = next((file.view for file in found.files if file.number == position.file), None)
    if view is None or position.offset <= found.first_offset:
        return False
    tail = view[position.offset - _SUM.size : position.offset]
    return len(tail) < _SUM.size or not any(tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A staged file, and what it says."""

    path: str
    files: dict[int, FileExtent]
    number: int
    slot_at: int


class ExtentFile:
    """The extent of a log that is open for appending.

    A lost update makes it less precise but never wrong, so only `prepare` and `start_file` raise.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._files = read_extent(fs, directory).files
        self._needed_from = 0
        self._slot_at = 0
        self._number = 0
        self._file: LogFile | None = None
        self._prepared: _Prepared | None = None

    @property
    def last_file(self) -> int:
        """The highest known number of a file."""
        return max(self._files, default=0)

    def settle(self, found: LogScan) -> None:
        """Record the files of a scan. A file that lost its end keeps its recorded extent."""
        for number in found.strays:
            self._files.pop(number, None)
        for file in found.files:
            known = self._files.get(file.number, FileExtent(0, 0))
            ends = [one.end for one in found.damage if one.file == file.number and one.end is not None]
            durable = max([known.durable, *ends])
            if file.end >= durable:
                self._files[file.number] = FileExtent(file.end, file.end)
            else:
                bound = max(known.bound or durable + FILE_BYTES_UNKNOWN, durable)
                self._files[file.number] = FileExtent(durable, bound)

    def prepare(self, number: int, durable: int, bound: int, replaced: LogPosition) -> None:
        """Write what `start_file` will put in place, so that it then needs no more space.

        The new active file replaces a file that ends at `replaced.offset`.
        """
        files = {one: known for one, known in self._files.items() if one >= self._needed_from}
        if replaced.file and replaced.file == self._number:
            files[replaced.file] = FileExtent(replaced.offset, replaced.offset)
        files[number] = FileExtent(durable, bound)
        table = encode_table(files)
        slot = encode_slot(number, durable, closed=False)
        path = os.path.join(self._directory, f"{EXTENT}.{uuid.uuid4().hex}")
        stage(self._fs, path, [table, slot])
        self._prepared = _Prepared(path=path, files=files, number=number, slot_at=len(table))

    def start_file(self) -> None:
        """Record the new active file that was prepared, durably."""
        prepared = self._prepared
        assert prepared is not None, "prepare comes before start_file"
        path = os.path.join(self._directory, EXTENT)
        publish(self._fs, prepared.path, path)
        self._prepared = None
        self._release()
        self._files, self._number, self._slot_at = prepared.files, prepared.number, prepared.slot_at
        with contextlib.suppress(PenstockError):
            self._file = self._fs.open_log(path)

    def withdraw(self) -> None:
        """Remove what was prepared, if it is still there."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            with contextlib.suppress(PenstockError):
                self._fs.unlink(prepared.path)

    def reach(self, durable: int) -> None:
        """Record that the active file is durable up to this offset."""
        self._write(durable, closed=False)

    def forget_before(self, number: int) -> None:
        """Omit the files before this one from the next list. Any thread may call this."""
        self._needed_from = number

    def sync(self) -> None:
        """Make the recorded offset durable. Called when the log is idle."""
        if self._file is not None:
            with contextlib.suppress(PenstockError):
                self._file.datasync()

    def close(self, durable: int | None) -> None:
        """Close the file. `durable` is the end of the log, or None if that is unknown."""
        if durable is not None:
            self._write(durable, closed=True)
            self.sync()
        self._release()

    def _write(self, durable: int, *, closed: bool) -> None:
        if self._file is None:
            return
        try:
            self._file.write_at(self._slot_at, [encode_slot(self._number, durable, closed=closed)])
        except PenstockError:
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(PenstockError):
                file.close()
