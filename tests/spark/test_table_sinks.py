"""Tables as sinks on a real Spark: every record once, for readers without Penstock."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType
from tests.spark.conftest import Plant, finish, records

from penstock.spark.tables import TableKind, TableSpec, open_table
from penstock.spark.tables.compact import compact
from penstock.spark.tables.format import (
    DeltaFormat,
    IcebergFormat,
    ParquetFormat,
    TableFormat,
    TableStreamWriter,
)

FORMATS: dict[TableKind, type[TableFormat]] = {
    "delta": DeltaFormat,
    "iceberg": IcebergFormat,
    "parquet": ParquetFormat,
}
EVERY_TYPE = """
    select cast(id as int) id, cast(id as long) l, cast(id as short) sh, cast(id as byte) b,
      cast(id as float) f, cast(id as double) d, id % 2 = 0 flag, 'text' s, cast('bytes' as binary) bin,
      date'2026-01-31' day, timestamp'2026-01-31 12:00:00.123456' at,
      timestamp_ntz'2026-01-31 12:00:00.5' local, cast(1.5 as decimal(10, 2)) price, array(1, null) list,
      struct(1 as x, 'y' as y) point, map('k', 1) pairs,
      if(id % 3 = 0, null, concat('k', id % 3)) k, cast(null as string) nothing
    from range(6)
