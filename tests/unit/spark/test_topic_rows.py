from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sinks.topic import check_topic_columns, chunk_key, chunks
from penstock.spark.sinks.topic_options import TopicSinkOptions
from penstock.spark.sources.topic_columns import TOPIC_COLUMNS, build_gap, build_records, empty_batch
from penstock.spark.sources.topic_options import TopicOptions
from penstock.topics.config import Durability
from penstock.topics.errors import InvalidRequest
from penstock.topics.limits import BATCH_RECORDS_MAX, KEY_BYTES_MAX
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


def test_only_the_columns_asked_for_are_built() -> None:
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


def rows(count: int, size: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"data": pa.array([f'"{"x" * size}"'] * count)})


def test_chunks_are_bounded_and_the_same_every_time() -> None:
    parts = [len(chunk) for chunk in chunks([rows(7, 8), rows(7, 8)], bytes_max=50)]
    assert parts == [5, 5, 4]
    assert parts == [len(chunk) for chunk in chunks([rows(14, 8)], bytes_max=50)], "however Spark cuts them"
    assert [len(chunk) for chunk in chunks([rows(3, 100)], bytes_max=50)] == [1, 1, 1]
    assert [len(chunk) for chunk in chunks([rows(BATCH_RECORDS_MAX + 1)])] == [BATCH_RECORDS_MAX, 1]
    assert list(chunks([rows(0)])) == []


def test_all_that_a_row_says_goes_into_the_record() -> None:
    batch = pa.record_batch(
        {"meta": ['{"m":1}', None], "data": ["1", "2"], "tag": ["t", None], "node": [None, "n"]}
    )
    ((first, second),) = chunks([batch])
    assert (bytes(first.data), first.tag, first.node) == (b"1", "t", None)
    assert first.meta is not None
    assert bytes(first.meta) == b'{"m":1}'
    assert (bytes(second.data), second.tag, second.node, second.meta) == (b"2", None, "n", None)


def test_a_row_without_data_is_refused() -> None:
    with pytest.raises(InvalidInput, match="data is null in 1 rows"):
        list(chunks([pa.record_batch({"data": pa.array(["1", None])})]))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("data string, user string", "no place for 'user'"),
        ("data binary", "'data' is binary, and must be string"),
        ("tag string", "the rows have none"),
    ],
)
def test_rows_that_do_not_fit_are_refused(schema: str, told: str) -> None:
    columns = StructType()
    for column in schema.split(", "):
        columns = columns.add(*column.split())
    with pytest.raises(ConfigError, match=told):
        check_topic_columns(columns)


def test_a_key_tells_steps_and_contents_apart_and_fits() -> None:
    key = chunk_key("q:1:0:0", b"body")
    assert key.startswith("spark:q:1:0:0:")
    assert key == chunk_key("q:1:0:0", b"body")
    assert len({key, chunk_key("q:1:0:1", b"body"), chunk_key("q:1:0:0", b"other")}) == 3
    odd = chunk_key("ü\n" * 200 + ":1:0:0", b"body")
    assert len(odd.encode()) <= KEY_BYTES_MAX
    assert odd.isascii()
    assert odd.isprintable()


def test_options_are_read_with_any_case_and_the_key_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOPICS_URL", raising=False)
    monkeypatch.setenv("TOPICS_API_KEY", "s3cret")
    options = TopicOptions.parse(
        {
            "TOPIC": "b, a",
            "columns": "seq,data,meta",
            "startingoffsets": '{"a": 3, "b": "latest"}',
            "max_records_per_trigger": "10",
            "onGap": "record",
            "partitions": "3",
        }
    )
    assert options.topics == ("a", "b")
    assert options.columns == ("seq", "data", "meta")
    assert (options.starting, options.ending) == ({"a": 3, "b": "latest"}, "latest")
    assert (options.records_per_trigger, options.on_gap, options.tasks) == (10, "record", 3)
    assert (options.address.url, options.address.key) == ("http://127.0.0.1:4000", "s3cret")
    assert "s3cret" not in repr(options)
    assert TopicOptions.parse({"path": "a", "apiKey": "own"}).address.key == "own"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "give the topic once"),
        ({"topic": "a", "path": "a"}, "give the topic once"),
        ({"topic": " , "}, "topic: expected a name"),
        ({"topic": "a,a"}, "names a topic twice"),
        ({"topic": "a", "startOffsets": "1"}, "startingOffsets"),
        ({"topic": "a", "onGap": "ignore"}, "onGap: expected fail, skip, record"),
        ({"topic": "a", "onGap": "record", "columns": "seq"}, "add data, meta"),
        ({"topic": "a", "columns": "sequence"}, "seq"),
        ({"topic": "a", "columns": "seq,seq"}, "twice"),
        ({"topic": "a", "columns": ","}, "found nothing"),
        ({"topic": "a", "partitions": "0"}, "partitions: expected"),
        ({"topic": "a", "maxRecordsPerTrigger": "many"}, "maxRecordsPerTrigger: expected"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TopicOptions.parse(given)
    with pytest.raises(InvalidRequest):
        TopicOptions.parse({"topic": "no spaces"})


def test_the_options_of_writing_are_read() -> None:
    options = TopicSinkOptions.parse({"topic": "t", "url": "http://h:1", "checkpointLocation": "/c"})
    assert (options.topic, options.create, options.config, options.transaction) == ("t", False, None, None)
    made = TopicSinkOptions.parse(
        {"path": "t", "create": "true", "durability": "disk", "idempotencyWindow": "1d"}
    )
    assert made.config is not None
    assert (made.config.durability, made.config.idempotency_window_ms) == (Durability.DISK, 86_400_000)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "give the topic once"),
        ({"create": "yes", "topic": "t"}, "create: expected true or false"),
        ({"topic": "t", "durability": "disk"}, "set create=true"),
        ({"topic": "t", "create": "true", "durability": "tape"}, "durability: expected ephemeral"),
        ({"topic": "t", "txnAppId": "a"}, "txnVersion"),
        ({"topic": "t", "key": "x"}, "apiKey|unknown"),
    ],
)
def test_wrong_options_of_writing_are_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TopicSinkOptions.parse(given)
