from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from pyspark.sql import SparkSession
from tests import servers
from tests.spark.conftest import finish, records

from penstock.buffer import Producer, ProducerConfig
from penstock.objects import StoreConfig


def test_a_stream_from_a_real_s3_server_delivers_each_record_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    batches = records(6, 20)
    with servers.seaweedfs(tmp_path / "seaweedfs") as server:
        server.make_bucket("spark")

        async def produce() -> None:
            store = StoreConfig(url="s3://spark/queue", options=server.options())
            async with Producer(ProducerConfig(store=store, flush_interval="1h")) as producer:
                for batch in batches:
                    await producer.produce(batch)
                    await producer.flush()

        asyncio.run(produce())
        options = {f"store.{name}": value for name, value in server.options().items()}
        stream = (
            spark.readStream.format("penstock-buffer")
            .options(store="s3://spark/queue", maxBatchesPerTrigger="4", maxBytesPerTrigger="1MiB", **options)
            .load()
        )
        output = str(tmp_path / "table")
        finish(
            stream.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(output)
        )
        rows = spark.read.parquet(output).collect()
    assert Counter(bytes(row.value) for row in rows) == Counter(r for batch in batches for r in batch)
