"""The seam between the append log and the names and headers of its files.

The log decides when a file is begun, what it carries over and when it may go. A layout decides what the
files are called, what stands at their start, and how one of them becomes the active one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

from penstock.errors import MediaError, NotFound
from penstock.storage.atomic import write_durably
from penstock.storage.fs import FileSystem
from penstock.storage.log_file import CURRENT, LogDamage, LogHeader, file_name, file_number, header_bytes
from penstock.storage.log_format import LogFormat

__all__ = ["LogLayout", "NumberedLayout"]


class LogLayout(Protocol):
    """How the files of one log are named, found, begun, made active and put away.

    One layout object belongs to one log: it may remember which file has which name. Files have numbers that
    grow in the order of the log.
    """

    def first_offset(self, number: int) -> int:
        """Where the frames of this file begin."""
        ...

    def find(self, fs: FileSystem, directory: str) -> list[int]:
        """The numbers of the files that are here, in order."""
        ...

    def name(self, number: int) -> str:
        """What the file of this number is called now."""
        ...

    def headers(self, views: Mapping[int, memoryview]) -> dict[int, LogHeader | None]:
        """What the files, given whole, say at their start; None of one whose header is damaged."""
        ...

    def complaints(self, fs: FileSystem, directory: str, numbers: list[int]) -> Iterator[LogDamage]:
        """What is wrong with the names of a log that holds frames in the files of these numbers."""
        ...

    def number_after(self, last: int, next_frame: int) -> int:
        """The number of the file that follows `last`; `next_frame` counts frames and files together."""
        ...

    def head(self, number: int, header: LogHeader, carried: bytes) -> bytes:
        """The first bytes of a file: its header and `carried`, frames of the file before it."""
        ...

    def install(self, fs: FileSystem, directory: str, staged: str, number: int) -> None:
        """Give a staged file its name and make it the active one, durably.

        After a failure the file may be visible or not, and calling it again with another one is safe.
        """
        ...

    def left_behind(self, number: int) -> list[int]:
        """The files to remove once an `install` of this number failed and a later one was done."""
        ...

    def retire(self, fs: FileSystem, directory: str, number: int, end: int) -> None:
        """Put away a file that is not active any more and counts up to `end`. May be done again."""
        ...

    def evidence(self, number: int) -> str | None:
        """The name that a damaged file keeps when its turn to be removed comes, None to remove it."""
        ...

    def is_leftover(self, name: str) -> bool:
        """Whether this is the name of unfinished work that an earlier process left."""
        ...


class NumberedLayout:
    """Files `wal-<number>.log`, whose headers are marks, and `CURRENT`, which names the active one."""

    def __init__(self, fmt: LogFormat) -> None:
        self._fmt = fmt
        self._header_bytes = header_bytes(fmt)

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
            # The first file is there before the name is written, and holds nothing until it is.
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

    def install(self, fs: FileSystem, directory: str, staged: str, number: int) -> None:
        fs.rename(staged, os.path.join(directory, file_name(number)))
        fs.sync_dir(directory)
        name = f"{file_name(number)}\n".encode()
        write_durably(fs, os.path.join(directory, CURRENT), [name], staging=directory)

    def left_behind(self, number: int) -> list[int]:
        return [number]

    def retire(self, fs: FileSystem, directory: str, number: int, end: int) -> None:
        """Nothing: a file keeps its name and its size."""

    def evidence(self, number: int) -> str | None:
        return f"damaged-{file_name(number)}"

    def is_leftover(self, name: str) -> bool:
        return name.startswith((f"{CURRENT}.", "EXTENT."))
