"""The demo's database: rows and the position in the queue change in one transaction, or not at all."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.demo_journal import CHECKSUM_END, Journal, Sums, checksum_of

__all__ = ["Contents", "Table", "contents", "rows_stored"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (producer INTEGER, number INTEGER, size INTEGER, checksum INTEGER);
CREATE TABLE IF NOT EXISTS position (
    one INTEGER PRIMARY KEY CHECK (one = 1), sequence INTEGER NOT NULL, records INTEGER NOT NULL
);
"""
_SIGNED_END = 1 << 63


class Table:
    """What a consumer writes to. Not for two of them at once: the queue sees to that."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")  # an acknowledged row survives a power cut
        self._connection.executescript(_SCHEMA)

    def position(self) -> int | None:
        """The sequence of the last batch whose rows are stored."""
        row = self._connection.execute("SELECT sequence FROM position").fetchone()
        return None if row is None else int(row[0])

    def store(self, sequence: int, records: list[bytes]) -> None:
        """Rows and position together: the whole of the exactly-once recipe."""
        rows = [_row(record) for record in records]
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
            self._connection.execute(
                "INSERT INTO position VALUES (1, ?, ?) ON CONFLICT (one) DO UPDATE "
                "SET sequence = excluded.sequence, records = records + excluded.records",
                (sequence, len(records)),
            )
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


def _row(record: bytes) -> tuple[int, int, int, int]:
    producer, number, _ = record.split(b":", 2)
    checksum = checksum_of(record)
    return int(producer), int(number), len(record), checksum - CHECKSUM_END * (checksum >= _SIGNED_END)


def rows_stored(path: Path) -> int:
    """How many rows there are, without counting them."""
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
    try:
        row = connection.execute("SELECT records FROM position").fetchone()
        return 0 if row is None else int(row[0])
    except sqlite3.OperationalError:
        return 0  # the consumer is about to make the tables
    finally:
        connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The table against the journals."""

    acknowledged: Sums
    """Rows that a producer was told are durable."""
    unacknowledged: Sums
    """Rows that were durable when their producer was killed, before it could be told."""
    unoffered: int
    """Rows that nobody has produced."""
    distinct: int

    @property
    def rows(self) -> int:
        return self.acknowledged.records + self.unacknowledged.records + self.unoffered


def contents(path: Path, journals: Mapping[int, Journal]) -> Contents:
    """Sort every row by what its producer's journal says of it."""
    connection = sqlite3.connect(path)
    try:
        rows = connection.execute("SELECT producer, number, size, checksum FROM records")
        piles = {"acked": [0, 0, 0], "unacked": [0, 0, 0], "unoffered": [0, 0, 0]}
        starts = {p: [first for first, _ in journal.intervals] for p, journal in journals.items()}
        for producer, number, size, checksum in rows:
            pile = piles[_standing(journals.get(producer), starts.get(producer, []), number)]
            pile[0] += 1
            pile[1] += size
            pile[2] += checksum
        counting = "SELECT COUNT(*) FROM (SELECT DISTINCT producer, number FROM records)"
        (distinct,) = connection.execute(counting).fetchone()
    finally:
        connection.close()
    return Contents(
        acknowledged=_sums(piles["acked"]),
        unacknowledged=_sums(piles["unacked"]),
        unoffered=piles["unoffered"][0],
        distinct=int(distinct),
    )


def _standing(journal: Journal | None, starts: list[int], number: int) -> str:
    if journal is None or not 0 <= number < journal.offered_end:
        return "unoffered"
    place = bisect_right(starts, number) - 1
    return "acked" if place >= 0 and number < journal.intervals[place][1] else "unacked"


def _sums(pile: list[int]) -> Sums:
    return Sums(records=pile[0], size_bytes=pile[1], checksum=pile[2] % CHECKSUM_END)
