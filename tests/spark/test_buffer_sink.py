"""Writing to a queue with a real Spark: each record once, whatever happens to tasks and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType
from tests import servers
from tests.spark.conftest import MANIFEST, Plant, finish, records

from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import EntryIndex
from penstock.buffer.sharded import shard_of
from penstock.buffer.transactions import find_tag
from penstock.objects import LocalStore
from penstock.spark.sinks.buffer import BufferFormat, BufferStreamWriter, Uploaded

OUT = "out/manifest"


def options(plant: Plant, **more: str) -> dict[str, str]:
    return {"store": plant.store, "manifest_path": OUT, "data_path_prefix": "out"} | more


def queue(plant: Plant, manifest: str = OUT) -> EntryIndex:
    return asyncio.run(QueueReader(LocalStore(plant.store), manifest).index())


def entries(plant: Plant) -> list[tuple[int, tuple[str, int] | None]]:
    index = queue(plant)
    found = [index[n] for n in range(len(index))]
    tags = [find_tag(entry.tail) for entry in found]
    return [
        (entry.sequence, None if tag is None else (tag.app, tag.version))
        for entry, tag in zip(found, tags, strict=True)
    ]


def written(plant: Plant, **more: str) -> DataFrame:
    return plant.spark.read.format("penstock-buffer").options(**options(plant, **more)).load()


def values(plant: Plant, **more: str) -> list[bytes]:
    return sorted(bytes(row[0]) for row in written(plant, columns="value", **more).collect())


def rows(spark: SparkSession, *values: str) -> DataFrame:
    return spark.createDataFrame([(value,) for value in values], "value string").coalesce(1)


def write(frame: DataFrame, plant: Plant, **more: str) -> None:
    frame.write.format("penstock-buffer").options(**options(plant, **more)).mode("append").save()


def copy_queue(plant: Plant, sink: str = "penstock-buffer") -> StreamingQuery:
    """Run a stream from the queue `ingest` into the queue `out`, until it has everything."""
    query = (
        plant.stream(columns="value,metadata")
        .load()
        .writeStream.format(sink)
        .options(**options(plant))
        .option("checkpointLocation", str(plant.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    return finish(query)


def undo_last_commit(plant: Plant) -> int:
    """Restore the state of a driver that died between the sink's commit and the commit log."""
    last = max(int(path.name) for path in (plant.checkpoint / "commits").iterdir() if path.name.isdigit())
    for path in (plant.checkpoint / "commits").glob(f"*{last}*"):
        path.unlink()
    return last


def test_a_stream_writes_every_record_once_and_a_repeated_micro_batch_does_nothing(plant: Plant) -> None:
    sent = plant.produce(records(3, 50))
    query = copy_queue(plant)
    assert values(plant) == sorted(sent)
    first = entries(plant)
    assert {tag for _, tag in first} == {(query.id, 0)}

    assert undo_last_commit(plant) == 0
    copy_queue(plant)
    assert entries(plant) == first, "the micro-batch was run again and appended nothing"

    sent += plant.produce(records(2, 10, "later"))
    copy_queue(plant)
    assert values(plant) == sorted(sent)
    assert {tag for _, tag in entries(plant)} == {(query.id, 0), (query.id, 1)}


