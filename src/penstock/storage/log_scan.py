"""The scan of a log after a crash or damage: every frame that counts, and what is wrong with the rest.

The last file may end in a torn tail: bytes that were being written when the process or the machine stopped.
They were never acknowledged as durable, so they are cut off. A bad frame before a later mark, or before the
next file, is damage. It is reported with its range, and the scan resumes at the next mark. A frame that the
device cannot read is also reported, marked or not, because its content is unknown.
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
"""The start of a frame may itself lie in a part that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRun:
    """Adjacent valid frames: the first starts at `start`, each next one at the end of the one before."""

    start: int
    ends: FrameEnds

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Start and end of each frame."""
        start = self.start
        for end in self.ends.tolist():
            yield start, end
            start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFile:
    """One file of the chain. `end` is the offset up to which it counts; `torn` says whether other bytes
    follow.

    `view` holds the bytes that count, `size` is the size of the file.
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
        """Return these bytes as the scan found them. Raises `MediaError` if they cannot be read any more."""
        return exact(self.view, start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScan:
    """The content of a directory. Frames include the log's own marks, but not headers.

    `older` are files before the requested start. `strays` are remains of attempts to start a file, which
    never held frames. `next_frame` is above the number of every file that exists or is known to be missing.
    `name_of` maps the number of a file to its name.
    """

    directory: str
    files: list[ScannedFile]
    damage: list[LogDamage] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    next_frame: int = 1
    first_offset: int = 0
    """Return the offset of the first frame of a file."""
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
        """Iterate over all frames in order: file, start and end of each."""
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
    """Read every file of the log; changes nothing. Without a `layout` the files are numbered ones.

    One file at a time is in memory, and each is read again when its frames are wanted; with `in_memory`
    all of them stay there, for a reader beside a writer that may cut them.

    `start` is where the reader's own records take over, such as the position of a snapshot: files before it
    are left out, as `older`, and one that is missing from there on is damage.
    """
    return _Scanner(fs, directory, fmt, layout or NumberedLayout(fmt), start, in_memory).scan()


def exact(view: memoryview | FileView, start: int, end: int) -> memoryview:
    """Read a part of a file again. Raises `MediaError` if it cannot be read any more."""
    if isinstance(view, FileView):
        return memoryview(view.read_exactly(start, end))
    return view[start:end]


def repair_tail(fs: FileSystem, found: LogScan) -> None:
    """Truncate the last file to the bytes that count, durably. Repeating it changes nothing."""
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
        """A number above that of every file that exists or is known to be missing."""
        last = max([0, *numbers, *(damage.file for damage in self._damage)])
        count = files[-1].frame_count if files and files[-1].number == last else 0
        return last + 3 + count if last else 1

    def _chain(self, numbers: list[int]) -> list[int]:
        """Follow the headers back from the newest file; a file that no header names is a stray."""
        chain: list[int] = []
        number = numbers[-1] if numbers else 0
        while number:
            chain.append(number)
            number = self._before(number, numbers) if number > self._start.file else 0
        if self._start.file > (chain[0] if chain else 0):
            self._report(self._start.file, 0, None, "the file is missing")
        return chain[::-1]

    def _before(self, number: int, numbers: list[int]) -> int:
        """Return the number of the previous file; 0 if it was removed because its records were kept
        elsewhere."""
        header = self._headers[number]
        before = [other for other in numbers if other < number]
        if header is None:
            return before[-1] if before else 0
        wanted = header.previous.file
        if not wanted or wanted in before:
            return wanted
        older = [other for other in before if other < wanted]
        if older or wanted >= self._start.file > 0:
            self._report(wanted, 0, None, "the file is missing")
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
        """Return the offset up to which the next file says that this one counts; None without a next file."""
        header = None if follower is None else self._headers[follower]
        return header.previous.offset if header and header.previous.file == number else None

    def _resume(
        self, number: int, view: memoryview, stop: int, bound: int, *, vouched: bool
    ) -> tuple[int, int | None]:
        """Return the offset up to which the file counts, and where to continue after bytes that are not a
        frame.

        Returns None at the end, unless a mark or the next file confirms later frames. Reports the damage.
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
            # The bytes that were written there end before this.
            end = max(min(bad[1], bound), stop + _used(view[stop:bound]))
        reason = "frames that were durable are damaged"
        if bad is not None:
            reason = f"the device cannot read bytes {bad[0]} to {bad[1]}"
        self._report(number, stop, end, reason)
        return end, resume

    def _unreadable(self, number: int, view: memoryview, stop: int) -> tuple[int, int] | None:
        """Return the unreadable part in which the frame at `stop` is, or may be."""
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
    """Return the end of the bytes that are not zero."""
    for end in range(len(view), 0, -_READ_BYTES):
        start = max(0, end - _READ_BYTES)
        found = np.flatnonzero(np.frombuffer(view[start:end], dtype=np.uint8))
        if len(found):
            return start + int(found[-1]) + 1
    return 0


def _loaded(view: FileView, size: int | None = None) -> memoryview:
    """Load the file into memory, or its beginning with zeros in place of the rest. Zeros cost no memory."""
    memory = np.zeros(len(view), np.uint8)
    for start in range(0, len(view) if size is None else min(size, len(view)), _READ_BYTES):
        part = np.frombuffer(view.read(start, min(len(view), start + (size or _READ_BYTES))), np.uint8)
        if part.any():
            memory[start : start + len(part)] = part
    return memoryview(memory.data).toreadonly()
