from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import EntryIndex
from penstock.buffer.sharded import ShardedProducer
from penstock.objects import LocalStore
from penstock.spark.sources.buffer import BufferStreamReader
from penstock.spark.sources.buffer_options import BufferOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue in a directory, and its other users."""

    root: Path

    def produce(self, batches: int) -> None:
        async def work() -> None:
            async with Producer(ProducerConfig(store=str(self.root), flush_interval="1h")) as producer:
                for number in range(batches):
                    await producer.produce([b"%d" % number])
                    await producer.flush()

        asyncio.run(work())

    def produce_sharded(self, batches: int, shards: int) -> None:
        """Produce one batch after the other, to the shards in turn."""

        async def work() -> None:
            config = ProducerConfig(store=str(self.root), flush_interval="1h")
            async with await ShardedProducer.open(config, shards) as producer:
                for number in range(batches):
                    await producer.produce([b"%d" % number])
                    await producer.flush()

        asyncio.run(work())

    def acknowledge_through(self, sequence: int) -> None:
        async def work() -> None:
            async with await Consumer.open(ConsumerConfig(store=str(self.root))) as consumer:
                await consumer.ack_through(sequence)

        asyncio.run(work())

    def entries(self, manifest: str = "ingest/manifest") -> EntryIndex:
        return asyncio.run(QueueReader(LocalStore(str(self.root)), manifest).index())

    def location(self, sequence: int) -> str:
        entries = self.entries()
        return entries[sequence - entries.first].location

    def remove(self, name: str = "manifest") -> None:
        (self.root / "ingest" / name).unlink()

    def options(self, **given: str) -> BufferOptions:
        return BufferOptions.parse({"store": str(self.root), **given})

    def stream(self, **given: str) -> BufferStreamReader:
        return BufferStreamReader(self.options(**{"mode": "read", **given}))


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(root=tmp_path)
