from __future__ import annotations

import datetime
import json

import pyarrow as pa

from penstock.cli.demo.producer import BAD_AT, BAD_EVERY, COLUMNS, DAYS, event, is_bad, rebuild

END = 3 * BAD_EVERY
SINCE_MS = 1_700_006_400_000


def decoded() -> list[dict[str, object]]:
    return [json.loads(event(1, number, END, SINCE_MS)) for number in range(END) if not is_bad(number)]


def test_events_are_spread_over_the_days() -> None:
    days = {str(click["at"])[:10] for click in decoded()}
    assert len(days) == DAYS


def test_of_a_thousand_events_one_does_not_decode_each_in_another_way() -> None:
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
