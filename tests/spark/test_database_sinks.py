"""Rows into the queues of the databases, with a real Spark: each point and each vector once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType
from tests.spark.conftest import Plant, finish
from tests.spark.database_queues import entries_in, points_in, queued
from tests.spark.test_buffer_sink import undo_last_commit

from penstock.config import Setting
from penstock.spark.audit import audit_pipeline
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.check import check_pipeline
from penstock.spark.pipeline.rows import rows_to_write
from penstock.spark.pipeline.spec import read_spec
from penstock.spark.sinks.databases import DatabaseStreamWriter, TimeSeriesFormat, VectorFormat
from penstock.vector.delta import TOMBSTONE
from penstock.vector.records import decode_record

MINUTE = "timestamp '2026-11-16 10:00:00 UTC' + make_interval(0, 0, 0, 0, 0, 0, n) AS timestamp"
POINTS = f"SELECT user, CAST(n AS double) AS value, {MINUTE} FROM clicks"
VECTORS = "SELECT CAST(n AS string) AS id, array(n, 1.5D, -n) AS vector, user, n % 2 = 1 AS gone FROM clicks"
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "penstock-timeseries": (POINTS, {"metric": "clicks"}),
    "penstock-vector": (VECTORS, {"delete": "gone", "dimensions": "3"}),
}


def clicks(*numbers: int) -> list[list[bytes]]:
    return [[json.dumps({"user": f"u{n % 3}", "n": n}).encode() for n in numbers]]


def assert_holds(plant: Plant, format_name: str, numbers: Sequence[int]) -> None:
    out = plant.root / "out"
    if format_name == "penstock-timeseries":
        assert points_in(out, "user") == sorted((f"u{n % 3}", float(n)) for n in numbers)
    else:
        assert entries_in(out) == sorted((str(n), n % 2 == 1) for n in numbers)


def stream(plant: Plant, format_name: str, sink: str | None = None) -> None:
    """Stream everything in the queue, through SQL, into the queue of a database."""
    sql, options = FORMATS[format_name]
    source = plant.stream(columns="value").load()
    decoded = source.selectExpr("from_json(CAST(value AS string), 'user string, n int') AS r").select("r.*")
    decoded.createOrReplaceTempView("clicks")
    query = (
        plant.spark.sql(sql)
        .writeStream.format(sink or format_name)
        .options(store=str(plant.root / "out"), **options)
        .option("checkpointLocation", str(plant.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_micro_batch_that_is_run_again_after_its_append_adds_nothing(
    plant: Plant, format_name: str
) -> None:
    plant.produce(clicks(*range(40)))
    stream(plant, format_name)
    assert_holds(plant, format_name, range(40))
    first = queued(plant.root / "out")

    assert undo_last_commit(plant) == 0
    stream(plant, format_name)
    assert queued(plant.root / "out") == first

    plant.produce(clicks(*range(40, 60)))
    stream(plant, format_name)
    assert_holds(plant, format_name, range(60))


@pytest.mark.long
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_commit_that_raised_after_it_was_applied_is_not_repeated(plant: Plant, format_name: str) -> None:
    plant.produce(clicks(*range(10)))
    sink = register_raising(plant, format_name)
    with pytest.raises(PySparkException, match="it was done"):
        stream(plant, format_name, sink)
    assert_holds(plant, format_name, range(10))
    stream(plant, format_name, sink)
    assert_holds(plant, format_name, range(10))


def register_raising(plant: Plant, format_name: str) -> str:
    """Register a sink whose first commit appends but then fails. Return its name."""
    marker = str(plant.root / "raised")
    sink = f"raising-{format_name}"

    def raise_once() -> None:
        if not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("it was done")

    class RaisingWriter(DatabaseStreamWriter):
        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
            DatabaseStreamWriter.commit(self, messages, batchId)
            raise_once()

    class RaisingTimeSeriesFormat(TimeSeriesFormat):
        @classmethod
        def name(cls) -> str:
            return sink

        def streamWriter(self, schema: StructType, overwrite: bool) -> DatabaseStreamWriter:
            return RaisingWriter(self._queue, self._encoding(schema))

    class RaisingVectorFormat(VectorFormat):
        @classmethod
        def name(cls) -> str:
            return sink

        def streamWriter(self, schema: StructType, overwrite: bool) -> DatabaseStreamWriter:
            return RaisingWriter(self._queue, self._encoding(schema))

    series = format_name == "penstock-timeseries"
    plant.spark.dataSource.register(RaisingTimeSeriesFormat if series else RaisingVectorFormat)
    return sink


def write_vectors(plant: Plant, frame: DataFrame) -> None:
    frame.write.format("penstock-vector").mode("append").save(str(plant.root / "out"))


def test_an_id_in_rows_of_two_tasks_is_refused_and_nothing_is_appended(plant: Plant) -> None:
    rows = plant.spark.range(0, 4, numPartitions=2).selectExpr(
        "CAST(id % 2 AS string) AS id", "array(1D, 2D) AS vector"
    )
    with pytest.raises(PySparkException, match="2 rows repeat the id of another row"):
        write_vectors(plant, rows)
    assert queued(plant.root / "out") == []
    write_vectors(plant, rows.dropDuplicates(["id"]))
    assert entries_in(plant.root / "out") == [("0", False), ("1", False)]


def test_a_queue_with_shards_is_refused(plant: Plant) -> None:
    plant.produce_sharded([[b"seed"]], shards=2)
    rows = plant.spark.sql("SELECT 'a' AS id, array(1D) AS vector")
    with pytest.raises(PySparkException, match="reads only from a queue without shards"):
        rows.write.format("penstock-vector").mode("append").save(plant.store)


def test_rows_that_the_database_would_refuse_fail_the_write_with_a_sentence(plant: Plant) -> None:
    rows = plant.spark.sql("SELECT CAST(NULL AS double) AS value, current_timestamp() AS timestamp")
    writer = rows.write.format("penstock-timeseries").option("metric", "m").mode("append")
    with pytest.raises(PySparkException, match="value is null in 1 rows"):
        writer.save(str(plant.root / "out"))
    with pytest.raises(PySparkException, match="only appends"):
        rows.write.format("penstock-timeseries").option("metric", "m").mode("overwrite").save("x")


def test_rows_without_a_value_or_a_time_are_left_out_and_nan_is_a_value(plant: Plant) -> None:
    sink = read_spec(settings(plant), base=plant.root).outputs["points"]
    rows = plant.spark.sql(
        "SELECT * FROM VALUES (double('NaN'), current_date()), (NULL, current_date()), (1D, NULL) "
        "AS rows(value, timestamp)"
    )
    assert rows_to_write(sink, rows).count() == 1


def settings(plant: Plant) -> dict[str, Setting]:
    return {
        "name": "clicks",
        "source": {"buffer": {"store": plant.store}},
        "decode": {"format": "json", "schema": "user string, n int, doc string"},
        "dead_letter": {"parquet": {"path": "letters"}},
        "sinks": {
            "points": {
                "timeseries": {"store": "points", "metric": "clicks", "labels": ["user"], "on_null": "drop"},
                "transform": "SELECT user, n AS value, _ingestion_time AS timestamp FROM input",
            },
            "docs": {
                "vector": {"store": "docs", "dimensions": 2, "order_by": ["_sequence", "_index"]},
                "transform": "SELECT doc AS id, array(float(n), 0F) AS vector, user, _sequence, _index "
                "FROM input WHERE n IS NOT NULL",
            },
        },
    }


def test_a_pipeline_into_both_databases_is_checked_counted_and_balanced(plant: Plant) -> None:
    given = [(1, "a"), (2, "b"), (None, "c"), (3, "a")]
    good = [json.dumps({"user": "u0", "n": n, "doc": doc}).encode() for n, doc in given]
    plant.produce([good, [b"{bad", good[3]]])
    spec = read_spec(settings(plant), base=plant.root)

    findings = list(check_pipeline(spec, lambda: plant.spark, own_java=False))
    assert [finding.text for finding in findings if finding.status != "ok"] == []

    assert Pipeline(spec).start(plant.spark, once=True).wait(200)
    assert points_in(plant.root / "points", "user") == [("u0", 1.0), ("u0", 2.0), ("u0", 3.0), ("u0", 3.0)]
    made = [entry for one in queued(plant.root / "docs") for entry in decode_record(*one)]
    kept = {name: entry.vector.tolist() for name, entry in made if entry is not TOMBSTONE}
    assert (len(made), kept) == (2, {"a": [3.0, 0.0], "b": [2.0, 0.0]}), "the last row of each id, once"
    assert [dict(entry.attributes) for _, entry in made if entry is not TOMBSTONE] == [{"user": "u0"}] * 2

    report = audit_pipeline(spec)
    assert report.balanced
    totals = [(one.name, one.produced, one.delivered, one.dead, one.dropped) for one in report.balance.sinks]
    assert totals == [("points", 6, 4, 1, 1), ("docs", 6, 2, 1, 3)]
    notes = [f"{finding.subject}: {finding.text}" for finding in report.balance.findings]
    assert "sink points: 1 rows were dropped by the settings of the sink" in notes
    assert "sink docs: 2 rows were dropped by the settings of the sink" in notes
