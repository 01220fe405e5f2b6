"""What a producer of the demo writes down: what it is about to offer, and what was acknowledged.

One line per call, in one write each, so that a kill leaves whole lines:

    offer FIRST COUNT                    before the records are handed to the buffer
    ack   FIRST COUNT BYTES CHECKSUM     after they were acknowledged as durable
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.storage import data_modes

__all__ = ["Journal", "JournalReader", "JournalWriter", "Sums", "checksum_of", "read_journal"]

CHECKSUM_END = 1 << 64


def checksum_of(record: bytes) -> int:
    """The checksum of one record; those of many are added up modulo 2^64."""
    return int(xxhash.xxh3_64_intdigest(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Records by count, bytes and sum of checksums: equal sums mean equal records."""

    records: int = 0
    size_bytes: int = 0
    checksum: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            records=self.records + other.records,
            size_bytes=self.size_bytes + other.size_bytes,
            checksum=(self.checksum + other.checksum) % CHECKSUM_END,
        )

    @classmethod
    def of(cls, records: Sequence[bytes]) -> Sums:
        return cls(
            records=len(records),
            size_bytes=sum(map(len, records)),
            checksum=sum(map(checksum_of, records)) % CHECKSUM_END,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A producer's journal, read back."""

    offered_end: int
    """No record of this number or above was ever offered."""
    acked: Sums
    intervals: tuple[tuple[int, int], ...]
    """Acknowledged numbers as half-open ranges, ascending and apart."""


def read_journal(path: Path) -> Journal:
    """The journal at `path`; one that does not exist yet is empty."""
    return JournalReader(path).read()


class JournalReader:
    """Follows a journal: each look reads only what was added since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._offered_end = 0
        self._acked = Sums()
        self._ranges: list[tuple[int, int]] = []

    def read(self) -> Journal:
        """The journal now; a line that is not finished yet is left for the next look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            added = b""
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.decode("ascii").splitlines():
            self._take(line)
        self._ranges = _joined(self._ranges)
        return Journal(offered_end=self._offered_end, acked=self._acked, intervals=tuple(self._ranges))

    def _take(self, line: str) -> None:
        kind, *numbers = line.split()
        first, count, *sums = map(int, numbers)
        if kind == "offer":
            self._offered_end = max(self._offered_end, first + count)
        else:
            self._acked += Sums(records=count, size_bytes=sums[0], checksum=sums[1])
            self._ranges.append((first, first + count))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined


class JournalWriter:
    """Appends lines; each is one write."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = data_modes().new_file(str(path), flags)

    def offer(self, first: int, count: int) -> None:
        os.write(self._file, f"offer {first} {count}\n".encode())

    def ack(self, first: int, sums: Sums) -> None:
        line = f"ack {first} {sums.records} {sums.size_bytes} {sums.checksum}\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        os.close(self._file)
