"""One real Spark for the whole tier; every test has its own queue, checkpoint and output."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamReader, StreamingQuery

import penstock
from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import EntryIndex
from penstock.buffer.sharded import ShardedProducer
from penstock.objects import LocalStore
from penstock.spark import build_session

MANIFEST = "ingest/manifest"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    source = str(Path(penstock.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    # Short queries never get to run what the optimising compiler would spend its time on.
    conf = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    session = build_session("penstock tests", master="local[2]", conf=conf)
    yield session
    session.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A queue in a directory, and a folder for the output of Spark."""

    spark: SparkSession
    root: Path

    @property
    def store(self) -> str:
        return str(self.root / "store")

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    def produce(self, batches: Sequence[Sequence[bytes]], *, metadata: bytes = b"m") -> list[bytes]:
        """Store one batch object for each of `batches`. Return all records."""

        async def work() -> None:
            async with Producer(ProducerConfig(store=self.store, flush_interval="1h")) as producer:
                for batch in batches:
                    await producer.produce(list(batch), metadata)
                    await producer.flush()

        asyncio.run(work())
        return [record for batch in batches for record in batch]

    def produce_sharded(self, calls: Sequence[Sequence[bytes]], shards: int) -> list[bytes]:
        async def work() -> None:
            config = ProducerConfig(store=self.store, flush_interval="1h")
            async with await ShardedProducer.open(config, shards) as producer:
                for call in calls:
                    await producer.produce(list(call))
                    await producer.flush()

        asyncio.run(work())
        return [record for call in calls for record in call]

    def queue(self) -> EntryIndex:
        return asyncio.run(QueueReader(LocalStore(self.store), MANIFEST).index())

    def acknowledge_through(self, sequence: int) -> None:
        """Consume part of the queue as another consumer."""

        async def work() -> None:
            consumer = await Consumer.open(ConsumerConfig(store=self.store))
            await consumer.ack_through(sequence)
            await consumer.close()

        asyncio.run(work())

    def read(self, **options: str) -> DataFrame:
        return self.spark.read.format("penstock-buffer").options(store=self.store, **options).load()

    def stream(self, **options: str) -> DataStreamReader:
        return self.spark.readStream.format("penstock-buffer").options(store=self.store, **options)

    def drain(self, **options: str) -> list[list[tuple[int, int, bytes]]]:
        """Run a stream until it has everything. Return (sequence, index, value) of every micro-batch."""
        seen: list[list[tuple[int, int, bytes]]] = []

        def keep(frame: DataFrame, _: int) -> None:
            rows = frame.select("sequence", "index", "value").collect()
            seen.append(sorted((row[0], row[1], bytes(row[2])) for row in rows))

        finish(
            self.stream(**options)
            .load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        return seen

    def run(self, output: str, **options: str) -> StreamingQuery:
        """Run a stream into a Parquet table until it has everything."""
        query = (
            self.stream(**options)
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start(output)
        )
        return finish(query)


def finish(query: StreamingQuery) -> StreamingQuery:
    try:
        assert query.awaitTermination(200)
    finally:
        query.stop()
    return query


def records(batches: int, each: int, prefix: str = "r") -> list[list[bytes]]:
    return [[f"{prefix}-{batch}-{number}".encode() for number in range(each)] for batch in range(batches)]


@pytest.fixture
def plant(spark: SparkSession, tmp_path: Path) -> Plant:
    return Plant(spark=spark, root=tmp_path)
