"""Reading the write-ahead log from the cursor on, including logs that are damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import Corrupt, MediaError
from penstock.quiver.wal.entry import EntryType, WalEntry, WalFormat, entry_body, entry_type
from penstock.quiver.wal.layout import ACTIVE, QuiverLayout, read_cursor
from penstock.storage import FileSystem, LogDamage, LogPosition, LogScan, ScannedFile, scan, write_durably

_BEGINNING = LogPosition(0, 0)
_END = LogPosition(1 << 62, 0)
_UNKNOWN_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundEntry:
    """A bundle read from the log, with the positions of its first byte and after its last byte."""

    entry: WalEntry
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A range of missing bundle numbers, both ends included, and the damaged bytes of the log there."""

    first: int
    last: int
    byte_count: int


@dataclass(slots=True, kw_only=True, eq=False)
class WalReplay:
    """A write-ahead log as it was read. `cursor` is the later of the sidecar's position and the log's start.

    `damage` lists durable data that cannot be read. `entries` adds entries that it cannot decode.
    `highest_seq` covers every bundle in the files, including those before the cursor.
    """

    found: LogScan
    layout: QuiverLayout
    cursor: int
    sidecar: int | None
    damage: list[LogDamage] = field(default_factory=list)
    unknown_entries: int = 0
    highest_seq: int = 0
    is_short: bool = False
    """Whether the log ends before a position that was already durable."""
    _jumps: list[tuple[int, int, LogPosition, LogPosition]] = field(default_factory=list)
    """Jumps in the numbering: the numbers of the two bundles, and the positions between them."""
    _last_end: LogPosition = _BEGINNING

    @property
    def end(self) -> int:
        """The position after the last entry, or the cursor if there are no files."""
        return self.layout.position(self.found.end) if self.found.files else self.cursor

    def expect(self, position: int) -> None:
        """Record as damage everything up to `position`, which was durable, that the files do not contain.

        Later entries get positions above it, whatever the files contain.
        """
        end = self.end if self.found.files else 0
        if position > max(end, self.layout.floor):
            number = self.found.end.file or 1
            name = self.found.name_of(number) if self.found.files else ACTIVE
            found = f"the log ends at position {end}" if self.found.files else "the file is missing"
            reason = f"{found}, but the log was written up to position {position}"
            start = self.found.end.offset
            self.damage.append(LogDamage(file=number, start=start, end=start, reason=reason, name=name))
            self.is_short = True
        self.layout.floor = max(self.layout.floor, position)
        if not self.found.files:
            self.layout.base = max(self.layout.base, position)

    def raise_base(self, position: int) -> None:
        """Start a log without files at `position` or above."""
        if not self.found.files:
            self.layout.base = self.cursor = max(self.layout.base, position)

    def entries(self) -> Iterator[FoundEntry]:
        """Yield every bundle that ends after the cursor once, in order. May be called again."""
        self.unknown_entries = self.highest_seq = 0
        self._jumps, self._last_end = [], _BEGINNING
        for file, start, end in self.found.frames():
            try:
                frame = file.bytes_of(start, end)
            except MediaError as error:
                self._add_damage(file, start, end, str(error))
                continue
            kind = entry_type(frame, 0)
            if kind == EntryType.BUNDLE:
                found = self._bundle(file, frame, start, end)
                if found is not None:
                    yield found
            elif kind not in (EntryType.MARK, EntryType.OPENING):
                self.unknown_entries += 1

    def gaps(self, last_seq: int) -> list[Gap]:
        """Return the ranges of numbers after the cursor, up to `last_seq`, that damage may have removed.

        Call it after `entries`. The number of a bundle whose write failed looks the same.
        """
        jumps = list(self._jumps)
        if last_seq > self.highest_seq and not self.is_short:
            jumps.append((self.highest_seq, last_seq + 1, self._last_end, _END))
        gaps = []
        # The start of the log is a guess if its first file is damaged, so the sidecar takes precedence.
        cursor = self.cursor if self.sidecar is None else min(self.cursor, self.sidecar)
        for before, after, low, high in jumps:
            inside = [one for one in self.damage if low <= (one.file, one.start) < high]
            if inside and (high == _END or self.layout.position(high) > cursor):
                size = sum(map(_size, inside))
                if high != _END:
                    size = min(size, self.layout.position(high) - cursor)
                gaps.append(Gap(first=before + 1, last=after - 1, byte_count=size))
        return gaps

    def _add_damage(self, file: ScannedFile, start: int, end: int, reason: str) -> None:
        name = self.found.name_of(file.number)
        damage = LogDamage(file=file.number, start=start, end=end, reason=reason, name=name)
        if damage not in self.damage:
            self.damage.append(damage)

    def _bundle(self, file: ScannedFile, frame: memoryview, start: int, end: int) -> FoundEntry | None:
        try:
            entry = WalEntry.decode(entry_body(frame, 0, len(frame)))
        except Corrupt as error:
            self._add_damage(file, start, end, str(error))
            return None
        if entry.wal_seq <= self.highest_seq:
            return None
        begin, after = LogPosition(file.number, start), LogPosition(file.number, end)
        if entry.wal_seq != self.highest_seq + 1:
            self._jumps.append((self.highest_seq, entry.wal_seq, self._last_end, begin))
        self.highest_seq, self._last_end = entry.wal_seq, after
        start, end = self.layout.position(begin), self.layout.position(after)
        if end <= self.cursor and not self.layout.is_guessed(file.number):
            return None
        return FoundEntry(entry=entry, start=start, end=end)


