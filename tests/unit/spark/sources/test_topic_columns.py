from __future__ import annotations

import msgspec

from penstock.spark.sources.topic_columns import TOPIC_COLUMNS, build_gap, build_records, empty_batch
from penstock.topics.model import Record

RECORDS = msgspec.json.decode(
    '[{"$seq":7,"$ts":1748450001001,"data":{"é":[1, 2]}},'
    '{"$seq":9,"$ts":1748450001002,"$node":"n","$tag":"t","data":null,"meta":{"m":1}}]'.encode(),
    type=list[Record],
)


def test_records_become_columns_and_json_stays_as_it_was_written() -> None:
    rows = build_records("clicks", RECORDS, tuple(TOPIC_COLUMNS)).to_pylist()
    assert [(row["topic"], row["seq"], row["node"], row["tag"]) for row in rows] == [
        ("clicks", 7, None, None),
        ("clicks", 9, "n", "t"),
    ]
    assert [(row["data"], row["meta"]) for row in rows] == [('{"é":[1, 2]}', None), ("null", '{"m":1}')]
    assert rows[0]["ts"].timestamp() == 1748450001.001


def test_only_the_requested_columns_are_built() -> None:
    assert build_records("clicks", RECORDS, ("seq",)).to_pylist() == [{"seq": 7}, {"seq": 9}]
    assert empty_batch(("seq", "data")).num_rows == 0


def test_a_gap_is_a_row_whose_data_is_null() -> None:
    (row,) = build_gap("clicks", 3, 8, "cap", tuple(TOPIC_COLUMNS)).to_pylist()
    assert row == {
        "topic": "clicks",
        "seq": 3,
        "ts": None,
        "node": None,
        "tag": None,
        "data": None,
        "meta": '{"gap":{"first":3,"last":8,"reason":"cap"}}',
    }
