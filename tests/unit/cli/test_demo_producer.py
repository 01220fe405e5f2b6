"""The demo's click stream, and the journal of offered and acknowledged records."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa

from penstock.cli.demo.producer import (
    BAD_AT,
    BAD_EVERY,
    COLUMNS,
    DAYS,
    JournalReader,
    JournalWriter,
    Sums,
    event,
    is_bad,
    read_journal,
    rebuild,
)

END = 3 * BAD_EVERY
SINCE_MS = 1_700_006_400_000


def decoded() -> list[dict[str, object]]:
    return [json.loads(event(1, number, END, SINCE_MS)) for number in range(END) if not is_bad(number)]


def test_events_are_spread_over_the_days() -> None:
    days = {str(click["at"])[:10] for click in decoded()}
    assert len(days) == DAYS


def test_one_event_in_a_thousand_does_not_decode_for_varying_reasons() -> None:
    bad = [event(1, number, END, SINCE_MS) for number in range(BAD_AT, END, BAD_EVERY)]
    assert len({value[:30] for value in bad}) == 3
    for place, value in enumerate(bad):
        assert value.startswith(b'{"producer":1,"number":%d,' % (BAD_AT + place * BAD_EVERY))
    assert [value.endswith(b"}") for value in bad] == [False, True, True]
    assert json.loads(bad[1])["at"] == "half past nine"
    assert "user" not in json.loads(bad[2])


def test_the_bytes_of_an_event_follow_from_a_tables_row() -> None:
    clicks = [{**click, "at": datetime.datetime.fromisoformat(str(click["at"]))} for click in decoded()]
    rows = pa.Table.from_pylist(
        clicks,
        schema=pa.schema(
            [
                ("producer", pa.int32()),
                ("number", pa.int64()),
                ("user", pa.string()),
                ("url", pa.string()),
                ("at", pa.timestamp("us", "UTC")),
            ]
        ),
    )
    assert rows.column_names == list(COLUMNS)
    expected = [event(1, number, END, SINCE_MS) for number in range(END) if not is_bad(number)]
    assert rebuild(rows).to_pylist() == expected


RECORDS = [b"record %d" % number for number in range(6)]


def offer_and_ack(path: Path, first: int, records: list[bytes], *, ack: bool = True) -> None:
    writer = JournalWriter(path)
    writer.offer(first, len(records))
    if ack:
        writer.ack(first, Sums.of(records))
    writer.close()


def test_a_journal_has_the_offered_and_the_acknowledged_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    offer_and_ack(path, 0, RECORDS[:2])
    offer_and_ack(path, 2, RECORDS[2:4])
    offer_and_ack(path, 4, RECORDS[4:], ack=False)
    journal = read_journal(path)
    assert journal.offered_end == 6
    assert journal.intervals == ((0, 4),)
    assert journal.acked == Sums.of(RECORDS[:4])


def test_a_reader_returns_only_complete_lines_and_continues_after_them(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.read().offered_end == 0
    path.write_bytes(b"offer 0 5\nack 0 5 50 7\noffer 5 1")
    assert reader.read().offered_end == 5
    with path.open("ab") as file:
        file.write(b"0\nack 5 10 100 1\n")
    assert reader.read().offered_end == 15
    assert reader.read().acked == Sums(records=15, size_bytes=150, checksum=8)