def register_raising(plant: Plant, where: str) -> str:
    """Register a sink that does its work but fails once, in `write` or in `commit`. Return its name."""
    marker = str(plant.root / "raised")
    sink = f"raising-{where}"

    def raise_once(here: str) -> None:
        if here == where and not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("it was done")

    class RaisingWriter(BufferStreamWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
            uploaded = BufferStreamWriter.write(self, iterator)
            raise_once("write")
            return uploaded

        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
            BufferStreamWriter.commit(self, messages, batchId)
            raise_once("commit")

    class RaisingSink(BufferFormat):
        @classmethod
        def name(cls) -> str:
            return sink

        def streamWriter(self, schema: StructType, overwrite: bool) -> BufferStreamWriter:
            return RaisingWriter(self._sink(schema, overwrite))

    plant.spark.dataSource.register(RaisingSink)
    return sink


def test_a_commit_that_raised_after_it_was_applied_is_not_repeated(plant: Plant) -> None:
    sent = plant.produce(records(2, 20))
    sink = register_raising(plant, "commit")
    with pytest.raises(PySparkException, match="it was done"):
        copy_queue(plant, sink)
    landed = entries(plant)
    assert values(plant) == sorted(sent), "abort deletes nothing"
    copy_queue(plant, sink)
    assert entries(plant) == landed
    assert values(plant) == sorted(sent)


def test_objects_of_a_failed_task_are_not_in_the_queue(plant: Plant) -> None:
    sent = plant.produce(records(2, 20))
    sink = register_raising(plant, "write")
    with pytest.raises(PySparkException, match="it was done"):
        copy_queue(plant, sink)
    assert len(queue(plant)) == 0
    copy_queue(plant, sink)
    assert values(plant) == sorted(sent)
    objects = list((Path(plant.store) / "out").glob("*.batch"))
    assert len(objects) > len(queue(plant)), "what the failed task stored is left to the collector"


def test_a_checkpoint_that_was_set_back_is_refused(plant: Plant) -> None:
    app = {"txnAppId": "job"}
    write(rows(plant.spark, "a"), plant, txnVersion="4", **app)
    write(rows(plant.spark, "again"), plant, txnVersion="4", **app)
    with pytest.raises(PySparkException, match="has committed version 4"):
        write(rows(plant.spark, "earlier"), plant, txnVersion="3", **app)
    write(rows(plant.spark, "b"), plant, txnVersion="5", **app)
    assert values(plant) == [b"a", b"b"]
    assert entries(plant) == [(0, ("job", 4)), (1, ("job", 5))]


def test_a_batch_write_without_a_transaction_appends_each_time(plant: Plant) -> None:
    write(rows(plant.spark, "a"), plant)
    write(rows(plant.spark, "a"), plant)
    assert values(plant) == [b"a", b"a"]
    assert entries(plant) == [(0, None), (1, None)]


def test_all_partitions_go_in_with_one_write_in_their_order(plant: Plant) -> None:
    frame = plant.spark.range(0, 1000, numPartitions=2).selectExpr("cast(id as string) AS value")
    write(frame, plant, txnAppId="job", txnVersion="0", batch_bytes="2KiB", compression="zstd")
    found = [
        int(bytes(row[0])) for row in written(plant).orderBy("sequence", "index").select("value").collect()
    ]
    assert found == list(range(1000))
    index = queue(plant)
    assert len(index) > 4, "a task stores several objects when its rows are more than one holds"
    assert index.footer.next_sequence == len(index)
    assert all((Path(plant.store) / index[n].location).read_bytes()[-7] == 1 for n in range(len(index)))


def test_neighbours_with_equal_metadata_share_an_item(plant: Plant) -> None:
    given = [("a", b"x"), ("b", b"x"), ("c", b"y"), ("d", None), ("e", b""), ("f", b"x")]
    frame = plant.spark.createDataFrame(given, "value string, metadata binary").coalesce(1)
    write(frame, plant)
    (entry,) = [queue(plant)[n] for n in range(len(queue(plant)))]
    assert [(meta.start_index, meta.payload) for meta in entry.metadata] == [
        (0, b"x"),
        (2, b"y"),
        (3, b""),
        (5, b"x"),
    ]
    back = written(plant, columns="value,metadata").collect()
    assert {bytes(row[0]): bytes(row[1]) for row in back} == {
        value.encode(): metadata or b"" for value, metadata in given
    }


def test_an_application_has_one_shard_of_a_sharded_queue(plant: Plant) -> None:
    plant.produce_sharded([[b"seed"]], shards=4)
    where = {"store": plant.store}
    for version in range(3):
        frame = rows(plant.spark, f"v{version}")
        frame.write.format("penstock-buffer").options(**where, txnAppId="job", txnVersion=str(version)).mode(
            "append"
        ).save()
    shard = shard_of(b"job", 4)
    index = queue(plant, f"{MANIFEST}.shards/{shard:04d}")
    tags = [find_tag(index[n].tail) for n in range(len(index))]
    assert [tag.version for tag in tags if tag is not None] == [0, 1, 2]
    assert all(index[n].location.startswith(f"ingest.shards/{shard:04d}/") for n in range(len(index)))
    got = sorted(bytes(row[0]) for row in plant.read(columns="value").collect())
    assert got == [b"seed", b"v0", b"v1", b"v2"]


def test_an_empty_micro_batch_writes_nothing(plant: Plant) -> None:
    write(rows(plant.spark, "a").where("value = 'b'"), plant, txnAppId="job", txnVersion="0")
    assert not (Path(plant.store) / "out").exists()


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        pytest.param("value string, user string", "not 'user'", id="another-column"),
        pytest.param("value int", "is int, and must be binary or string", id="another-type"),
        pytest.param("metadata binary", "the rows do not have", id="no-value"),
    ],
)
def test_columns_that_a_queue_cannot_store_are_refused(plant: Plant, schema: str, complaint: str) -> None:
    frame = plant.spark.createDataFrame([], schema)
    with pytest.raises(PySparkException, match=complaint):
        write(frame, plant)


def test_a_null_value_fails_the_write_and_says_what_to_do(plant: Plant) -> None:
    frame = plant.spark.createDataFrame([("a",), (None,)], "value string").coalesce(1)
    with pytest.raises(PySparkException, match="filter them out"):
        write(frame, plant)


def test_overwriting_a_queue_is_refused(plant: Plant) -> None:
    writer = rows(plant.spark, "a").write.format("penstock-buffer").options(**options(plant))
    with pytest.raises(PySparkException, match="only appends"):
        writer.mode("overwrite").save()


def test_a_write_to_a_real_s3_server_is_applied_once(spark: SparkSession, tmp_path: Path) -> None:
    with servers.seaweedfs(tmp_path / "seaweedfs") as server:
        server.make_bucket("spark")
        where = {"store": "s3://spark/queue"} | {f"store.{k}": v for k, v in server.options().items()}
        for version in ("0", "0", "1"):
            frame = rows(spark, f"v{version}")
            writer = frame.write.format("penstock-buffer").options(
                **where, txnAppId="job", txnVersion=version
            )
            writer.mode("append").save()
        found = spark.read.format("penstock-buffer").options(**where, columns="value").load().collect()
    assert sorted(bytes(row[0]) for row in found) == [b"v0", b"v1"]
