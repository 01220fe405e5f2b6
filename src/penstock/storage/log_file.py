"""One file of a log: its name, its header, and the marks that vouch for what lies before them.

A header is three marks: the number of the file before this one, the offset up to which that file counts, and
a random salt. Later marks carry `position ^ salt`, where every byte of the file below `position` was durable
when the mark was written. Bytes inside a record that look like a mark decode to a position beyond themselves,
because whoever made them did not know the salt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.storage.log_format import LogFormat

__all__ = [
    "CURRENT",
    "LogDamage",
    "LogHeader",
    "LogPosition",
    "file_name",
    "file_number",
    "find_marks",
    "header_bytes",
]

CURRENT: Final = "CURRENT"
"""The file that holds the name of the log's active file."""

_NAME = re.compile(r"wal-([0-9]{16})\.log")


class LogPosition(NamedTuple):
    """A place in a log: the number of a file and an offset in it. Positions compare in the log's order."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """How a file hangs on to the one before it. `previous` is (0, 0) in a log's first file."""

    previous: LogPosition
    salt: int

    def encode(self, fmt: LogFormat) -> bytes:
        return fmt.mark(self.previous.file) + fmt.mark(self.previous.offset) + fmt.mark(self.salt)

    @classmethod
    def decode(cls, fmt: LogFormat, view: memoryview) -> LogHeader | None:
        """The header at the start of a file, None if it is damaged."""
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
    """A range of a file that was written and cannot be read. `end` is None when the whole file is missing.

    `name` is what the file is called where that does not follow from its number.
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
    """The length of every header of this format: where a file's own frames begin."""
    return 3 * len(fmt.mark(0))


def file_name(number: int) -> str:
    return f"wal-{number:016d}.log"


def file_number(name: str) -> int | None:
    """The number in a log file's name, None of any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def find_marks(
    fmt: LogFormat, view: memoryview, start: int, limit: int, salt: int
) -> Iterator[tuple[int, int]]:
    """The marks from `start` on, whatever lies between them: where each one is and what it vouches for."""
    low, high = fmt.mark(0), fmt.mark(2**64 - 1)
    same = next((n for n, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low))
    for match in re.finditer(re.escape(low[:same]), view[start:limit]):
        offset = start + match.start()
        end = fmt.frame_end(view, offset, limit)
        value = None if end is None else fmt.read_mark(view[offset:end])
        if value is not None and value ^ salt <= offset:
            yield offset, value ^ salt
