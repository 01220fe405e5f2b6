"""The content of the files of a log: frames, headers, and marks that confirm the frames before them.

A `LogFormat` finds the bounds of frames. The package that defines the frames provides it. A `LogLayout`
determines the names of files, their headers, and how a file becomes the active one. The log decides when a
file is started, which frames are copied into it, and when it may be removed.

A header is three marks: the number of the previous file, the offset up to which that file is valid, and a
random salt. A later mark contains `position ^ salt`. Every byte of the file below `position` was durable when
the mark was written. Bytes in a record that look like a mark almost certainly decode to a position beyond
themselves, because their writer did not know the salt.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.storage.fs import FileSystem, publish, stage

FrameEnds: TypeAlias = npt.NDArray[np.int64]

CURRENT: Final = "CURRENT"
"""The file that contains the name of the log's active file."""

_NAME = re.compile(r"wal-([0-9]{16})\.log")


class LogFormat(Protocol):
    """The encoding of frames: how to find and verify them. Every method is pure.

    A run of zero bytes is never a valid frame, and every frame has a checksum over all its bytes. All marks
    have the same length and begin with the same bytes, so that they can be found among damaged frames.
    """

    def frame_end(self, view: memoryview, offset: int, limit: int) -> int | None:
        """Return the end of the valid frame that starts at `offset` and ends by `limit`, or None."""
        ...

    def frame_ends(self, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
        """Return the ends of the adjacent valid frames from `start`, and the end of the last one.

        The second value is `start` if there are no frames. `chase` is a correct implementation. A format may
        provide a faster one.
        """
        ...

    def mark(self, value: int) -> bytes:
        """Encode a mark: a frame of the log itself that contains an unsigned 64-bit number."""
        ...

    def read_mark(self, frame: memoryview) -> int | None:
        """Return the number in a valid frame that is a mark, or None for any other frame."""
        ...


def chase(fmt: LogFormat, view: memoryview, start: int, limit: int) -> tuple[FrameEnds, int]:
    """Implement `frame_ends` with one call of `frame_end` per frame."""
    ends: list[int] = []
    frame_end = fmt.frame_end
    end = frame_end(view, start, limit)
    while end is not None:
        ends.append(end)
        start = end
        end = frame_end(view, start, limit)
    return np.array(ends, dtype=np.int64), start


class LogPosition(NamedTuple):
    """A position in a log: the number of a file, and an offset in it. Positions sort in log order."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The link from a file to the previous one. `previous` is (0, 0) in the first file of a log."""

    previous: LogPosition
    salt: int

    def encode(self, fmt: LogFormat) -> bytes:
        return fmt.mark(self.previous.file) + fmt.mark(self.previous.offset) + fmt.mark(self.salt)

    @classmethod
    def decode(cls, fmt: LogFormat, view: memoryview) -> LogHeader | None:
        """Decode the header at the start of a file. Return None if it is damaged."""
        values: list[int] = []
        start = 0
        for _ in range(3):
            end = fmt.frame_end(view, start, len(view))
            value = None if end is None else fmt.read_mark(view[start:end])
            if end is None or value is None:
                return None
            values.append(value)
            start = end
        return cls(previous=LogPosition(values[0], values[1]), salt=values[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDamage:
    """A range of a file that was written and cannot be read. `end` is None if the whole file is missing.

    `name` is the name of the file if that does not follow from its number.
    """

    file: int
    start: int
    end: int | None
    reason: str
    name: str = ""

    def __str__(self) -> str:
        where = "" if self.end is None else f", bytes {self.start} to {self.end}"
        return f"{self.name or file_name(self.file)}{where}: {self.reason}"


def header_bytes(fmt: LogFormat) -> int:
    """Return the length of every header of this format, which is the offset of the first frame."""
    return 3 * len(fmt.mark(0))


def file_name(number: int) -> str:
    return f"wal-{number:016d}.log"


def file_number(name: str) -> int | None:
    """Return the number in the name of a log file, or None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def find_marks(
    fmt: LogFormat, view: memoryview, start: int, limit: int, salt: int
) -> Iterator[tuple[int, int]]:
    """Yield (offset, number) of each mark from `start`, even among damaged frames."""
    low, high = fmt.mark(0), fmt.mark(2**64 - 1)
    same = next((n for n, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low))
    for match in re.finditer(re.escape(low[:same]), view[start:limit]):
        offset = start + match.start()
        end = fmt.frame_end(view, offset, limit)
        value = None if end is None else fmt.read_mark(view[offset:end])
        if value is not None and value ^ salt <= offset:
            yield offset, value ^ salt


class LogLayout(Protocol):
    """The naming of one log's files, and how they are found, started, activated and archived.

    A layout object belongs to one log, because it may remember the names of files. The numbers of files rise
    in the order of the log.
    """

    def first_offset(self, number: int) -> int:
        """Return the offset of the first frame of a file."""
        ...

    def find(self, fs: FileSystem, directory: str) -> list[int]:
        """Return the numbers of the existing files, in order."""
        ...

    def name(self, number: int) -> str:
        """Return the current name of a file."""
        ...

    def headers(self, views: Mapping[int, memoryview]) -> dict[int, LogHeader | None]:
        """Return the header of each complete file, or None for a damaged one."""
        ...

    def complaints(self, fs: FileSystem, directory: str, numbers: list[int]) -> Iterator[LogDamage]:
        """Yield the problems with the names of a log that has frames in these files."""
        ...

    def number_after(self, last: int, next_frame: int) -> int:
        """Return the number of the file after `last`. `next_frame` counts frames and files together."""
        ...

    def head(self, number: int, header: LogHeader, carried: bytes) -> bytes:
        """Return the first bytes of a file: its header, then `carried`, frames of the previous file."""
        ...

    def prepare(self, fs: FileSystem, directory: str, number: int) -> None:
        """Write what `install` of this number needs beside the staged file, so that it takes no more room."""
        ...

    def install(self, fs: FileSystem, directory: str, staged: str, number: int) -> None:
        """Durably give a staged file its name and make it the active one. Call `prepare` first.

        After a failure the file may or may not be visible. A call with another file is then safe.
        """
        ...

    def withdraw(self, fs: FileSystem, directory: str, number: int) -> bool:
        """Undo a `prepare` or an `install` that failed; return whether nothing of them is left, durably.

        Then the log may continue in the file that was active.
        """
        ...

    def left_behind(self, number: int) -> list[int]:
        """Return the files to remove after an `install` of this number failed and a later one succeeded."""
        ...

    def retire(self, fs: FileSystem, directory: str, number: int, end: int) -> None:
        """Archive a file that is no longer active and is valid up to `end`. Safe to repeat."""
        ...

    def evidence(self, number: int) -> str | None:
        """Return the new name for a damaged file that is due for removal, or None to remove it."""
        ...

    def is_leftover(self, name: str) -> bool:
        """Return whether `name` belongs to unfinished work of an earlier process."""
        ...


class NumberedLayout:
    """Files `wal-<number>.log`, whose headers are marks, and `CURRENT`, which names the active one."""

    def __init__(self, fmt: LogFormat) -> None:
        self._fmt = fmt
        self._header_bytes = header_bytes(fmt)
        self._staged: str | None = None

    def first_offset(self, number: int) -> int:
        return self._header_bytes

    def find(self, fs: FileSystem, directory: str) -> list[int]:
        names = [name for name, _ in fs.list_files(directory)]
        return [number for number in map(file_number, names) if number is not None]

    def name(self, number: int) -> str:
        return file_name(number)

    def headers(self, views: Mapping[int, memoryview]) -> dict[int, LogHeader | None]:
        return {number: LogHeader.decode(self._fmt, view) for number, view in views.items()}

    def complaints(self, fs: FileSystem, directory: str, numbers: list[int]) -> Iterator[LogDamage]:
        try:
            text = fs.read(os.path.join(directory, CURRENT)).decode("ascii", "replace").strip()
        except NotFound:
            # The first file exists before its name is written, and is empty until then.
            if numbers:
                yield LogDamage(file=numbers[-1], start=0, end=0, reason="CURRENT is missing")
            return
        except MediaError as error:
            yield LogDamage(file=numbers[-1] if numbers else 0, start=0, end=0, reason=str(error))
            return
        active = file_number(text)
        if active is None:
            reason = f"CURRENT names no log file: {text[:40]!r}"
            yield LogDamage(file=numbers[-1] if numbers else 0, start=0, end=0, reason=reason)
        elif active not in self.find(fs, directory):
            reason = "CURRENT names this file, but it is missing"
            yield LogDamage(file=active, start=0, end=None, reason=reason)

    def number_after(self, last: int, next_frame: int) -> int:
        return next_frame

    def head(self, number: int, header: LogHeader, carried: bytes) -> bytes:
        return header.encode(self._fmt) + carried

    def prepare(self, fs: FileSystem, directory: str, number: int) -> None:
        staged = os.path.join(directory, f"{CURRENT}.{uuid.uuid4().hex}")
        stage(fs, staged, [f"{file_name(number)}\n".encode()])
        self._staged = staged

    def install(self, fs: FileSystem, directory: str, staged: str, number: int) -> None:
        assert self._staged is not None, "prepare comes before install"
        fs.rename(staged, os.path.join(directory, file_name(number)))
        fs.sync_dir(directory)
        publish(fs, self._staged, os.path.join(directory, CURRENT))
        self._staged = None

    def withdraw(self, fs: FileSystem, directory: str, number: int) -> bool:
        staged, self._staged = self._staged, None
        try:
            if staged is not None:
                with contextlib.suppress(NotFound):
                    fs.unlink(staged)
            if self._names(fs, directory, number):
                return False
            with contextlib.suppress(NotFound):
                fs.unlink(os.path.join(directory, file_name(number)))
            fs.sync_dir(directory)
        except PenstockError:
            return False
        return True

    def _names(self, fs: FileSystem, directory: str, number: int) -> bool:
        """Whether CURRENT names this file."""
        try:
            return fs.read(os.path.join(directory, CURRENT)) == f"{file_name(number)}\n".encode()
        except NotFound:
            return False

    def left_behind(self, number: int) -> list[int]:
        return [number]

    def retire(self, fs: FileSystem, directory: str, number: int, end: int) -> None:
        """Do nothing: a file keeps its name and its size."""

    def evidence(self, number: int) -> str | None:
        return f"damaged-{file_name(number)}"

    def is_leftover(self, name: str) -> bool:
        return name.startswith((f"{CURRENT}.", "EXTENT."))