def _size(damage: LogDamage) -> int:
    """Return the number of damaged bytes, or `_UNKNOWN_BYTES` for a missing or empty file."""
    is_empty = damage.end is not None and damage.end <= damage.start
    return _UNKNOWN_BYTES if damage.end is None or is_empty else damage.end - damage.start


def read_wal(fs: FileSystem, directory: str, *, base: int = 0) -> WalReplay:
    """Read the log in `directory` without changing it. Check every checksum from the cursor's file on.

    `base` is the first position if there are no files. Raise `Unsupported` for a log that this release cannot
    read.
    """
    sidecar = read_cursor(fs, directory)
    layout = QuiverLayout(base=max(base, sidecar or 0))
    first = _file_of(fs, directory, layout, sidecar)
    found = scan(fs, directory, WalFormat(), start=LogPosition(first, 0) if first else None, layout=layout)
    replay = WalReplay(found=found, layout=layout, cursor=0, sidecar=sidecar, damage=list(found.damage))
    replay.cursor = _cursor_of(replay, sidecar)
    if sidecar is not None and sidecar < replay.cursor:
        replay.damage.insert(0, _missing_start(replay, sidecar))
    # The active file exists before the cursor does, and is durable up to a position before the cursor moves
    # there.
    replay.expect(sidecar or 0)
    return replay


def _file_of(fs: FileSystem, directory: str, layout: QuiverLayout, position: int | None) -> int:
    """Return the file that contains a position, or 0 if none does. With 0 every file is read."""
    if position is None:
        return 0
    starts = layout.read_starts(fs, directory)
    return max((number for number, start in starts.items() if start <= position), default=0)


def _cursor_of(replay: WalReplay, sidecar: int | None) -> int:
    """Return the later of the sidecar's position and the start of the log."""
    if not replay.found.files:
        return replay.layout.base
    oldest = replay.layout.start(replay.found.files[0].number)
    return oldest if sidecar is None else max(sidecar, oldest)


def _missing_start(replay: WalReplay, sidecar: int) -> LogDamage:
    number = replay.found.files[0].number - 1
    reason = f"positions {sidecar} to {replay.cursor} are missing"
    return LogDamage(file=number, start=0, end=None, reason=reason, name=replay.found.name_of(number))


def quarantine_damage(fs: FileSystem, replay: WalReplay, quarantine: str) -> list[str]:
    """Copy each damaged file from its first damaged byte on, and return the copies. Safe to repeat."""
    copies: list[str] = []
    for damage in replay.damage:
        copy = os.path.join(quarantine, f"{ACTIVE}.{damage.file}.at-{damage.start}")
        if damage.end is None or damage.end <= damage.start or copy in copies:
            continue
        copies.append(copy)
        fs.make_dirs(quarantine)
        view = fs.open_view(os.path.join(replay.found.directory, damage.name))
        write_durably(fs, copy, [view[damage.start :]], staging=quarantine)
    return copies
