"""The demo's totals: what producers were told, what the tables hold, and whether the two agree. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli.demo_clicks import BAD_AT, BAD_EVERY
from penstock.cli.demo_journal import Journal, Sums, checksum_of

__all__ = ["Balance", "Records", "close_books"]

Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Checksums: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint64]]
Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

_MADE_BY: Final = r'^\{"producer":(?P<producer>\d{1,6}),"number":(?P<number>\d{1,12}),'
_NUMBERS: Final = 10**12
"""More than any producer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Records by who made them, with size and checksum. Producer -1: nobody of the demo."""

    producer: Numbers
    number: Numbers
    size: Numbers
    checksum: Checksums

    @classmethod
    def of(cls, values: pa.ChunkedArray) -> Records:
        """From their bytes."""
        made = pc.struct_field(pc.extract_regex(values, _MADE_BY), [0])
        number = pc.struct_field(pc.extract_regex(values, _MADE_BY), [1])
        raw = [value or b"" for value in values.to_pylist()]
        return cls(
            producer=_integers(made),
            number=_integers(number),
            size=np.fromiter(map(len, raw), np.int64, len(raw)),
            checksum=np.fromiter(map(checksum_of, raw), np.uint64, len(raw)),
        )

    def __len__(self) -> int:
        return len(self.producer)

    def __add__(self, other: Records) -> Records:
        return Records(
            producer=np.concatenate([self.producer, other.producer]),
            number=np.concatenate([self.number, other.number]),
            size=np.concatenate([self.size, other.size]),
            checksum=np.concatenate([self.checksum, other.checksum]),
        )

    @property
    def distinct(self) -> int:
        return len(np.unique(self.producer * _NUMBERS + self.number))

    @property
    def bad(self) -> Flags:
        """Those that were made so that they do not decode."""
        flags: Flags = self.number % BAD_EVERY == BAD_AT
        return flags

    def sums(self, chosen: Flags) -> Sums:
        return Sums(
            records=int(chosen.sum()),
            size_bytes=int(self.size[chosen].sum()),
            checksum=int(self.checksum[chosen].sum(dtype=np.uint64)),
        )


def _integers(texts: pa.ChunkedArray) -> Numbers:
    whole: Numbers = pc.fill_null(texts.cast(pa.string()).cast(pa.int64()), -1).to_numpy()
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The books of one run."""

    produced: int
    acknowledged: Sums
    stored: Sums
    """Of the acknowledged records, those in the tables: rows and dead letters."""
    rows: int
    letters: int
    unacknowledged: int
    """Stored, but their producer was killed before it could be told."""
    duplicates: int
    foreign: int
    """Stored, but nobody produced them."""
    misplaced: int
    """Bad records among the rows, good ones among the dead letters."""
    clicks: int
    """The clicks in the table of totals."""

    @property
    def balanced(self) -> bool:
        """Every acknowledged record is stored exactly once, unchanged, and counted once in the totals."""
        return (
            self.acknowledged == self.stored
            and self.duplicates == self.foreign == self.misplaced == 0
            and self.clicks == self.rows
        )

    @property
    def never_durable(self) -> int:
        """Records that their producer still held when it was killed."""
        return self.produced - self.acknowledged.records - self.unacknowledged

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "in_flight_when_killed": self.never_durable}


def close_books(journals: Mapping[int, Journal], rows: Records, letters: Records, clicks: int) -> Balance:
    """Sort every stored record by what its producer's journal says of it."""
    stored = rows + letters
    offered, acked = np.zeros(len(stored), np.bool_), np.zeros(len(stored), np.bool_)
    for producer, journal in journals.items():
        mine = stored.producer == producer
        offered |= mine & (stored.number < journal.offered_end)
        acked |= mine & _within(stored.number, journal.intervals)
    return Balance(
        produced=sum(journal.offered_end for journal in journals.values()),
        acknowledged=sum((journal.acked for journal in journals.values()), Sums()),
        stored=stored.sums(acked),
        rows=len(rows),
        letters=len(letters),
        unacknowledged=int((offered & ~acked).sum()),
        duplicates=len(stored) - stored.distinct,
        foreign=int((~offered).sum()),
        misplaced=int(rows.bad.sum()) + int((~letters.bad).sum()),
        clicks=clicks,
    )


def _within(numbers: Numbers, intervals: tuple[tuple[int, int], ...]) -> Flags:
    """Which numbers are in one of the half-open ranges, which are ascending and apart."""
    edges = np.array(intervals, np.int64).reshape(-1)
    flags: Flags = np.searchsorted(edges, numbers, side="right") % 2 == 1
    return flags
