from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sinks.topic import check_topic_columns, chunk_key, chunks
from penstock.spark.sinks.topic_options import TopicSinkOptions
from penstock.topics.config import Durability
from penstock.topics.limits import BATCH_RECORDS_MAX, KEY_BYTES_MAX


def rows(count: int, size: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"data": pa.array([f'"{"x" * size}"'] * count)})


def test_chunks_are_bounded_and_the_same_every_time() -> None:
    parts = [len(chunk) for chunk in chunks([rows(7, 8), rows(7, 8)], bytes_max=50)]
    assert parts == [5, 5, 4]
    assert parts == [len(chunk) for chunk in chunks([rows(14, 8)], bytes_max=50)], "however Spark cuts them"
    assert [len(chunk) for chunk in chunks([rows(3, 100)], bytes_max=50)] == [1, 1, 1]
    assert [len(chunk) for chunk in chunks([rows(BATCH_RECORDS_MAX + 1)])] == [BATCH_RECORDS_MAX, 1]
    assert list(chunks([rows(0)])) == []


def test_a_record_has_every_column_of_its_row() -> None:
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
    ("schema", "expected"),
    [
        ("data string, user string", "not 'user'"),
        ("data binary", "'data' is binary, and must be string"),
        ("tag string", "the rows do not have"),
    ],
)
def test_rows_that_do_not_fit_are_refused(schema: str, expected: str) -> None:
    columns = StructType()
    for column in schema.split(", "):
        columns = columns.add(*column.split())
    with pytest.raises(ConfigError, match=expected):
        check_topic_columns(columns)


def test_a_key_differs_by_step_and_contents_and_fits() -> None:
    key = chunk_key("q:1:0:0", b"body")
    assert key.startswith("spark:q:1:0:0:")
    assert key == chunk_key("q:1:0:0", b"body")
    assert len({key, chunk_key("q:1:0:1", b"body"), chunk_key("q:1:0:0", b"other")}) == 3
    odd = chunk_key("ü\n" * 200 + ":1:0:0", b"body")
    assert len(odd.encode()) <= KEY_BYTES_MAX
    assert odd.isascii()
    assert odd.isprintable()


def test_the_options_of_writing_are_read() -> None:
    options = TopicSinkOptions.parse({"topic": "t", "url": "http://h:1", "checkpointLocation": "/c"})
    assert (options.topic, options.create, options.config, options.transaction) == ("t", False, None, None)
    made = TopicSinkOptions.parse(
        {"path": "t", "create": "true", "durability": "disk", "idempotencyWindow": "1d"}
    )
    assert made.config is not None
    assert (made.config.durability, made.config.idempotency_window_ms) == (Durability.DISK, 86_400_000)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "give the topic once"),
        ({"create": "yes", "topic": "t"}, "create: expected true or false"),
        ({"topic": "t", "durability": "disk"}, "set create=true"),
        ({"topic": "t", "create": "true", "durability": "tape"}, "durability: expected ephemeral"),
        ({"topic": "t", "txnAppId": "a"}, "txnVersion"),
        ({"topic": "t", "key": "x"}, "apiKey|unknown"),
    ],
)
def test_wrong_options_of_writing_are_refused(given: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TopicSinkOptions.parse(given)
