"""A pipeline whose queue and sinks are on a real S3 server; only the checkpoint is on a disk."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.dataset
import pytest
from deltalake import DeltaTable
from pyarrow.fs import S3FileSystem
from pyspark.sql import SparkSession
from tests import servers

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.config import Setting
from penstock.objects import StoreConfig
from penstock.spark.audit import audit_pipeline
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.spec import read_spec

BATCHES, EACH = 4, 25


def settings(server: servers.S3Server) -> dict[str, Setting]:
    options: dict[str, Setting] = dict(server.options())
    return {
        "name": "remote",
        "source": {"buffer": {"store": "s3://lake/queue", "store_options": options}},
        "decode": {"format": "json", "schema": "n bigint not null"},
        "transform": "SELECT n, n % 3 AS part, _shard, _sequence, _index FROM input",
        "sinks": {
            "delta": {
                "delta": {"path": "s3://lake/delta", "partition_by": ["part"], "store_options": options}
            },
            "parquet": {
                "parquet": {"path": "s3://lake/parquet", "partition_by": ["part"], "store_options": options}
            },
            "buffer": {
                "transform": "SELECT cast(n AS string) AS value FROM transformed",
                "buffer": {"store": "s3://lake/copies", "store_options": options},
            },
        },
        "trigger": {"max_batches": 2},
    }


async def produce(server: servers.S3Server) -> None:
    store = StoreConfig(url="s3://lake/queue", options=server.options())
    async with Producer(ProducerConfig(store=store, flush_interval="1h")) as producer:
        for batch in range(BATCHES):
            numbers = range(batch * EACH, (batch + 1) * EACH)
            await producer.produce([*(b'{"n":%d}' % n for n in numbers), b"bad"])
            await producer.flush()


async def queued(server: servers.S3Server, url: str) -> list[bytes]:
    store = StoreConfig(url=url, options=server.options())
    consumer = await Consumer.open(ConsumerConfig(store=store))
    found: list[bytes] = []
    while (batch := await consumer.next_batch()) is not None:
        found += [bytes(record) for record in batch.entries]
    await consumer.close()
    return found


def assert_exact(server: servers.S3Server) -> None:
    """Compare every sink with the produced records, using readers without Penstock."""
    numbers = Counter(range(BATCHES * EACH))
    storage = server.options()
    delta = DeltaTable("s3://lake/delta", storage_options=storage).to_pyarrow_table()
    assert Counter(delta["n"].to_pylist()) == numbers
    letters = DeltaTable("s3://lake/delta_dead_letters", storage_options=storage).to_pyarrow_table()
    assert sorted(letters["sequence"].to_pylist()) == list(range(BATCHES))
    files = S3FileSystem(
        access_key=server.access_key,
        secret_key=server.secret_key,
        endpoint_override=server.endpoint,
        scheme="http",
        region="us-east-1",
    )
    folder = pyarrow.dataset.dataset("lake/parquet", filesystem=files, partitioning="hive")
    assert Counter(folder.to_table(columns=["n"])["n"].to_pylist()) == numbers


@pytest.mark.timeout(600)
def test_a_pipeline_from_s3_to_s3_is_exact_even_if_a_micro_batch_runs_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    with servers.seaweedfs(tmp_path / "seaweedfs") as server:
        server.make_bucket("lake")
        asyncio.run(produce(server))
        spec = read_spec(settings(server), base=tmp_path)
        assert Pipeline(spec).start(spark, once=True).wait(250)
        assert_exact(server)
        shutil.rmtree(Path(spec.checkpoint_path, "commits"))
        assert Pipeline(spec).start(spark, once=True).wait(250)
        assert_exact(server)
        report = audit_pipeline(spec, deep=True)
        copies = asyncio.run(queued(server, "s3://lake/copies"))
    assert report.balanced, report
    assert Counter(map(int, copies)) == Counter(range(BATCHES * EACH))
    # What went to the server's door is not on the way to be shown to anybody.
    assert servers.SECRET_KEY not in repr(spec) + repr(report)
