from __future__ import annotations

from pathlib import Path

from penstock.cli.demo.producer import JournalReader, JournalWriter, Sums, read_journal

RECORDS = [b"record %d" % number for number in range(6)]


def offer_and_ack(path: Path, first: int, records: list[bytes], *, ack: bool = True) -> None:
    writer = JournalWriter(path)
    writer.offer(first, len(records))
    if ack:
        writer.ack(first, Sums.of(records))
    writer.close()


def test_a_journal_tells_what_was_offered_and_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    offer_and_ack(path, 0, RECORDS[:2])
    offer_and_ack(path, 2, RECORDS[2:4])
    offer_and_ack(path, 4, RECORDS[4:], ack=False)
    journal = read_journal(path)
    assert journal.offered_end == 6
    assert journal.intervals == ((0, 4),)
    assert journal.acked == Sums.of(RECORDS[:4])


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
