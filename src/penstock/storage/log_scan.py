"""The scan of a log after a crash or damage: it finds every valid frame and reports damaged ranges.

The last file may end in a torn tail: bytes that were being written when the process or the machine stopped.
They were never acknowledged as durable, so they are cut off. A bad frame before a later mark, or before the
next file, is damage. It is reported with its range, and the scan resumes at the next mark. A frame that the
device cannot read is always reported, even without a later mark, because its content is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.storage.fs import FileSystem, FileView
from penstock.storage.log_layout import (
    FrameEnds,
    LogDamage,
    LogFormat,
    LogHeader,
    LogLayout,
    LogPosition,
    NumberedLayout,
    file_name,
    find_marks,
)

_READ_BYTES: Final = 1024**2
_HEAD_BYTES: Final = 64 * 1024
"""More than the header of any layout."""
_LENGTH_BYTES: Final = 8
"""The bytes at the start of a frame, including its length, that may themselves be unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRun:
    """Adjacent valid frames. The first starts at `start`, each later one at the end of the one before."""

    start: int
    ends: FrameEnds

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each frame."""
        start = self.start
        for end in self.ends.tolist():
            yield start, end
            start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFile:
    """One file of the log. It is valid up to `end`. `torn` means that other bytes follow.

    `view` gives the valid bytes. `size` is the size of the file.
    """

    number: int
    view: memoryview | FileView
    runs: list[FrameRun]
    end: int
    size: int
    torn: bool

    @property
    def frame_count(self) -> int:
        return sum(len(run.ends) for run in self.runs)

    def bytes_of(self, start: int, end: int) -> memoryview:
        """Return these bytes. Raise `MediaError` if they can no longer be read."""
        return exact(self.view, start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScan:
    """The content of a log's directory. Frames include the log's own marks, but not headers.

    - `older` are files before the requested start.
    - `strays` are files that were started but never used.
    - `next_frame` is above the number of every file that exists or is known to be missing.
    - `name_of` maps the number of a file to its name.
    """

    directory: str
    files: list[ScannedFile]
    damage: list[LogDamage] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    next_frame: int = 1
    first_offset: int = 0
    """The offset of the first frame of a file."""
    name_of: Callable[[int], str] = file_name

    @property
    def end(self) -> LogPosition:
        """The position at which the log ends; (0, 0) for a log without files."""
        return LogPosition(self.files[-1].number, self.files[-1].end) if self.files else LogPosition(0, 0)

    @property
    def torn(self) -> bool:
        """Whether an interrupted write was found at the end."""
        return bool(self.files) and self.files[-1].torn

    def frames(self) -> Iterator[tuple[ScannedFile, int, int]]:
        """Yield (file, start, end) of each frame, in order."""
        for file in self.files:
            for run in file.runs:
                for start, end in run:
                    yield file, start, end


def scan(
    fs: FileSystem,
    directory: str,
    fmt: LogFormat,
    *,
    start: LogPosition | None = None,
    layout: LogLayout | None = None,
    in_memory: bool = False,
) -> LogScan:
    """Read every file of the log without changing anything. Without a `layout` the files are numbered.

    Only one file at a time is in memory, and each is read again for its frames. With `in_memory` all of them
    stay in memory, for a reader beside a writer that may cut them.

    `start` is the position from which the reader needs the log, such as that of a snapshot. Files before it
    are skipped and listed in `older`. A file that is missing at or after it is damage.
    """
    return _Scanner(fs, directory, fmt, layout or NumberedLayout(fmt), start, in_memory).scan()


def exact(view: memoryview | FileView, start: int, end: int) -> memoryview:
    """Read a part of a file again. Raise `MediaError` if it can no longer be read."""
    if isinstance(view, FileView):
        return memoryview(view.read_exactly(start, end))
    return view[start:end]


def repair_tail(fs: FileSystem, found: LogScan) -> None:
    """Durably truncate the last file to its valid bytes. Safe to repeat."""
    if found.files:
        last = found.files[-1]
        if last.size > last.end:
            fs.truncate(os.path.join(found.directory, found.name_of(last.number)), last.end)


class _Scanner:
    """The state of one scan."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        fmt: LogFormat,
        layout: LogLayout,
        start: LogPosition | None,
        in_memory: bool,
    ) -> None:
        self._in_memory = in_memory
        self._fs = fs
        self._directory = directory
        self._fmt = fmt
        self._layout = layout
        self._start = start or LogPosition(0, 0)
        self._damage: list[LogDamage] = []
        self._views: dict[int, FileView] = {}
        self._headers: dict[int, LogHeader | None] = {}

    def scan(self) -> LogScan:
        numbers = self._layout.find(self._fs, self._directory)
        for number in numbers:
            path = os.path.join(self._directory, self._layout.name(number))
            self._views[number] = self._fs.open_view(path)
        heads = {number: _loaded(view, _HEAD_BYTES) for number, view in self._views.items()}
        self._headers = self._layout.headers(heads)
        chain = self._chain(numbers)
        followers = [*chain[1:], None][: len(chain)]
        files = [self._file(number, after) for number, after in zip(chain, followers, strict=True)]
        # A log that a snapshot names exists, even if it has no data after the snapshot.
        is_written = any(file.runs for file in files) or self._start.offset > 0
        written = numbers if is_written else []
        self._damage += self._layout.complaints(self._fs, self._directory, written)
        return LogScan(
            directory=self._directory,
            files=files,
            damage=sorted(self._damage, key=lambda damage: (damage.file, damage.start)),
            strays=[number for number in numbers if number not in chain and number >= self._start.file],
            older=[number for number in numbers if number not in chain and number < self._start.file],
            next_frame=self._next_frame(numbers, files),
            first_offset=self._layout.first_offset(numbers[-1]) if numbers else 0,
            name_of=self._layout.name,
        )

    def _next_frame(self, numbers: list[int], files: list[ScannedFile]) -> int:
        """Return a number above that of every file that exists or is known to be missing."""
        last = max([0, *numbers, *(damage.file for damage in self._damage)])
        count = files[-1].frame_count if files and files[-1].number == last else 0
        return last + 3 + count if last else 1

    def _chain(self, numbers: list[int]) -> list[int]:
        """Return the numbers of the log's files, oldest first, by following the headers from the newest file.

        A file that no header names is a stray.
        """
        chain: list[int] = []
        number = numbers[-1] if numbers else 0
        while number:
            chain.append(number)
            number = self._before(number, numbers) if number > self._start.file else 0
        if self._start.file > (chain[0] if chain else 0):
            self._report(self._start.file, 0, None, "the file is missing")
        return chain[::-1]

    def _before(self, number: int, numbers: list[int]) -> int:
        """Return the number of the previous file, or 0 if it was removed because it is not needed."""
        header = self._headers[number]
        before = [other for other in numbers if other < number]
        if header is None:
            return before[-1] if before else 0
        previous = header.previous.file
        if not previous or previous in before:
            return previous
        older = [other for other in before if other < previous]
        if older or previous >= self._start.file > 0:
            self._report(previous, 0, None, "the file is missing")
        return older[-1] if older else 0

    def _file(self, number: int, follower: int | None) -> ScannedFile:
        opened, header = self._views[number], self._headers[number]
        view = _loaded(opened)
        if header is None:
            self._report(
                number, 0, min(len(view), self._layout.first_offset(number)), "the header is damaged"
            )
        limit = self._counted(number, follower)
        bound = len(view) if limit is None else min(limit, len(view))
        runs: list[FrameRun] = []
        end = start = min(self._first_offset(number), bound)
        while True:
            ends, stop = self._fmt.frame_ends(view, start, bound)
            if len(ends):
                runs.append(FrameRun(start=start, ends=ends))
            end, resume = self._resume(number, view, stop, bound, vouched=limit is not None)
            if resume is None:
                break
            start = resume
        if limit is not None and len(view) < limit:
            self._report(number, max(stop, len(view)), limit, "the file is too short")
        torn = limit is None and not _is_zero(view[end:])
        end = end if limit is None else limit
        kept = view[:end] if self._in_memory else opened.until(end)
        return ScannedFile(number=number, view=kept, runs=runs, end=end, size=len(view), torn=torn)

    def _first_offset(self, number: int) -> int:
        first = self._layout.first_offset(number)
        return max(first, self._start.offset) if number == self._start.file else first

    def _counted(self, number: int, follower: int | None) -> int | None:
        """Return the valid length of this file by the header of the next one, or None without a next file."""
        header = None if follower is None else self._headers[follower]
        return header.previous.offset if header and header.previous.file == number else None

    def _resume(
        self, number: int, view: memoryview, stop: int, bound: int, *, vouched: bool
    ) -> tuple[int, int | None]:
        """Return the end of the valid part so far, and where to continue after bytes that are not a frame.

        The second value is None at the end of the file, or if neither a mark nor the next file confirms later
        frames. Report the damage.
        """
        if stop >= bound:
            return stop, None
        bad = self._unreadable(number, view, stop)
        header = self._headers[number]
        marks = list(find_marks(self._fmt, view, stop, bound, header.salt)) if header else []
        if bad is None and not vouched and not any(position > stop for _, position in marks):
            return stop, None
        resume = marks[0][0] if marks else None
        end = bound
        if resume is not None:
            end = resume
        elif bad is not None and not vouched:
            # The written bytes end here at the latest.
            end = max(min(bad[1], bound), stop + _used(view[stop:bound]))
        reason = "frames that were durable are damaged"
        if bad is not None:
            reason = f"the device cannot read bytes {bad[0]} to {bad[1]}"
        self._report(number, stop, end, reason)
        return end, resume

    def _unreadable(self, number: int, view: memoryview, stop: int) -> tuple[int, int] | None:
        """Return the unreadable range that contains, or may contain, a part of the frame at `stop`."""
        for low, high in self._views[number].bad:
            if high > stop:
                return (low, high) if low <= stop + _LENGTH_BYTES or not _is_zero(view[stop:low]) else None
        return None

    def _report(self, file: int, start: int, end: int | None, reason: str) -> None:
        self._damage.append(
            LogDamage(file=file, start=start, end=end, reason=reason, name=self._layout.name(file))
        )


def _is_zero(view: memoryview) -> bool:
    return not np.frombuffer(view, dtype=np.uint8).any()


def _used(view: memoryview) -> int:
    """Return the end of the last byte that is not zero."""
    for end in range(len(view), 0, -_READ_BYTES):
        start = max(0, end - _READ_BYTES)
        found = np.flatnonzero(np.frombuffer(view[start:end], dtype=np.uint8))
        if len(found):
            return start + int(found[-1]) + 1
    return 0


def _loaded(view: FileView, size: int | None = None) -> memoryview:
    """Load the first `size` bytes of the file, or all, with zeros for the rest. Zeros use no memory."""
    memory = np.zeros(len(view), np.uint8)
    for start in range(0, len(view) if size is None else min(size, len(view)), _READ_BYTES):
        part = np.frombuffer(view.read(start, min(len(view), start + (size or _READ_BYTES))), np.uint8)
        if part.any():
            memory[start : start + len(part)] = part
    return memoryview(memory.data).toreadonly()