"""


@pytest.fixture(params=sorted(FORMATS))
def spec(request: pytest.FixtureRequest, plant: Plant) -> TableSpec:
    """A table of each kind, partitioned by a column with nulls."""
    kind: TableKind = request.param
    plant.spark.dataSource.register(FORMATS[kind])
    if kind != "iceberg":
        return TableSpec(kind=kind, path=str(plant.root / "table"), partition_by=("k",))
    (plant.root / "warehouse").mkdir()
    options = {
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{plant.root}/catalog.db",
        "catalog.warehouse": f"file://{plant.root}/warehouse",
    }
    return TableSpec(kind=kind, table="db.events", partition_by=("k",), options=options)


def read(spec: TableSpec) -> pa.Table:
    """Return the table as the library of its format reads it."""
    if spec.kind == "delta":
        return DeltaTable(spec.path).to_pyarrow_table()
    if spec.kind == "iceberg":
        return load_catalog("default", **spec.catalog_options).load_table(spec.table).scan().to_arrow()
    return ds.dataset(spec.path, format="parquet", partitioning="hive").to_table()


def save(frame: DataFrame, spec: TableSpec, version: int | None = None) -> None:
    writer = frame.write.format(spec.format).mode("append").options(**spec.to_options())
    if version is not None:
        writer = writer.option("txnAppId", "job").option("txnVersion", str(version))
    writer.save()


def start(
    plant: Plant,
    spec: TableSpec,
    *,
    shape: Callable[[DataFrame], DataFrame] = lambda frame: frame,
    name: str | None = None,
) -> StreamingQuery:
    """Start a stream from the queue into the table, two batches at a time, until the queue is empty."""
    frame = plant.stream(maxBatchesPerTrigger="2", partitions="2").load()
    shaped = shape(frame.selectExpr("cast(value as string) v", "concat('k', index % 2) k"))
    return (
        shaped.writeStream.format(name or spec.format)
        .options(**spec.to_options())
        .option("checkpointLocation", str(plant.checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def forget_last_commit(checkpoint: Path) -> None:
    """Restore the state of a driver that died between the sink's commit and Spark's."""
    last = max(
        (checkpoint / "commits").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1
    )
    last.unlink()
    (checkpoint / "commits" / f".{last.name}.crc").unlink(missing_ok=True)


def values(spec: TableSpec) -> Counter[str]:
    return Counter(read(spec)["v"].to_pylist())


def expected(produced: Sequence[bytes]) -> Counter[str]:
    return Counter(record.decode() for record in produced)


def test_every_type_comes_back_from_a_plain_reader(spark: SparkSession, spec: TableSpec) -> None:
    save(spark.sql(EVERY_TYPE), spec)
    row = next(row for row in read(spec).to_pylist() if row["id"] == 4)
    assert row == {
        "id": 4, "l": 4, "sh": 4, "b": 4, "f": 4.0, "d": 4.0, "flag": True, "s": "text", "bin": b"bytes",
        "day": dt.date(2026, 1, 31),
        "at": dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC),
        "local": dt.datetime.fromisoformat("2026-01-31T12:00:00.500000"),
        "price": Decimal("1.50"), "list": [1, None], "point": {"x": 1, "y": "y"}, "pairs": [("k", 1)],
        "k": "k1", "nothing": None,
    }  # fmt: skip
    assert Counter(read(spec)["k"].to_pylist()) == {None: 2, "k1": 2, "k2": 2}
    if spec.kind == "parquet":
        files = f"{spec.path}/**/*.parquet"
        assert duckdb.sql(f"select count(*), count(distinct l) from read_parquet('{files}')").fetchall() == [
            (6, 6)
        ]
        assert spark.read.parquet(spec.path).count() == 6


def test_a_stream_delivers_once_even_if_its_last_micro_batch_is_run_again(
    plant: Plant, spec: TableSpec
) -> None:
    produced = plant.produce(records(5, 10))
    query = finish(start(plant, spec))
    forget_last_commit(plant.checkpoint)
    finish(start(plant, spec))
    assert values(spec) == expected(produced)
    table = open_table(spec)
    assert table.rows_by_version(str(query.id)) == {0: 20, 1: 20, 2: 10}
    assert (table.last_version(str(query.id)), table.row_count()) == (2, 50)


def test_a_task_that_fails_leaves_nothing_that_readers_see(plant: Plant, spec: TableSpec) -> None:
    produced = plant.produce(records(2, 10))
    healed = str(plant.root / "healed")

    def fragile(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        for batch in batches:
            yield batch
            if "r-1-9" in batch.column("v").to_pylist() and not os.path.exists(healed):
                raise RuntimeError("worn out")

    def shape(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(fragile, frame.schema)

    with pytest.raises(PySparkException, match="worn out"):
        finish(start(plant, spec, shape=shape))
    Path(healed).touch()
    finish(start(plant, spec, shape=shape))
    assert values(spec) == expected(produced)


def test_a_commit_that_raises_after_it_was_applied_is_not_repeated(plant: Plant, spec: TableSpec) -> None:
    produced = plant.produce(records(2, 10))
    raised = str(plant.root / "raised")

    class ClumsyWriter(TableStreamWriter):
        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
            import os

            TableStreamWriter.commit(self, messages, batchId)
            if not os.path.exists(raised):
                open(raised, "w").close()
                raise RuntimeError("after the commit")

    class Clumsy(FORMATS[spec.kind]):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "clumsy"

        def streamWriter(self, schema: StructType, overwrite: bool) -> TableStreamWriter:
            return ClumsyWriter(self._spec, self._layout(schema, overwrite))

    plant.spark.dataSource.register(Clumsy)
    with pytest.raises(PySparkException, match="after the commit"):
        finish(start(plant, spec, name="clumsy"))
    assert values(spec) == expected(produced)
    finish(start(plant, spec, name="clumsy"))
    assert values(spec) == expected(produced)


def test_readers_never_see_half_or_double_rows_while_the_stream_runs(plant: Plant, spec: TableSpec) -> None:
    produced = plant.produce(records(8, 20))
    finish(start(plant, spec))
    produced += plant.produce(records(8, 20, prefix="s"))
    query, seen = start(plant, spec), []
    while query.isActive:
        seen.append(values(spec))
    finish(query)
    assert values(spec) == expected(produced)
    assert all(set(found.values()) == {1} and 160 <= found.total() <= 320 for found in seen)
    if spec.kind != "parquet":  # there, a micro-batch appears file by file
        assert {found.total() % 40 for found in seen} == {0}


def test_batch_writes_are_once_by_their_transaction_and_always_without_one(
    spark: SparkSession, spec: TableSpec
) -> None:
    frame = spark.sql("select 'v' v, 'a' k")
    save(frame, spec, version=3)
    save(frame, spec, version=3)
    assert values(spec) == {"v": 1}
    with pytest.raises(PySparkException, match="already has micro-batch 3 of job, and this one is 2"):
        save(frame, spec, version=2)
    save(frame, spec)
    save(frame, spec)
    assert values(spec) == {"v": 3}


def test_problems_are_reported_before_anything_is_written(spark: SparkSession, spec: TableSpec) -> None:
    save(spark.sql("select 'v' v, 'a' k"), spec)
    with pytest.raises(PySparkException, match=r"CAST\(v AS string\)"):
        save(spark.sql("select 1 v, 'a' k"), spec)
    with pytest.raises(PySparkException, match="did you mean 'partitionBy'"):
        spark.sql("select 1 v").write.format(spec.format).mode("append").option("partitonBy", "k").save()
    other = spark.sql("select 'w' v, 'a' k").write.format(spec.format).options(**spec.to_options())
    with pytest.raises(PySparkException, match="only appends"):
        other.mode("overwrite").save()
    assert values(spec) == {"v": 1}


def test_compaction_keeps_the_rows_and_the_versions(spark: SparkSession, spec: TableSpec) -> None:
    frame = spark.sql("select cast(id as string) v, concat('k', id % 2) k from range(10)")
    for version in range(5):
        save(frame, spec, version)
    if spec.kind == "parquet":
        with pytest.raises(Exception, match="use a Delta table"):
            compact(spark, spec)
        return
    before, told = values(spec), []
    report = compact(spark, spec, on_progress=told.append)
    assert (report.partitions, report.files_after, report.skipped) == (2, 2, ())
    assert report.files_before >= 10
    assert values(spec) == before
    assert len(told) == 2
    table = open_table(spec)
    assert (table.last_version("job"), table.row_count()) == (4, 50)
    save(frame, spec, 4)
    save(frame, spec, 5)
    assert table.row_count() == 60
