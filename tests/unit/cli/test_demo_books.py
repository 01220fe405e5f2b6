from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from penstock.cli.demo_journal import JournalReader, JournalWriter, Sums, read_journal
from penstock.cli.demo_table import Table, contents, rows_stored
from penstock.cli.demo_worker import record


def offer_and_ack(path: Path, first: int, records: list[bytes], *, ack: bool = True) -> None:
    writer = JournalWriter(path)
    writer.offer(first, len(records))
    if ack:
        writer.ack(first, Sums.of(records))
    writer.close()


def test_a_journal_tells_what_was_offered_and_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = [record(0, number) for number in range(6)]
    offer_and_ack(path, 0, records[:2])
    offer_and_ack(path, 2, records[2:4])
    offer_and_ack(path, 4, records[4:], ack=False)
    journal = read_journal(path)
    assert journal.offered_end == 6
    assert journal.intervals == ((0, 4),)
    assert journal.acked == Sums.of(records[:4])


def test_a_reader_takes_only_finished_lines_and_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.read().offered_end == 0
    path.write_bytes(b"offer 0 5\nack 0 5 50 7\noffer 5 1")
    assert reader.read().offered_end == 5
    with path.open("ab") as file:
        file.write(b"0\nack 5 10 100 1\n")
    assert reader.read().offered_end == 15
    assert reader.read().acked == Sums(records=15, size_bytes=150, checksum=8)


def test_rows_and_position_are_stored_together_or_not_at_all(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.sqlite")
    table.store(4, [record(0, 0)])
    with pytest.raises(ValueError, match="not enough values"):
        table.store(5, [record(0, 1), b"no record of the demo"])
    assert table.position() == 4
    table.close()
    assert rows_stored(tmp_path / "rows.sqlite") == 1


def test_rows_are_told_apart_by_what_their_producer_was_told(tmp_path: Path) -> None:
    records = [record(0, number) for number in range(6)]
    offer_and_ack(tmp_path / "journal", 0, records[:3])
    offer_and_ack(tmp_path / "journal", 3, records[3:5], ack=False)
    table = Table(tmp_path / "rows.sqlite")
    table.store(0, records[:4])
    table.store(1, [records[0], records[5], record(7, 0)])
    table.close()
    found = contents(tmp_path / "rows.sqlite", {0: read_journal(tmp_path / "journal")})
    assert found.unacknowledged == Sums.of([records[3]])
    assert found.acknowledged == Sums.of([*records[:3], records[0]])
    assert found.unoffered == 2
    assert (found.rows, found.distinct) == (7, 6)


def test_a_table_that_does_not_exist_has_no_rows(tmp_path: Path) -> None:
    assert rows_stored(tmp_path / "none") == 0
    sqlite3.connect(tmp_path / "empty").close()
    assert rows_stored(tmp_path / "empty") == 0
