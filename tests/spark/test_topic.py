"""Topics of a real server in a real Spark: read as a table and as a stream, written, run again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from tests.process.topics_server import FSYNC, KEY, Server, serving
from tests.spark.conftest import finish

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, Unsupported
from penstock.ids import mint_ulid
from penstock.spark.session.failures import explain
from penstock.spark.sources.topic_offsets import TopicGap
from penstock.topics.client.sync import Client
from penstock.topics.config import TopicConfig


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("topics") / "data") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    return f"t-{mint_ulid(SYSTEM_CLOCK.now_ms(), random.Random())}"


def address(server: Server, topic: str) -> dict[str, str]:
    return {"url": server.url, "apiKey": KEY, "topic": topic}


def table(spark: SparkSession, server: Server, topic: str, **options: str) -> DataFrame:
    return spark.read.format("penstock-topic").options(**address(server, topic), **options).load()


def stream_to_delta(
    spark: SparkSession, server: Server, topic: str, root: Path, **options: str
) -> StreamingQuery:
    rows = spark.readStream.format("penstock-topic").options(**address(server, topic), **options).load()
    return finish(
        rows.selectExpr("seq", "data", "get_json_object(data, '$.user') AS user")
        .writeStream.format("penstock-delta")
        .option("checkpointLocation", str(root / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(root / "table"))
    )


def delta(root: Path) -> list[tuple[int, str]]:
    from deltalake import DeltaTable

    rows = DeltaTable(str(root / "table")).to_pyarrow_table().to_pylist()
    return sorted((row["seq"], row["user"]) for row in rows)


def forget_last_commit(root: Path) -> None:
    """Restore the state after a crash between the sink's commit and Spark's."""
    commits = [path for path in (root / "checkpoint" / "commits").iterdir() if path.name.isdigit()]
    max(commits, key=lambda path: int(path.name)).unlink()


def stored(client: Client, topic: str) -> list[object]:
    found: list[object] = []
    after = 0
    while True:
        page = client.diff(topic, after, limit=1000)
        found += [json.loads(bytes(record.data)) for record in page.records()]
        if page.caught_up:
            return found
        after = page.next_from_seq


def test_topics_are_a_table(spark: SparkSession, server: Server, client: Client, topic: str) -> None:
    client.write(topic, [{"user": "ada", "n": n} for n in range(2500)], tag="click")
    client.write(f"{topic}.b", [{"user": "grace", "n": 1}], config=FSYNC)
    both = table(spark, server, f"{topic},{topic}.b")
    assert both.count() == 2501
    assert KEY not in both._jdf.queryExecution().toString(), "the key is not part of what a plan shows"
    found = both.selectExpr("topic", "seq", "tag", "get_json_object(data, '$.user') AS user").where("seq = 1")
    assert sorted(map(tuple, found.collect())) == [
        (topic, 1, "click", "ada"),
        (f"{topic}.b", 1, None, "grace"),
    ]
    total = table(spark, server, topic).selectExpr("sum(get_json_object(data, '$.n'))").collect()[0][0]
    assert total == sum(range(2500))


def test_a_stream_brings_each_record_into_delta_once_even_if_a_batch_is_run_again(
    spark: SparkSession, server: Server, client: Client, topic: str, tmp_path: Path
) -> None:
    client.write(topic, [{"user": f"u{n}"} for n in range(2000)], config=FSYNC)
    query = stream_to_delta(spark, server, topic, tmp_path, maxRecordsPerTrigger="1500")
    assert [progress["numInputRows"] for progress in query.recentProgress] == [1500, 500]
    assert not [progress for progress in query.recentProgress if KEY in progress.json]
    client.write(topic, [{"user": f"u{n}"} for n in range(2000, 2600)])
    forget_last_commit(tmp_path)
    again = stream_to_delta(spark, server, topic, tmp_path)
    assert [(told["batchId"], told["numInputRows"]) for told in again.recentProgress] == [(1, 500), (2, 600)]
    assert delta(tmp_path) == sorted((n + 1, f"u{n}") for n in range(2600))


def test_a_gap_ends_a_stream_with_a_message_unless_it_is_recorded(
    spark: SparkSession, server: Server, client: Client, topic: str, tmp_path: Path
) -> None:
    client.write(topic, [{"user": "a"}] * 10, config=TopicConfig(cap_records=10))
    stream_to_delta(spark, server, topic, tmp_path)
    client.write(topic, [{"user": "b"}] * 30)
    with pytest.raises(Exception, match="records 11 to 30") as caught:
        stream_to_delta(spark, server, topic, tmp_path)
    assert isinstance(explain(caught.value), TopicGap)
    rows = (
        spark.readStream.format("penstock-topic")
        .options(**address(server, topic), onGap="record")
        .load()
        .selectExpr("seq", "coalesce(data, meta) AS data", "get_json_object(data, '$.user') AS user")
    )
    finish(
        rows.writeStream.format("penstock-delta")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "table"))
    )
    from deltalake import DeltaTable

    told = DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()
    gaps = [row["data"] for row in told if row["user"] is None]
    assert gaps == ['{"gap":{"first":11,"last":30,"reason":"cap"}}']
    assert len(told) == 10 + 10 + 1


def test_a_batch_write_is_applied_once_per_transaction(
    spark: SparkSession, server: Server, client: Client, topic: str
) -> None:
    rows = spark.range(0, 500, 1, 3).selectExpr("to_json(struct(id)) AS data", "concat('t', id % 2) AS tag")

    def write(version: int, **options: str) -> None:
        transaction = {"txnAppId": "nightly", "txnVersion": str(version)}
        given = address(server, topic) | transaction | options
        rows.write.format("penstock-topic").options(**given).mode("append").save()

    with pytest.raises(Exception, match="does not exist"):
        write(1)
    write(1, create="true", idempotencyWindow="1d")
    write(1, create="true", idempotencyWindow="1d")
    assert sorted(record["id"] for record in stored(client, topic)) == [*range(500)]  # type: ignore[index]
    assert client.state(topic).config.idempotency_window_ms == 86_400_000
    write(2)
    assert len(stored(client, topic)) == 1000


def test_a_stream_into_a_topic_does_not_write_a_batch_twice(
    spark: SparkSession, server: Server, client: Client, topic: str, tmp_path: Path
) -> None:
    source = f"{topic}.in"
    client.write(source, range(1200), config=FSYNC)
    client.put_topic(topic, FSYNC)

    def run() -> list[int]:
        query = finish(
            spark.readStream.format("penstock-topic")
            .options(**address(server, source))
            .load()
            .selectExpr("data", "topic AS node")
            .writeStream.format("penstock-topic")
            .options(**address(server, topic))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        return [progress["numInputRows"] for progress in query.recentProgress]

    assert run() == [1200]
    forget_last_commit(tmp_path)
    assert run() == [1200], "the same batch again"
    assert sorted(stored(client, topic)) == [*range(1200)]  # type: ignore[type-var]


def test_rows_that_are_not_json_and_modes_that_do_not_append_are_refused(
    spark: SparkSession, server: Server, client: Client, topic: str
) -> None:
    client.put_topic(topic, FSYNC)
    words = spark.createDataFrame([("plain text",)], "data string")
    for rows, mode, told, kind in (
        (words, "append", "is not JSON text", None),
        (words, "overwrite", "only appends", Unsupported),
        (words.selectExpr("data AS value"), "append", "not 'value'", ConfigError),
    ):
        with pytest.raises(Exception, match=told) as caught:
            rows.write.format("penstock-topic").options(**address(server, topic)).mode(mode).save()
        if kind is not None:
            assert isinstance(explain(caught.value), kind)
    assert stored(client, topic) == []
