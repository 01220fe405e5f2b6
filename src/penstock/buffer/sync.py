"""Blocking API of the buffer, with the same names, for scripts and Spark tasks.

with Producer(ProducerConfig(store="file:///var/penstock")) as producer:
    producer.produce([b"a", b"b"]).await_durable()

with Consumer.open(ConsumerConfig(store="file:///var/penstock")) as consumer:
    for batch in consumer.drain():
        ...
        consumer.ack(batch.sequence)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from penstock.blocking import (
    BlockingContext,
    BlockingProxy,
    LoopThread,
    blocking,
    loop_thread,
)
from penstock.buffer import consumer as _consumer
from penstock.buffer import fetch as _fetch
from penstock.buffer import gc as _gc
from penstock.buffer import producer as _producer
from penstock.buffer import sharded as _sharded
from penstock.buffer import upload as _upload
from penstock.buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from penstock.buffer.fetch import ConsumedBatch
from penstock.buffer.side_objects import DeadLetter
from penstock.buffer.upload import WriteOutcome
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.metrics import Registry
from penstock.objects import ObjectStore
from penstock.units import DurationLike, parse_duration

__all__ = [
    "Consumer",
    "DurabilityWatcher",
    "FetchHandle",
    "GarbageCollector",
    "Producer",
    "ShardedConsumer",
    "ShardedProducer",
    "WriteHandle",
]


class DurabilityWatcher(BlockingProxy[_upload.DurabilityWatcher]):
    """Blocking form of `penstock.buffer.DurabilityWatcher`."""

    __slots__ = ()

    def result(self) -> WriteOutcome | None:
        """Return the outcome of the write, or None while it is pending."""
        return self._inner.result()

    def await_durable(self, timeout_s: float | None = None) -> WriteOutcome:
        """Wait until the write is durable. Raises its error.

        When `timeout_s` expires, raises `TimeoutError` and leaves the write running.
        """
        return self._loop.run(self._inner.await_durable(), timeout_s)


class WriteHandle:
    """Blocking form of `penstock.buffer.WriteHandle`."""

    __slots__ = ("ingestion_time_ms", "watcher")

    def __init__(self, inner: _upload.WriteHandle, loop: LoopThread) -> None:
        self.watcher = DurabilityWatcher(inner.watcher, loop)
        self.ingestion_time_ms = inner.ingestion_time_ms

    def await_durable(self, timeout_s: float | None = None) -> WriteOutcome:
        """Short for `watcher.await_durable`."""
        return self.watcher.await_durable(timeout_s)


class Producer(BlockingContext[_producer.Producer]):
    """Blocking form of `penstock.buffer.Producer`; threads may share it."""

    def __init__(
        self,
        config: ProducerConfig,
        clock: Clock = SYSTEM_CLOCK,
        store: ObjectStore | None = None,
        *,
        registry: Registry | None = None,
    ) -> None:
        async def make() -> _producer.Producer:
            return await _producer.Producer(config, clock, store, registry=registry).__aenter__()

        loop = loop_thread()
        super().__init__(loop.run(make()), loop)

    produce = blocking(_producer.Producer.produce, WriteHandle)
    flush = blocking(_producer.Producer.flush)
    close = blocking(_producer.Producer.close)

    def conflict_rate(self) -> float:
        """Return the percentage of manifest writes that lost to another writer."""
        return self._inner.conflict_rate()


class FetchHandle(BlockingProxy[_fetch.FetchHandle]):
    """Blocking form of `penstock.buffer.FetchHandle`; threads may share it."""

    __slots__ = ()

    fetch = blocking(_fetch.FetchHandle.fetch)


class Consumer(BlockingContext[_consumer.Consumer]):
    """Blocking form of `penstock.buffer.Consumer`."""

    def __init__(
        self,
        config: ConsumerConfig,
        store: ObjectStore | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> None:
        async def make() -> _consumer.Consumer:
            return _consumer.Consumer(config, store, clock=clock, registry=registry)

        loop = loop_thread()
        super().__init__(loop.run(make()), loop)

    @classmethod
    def open(
        cls,
        config: ConsumerConfig,
        last_acked: int | None = None,
        *,
        store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> Consumer:
        """Create a consumer and call `initialize(last_acked)`."""
        consumer = cls(config, store, clock=clock, registry=registry)
        try:
            consumer.initialize(last_acked)
        except BaseException:
            consumer._loop.run(consumer._inner.release())
            raise
        return consumer

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def acked(self) -> int | None:
        return self._inner.acked

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Batches that this consumer has quarantined."""
        return self._inner.dead_letters

    initialize = blocking(_consumer.Consumer.initialize)
    next_batch = blocking(_consumer.Consumer.next_batch)
    next_descriptors = blocking(_consumer.Consumer.next_descriptors)
    fetch_descriptor = blocking(_consumer.Consumer.fetch_descriptor)
    ack = blocking(_consumer.Consumer.ack)
    ack_through = blocking(_consumer.Consumer.ack_through)
    flush = blocking(_consumer.Consumer.flush)
    close = blocking(_consumer.Consumer.close)

    def fetch_handle(self) -> FetchHandle:
        """Return a handle that fetches descriptors. It has no state: threads may share it."""
        return FetchHandle(self._inner.fetch_handle(), self._loop)

    def drain(self) -> Iterator[ConsumedBatch]:
        """Yield batches until the queue is empty."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def batches(self, poll_interval: DurationLike = "100ms") -> Iterator[ConsumedBatch]:
        """Yield batches indefinitely. Wait `poll_interval` whenever the queue is empty."""
        poll_interval_s = parse_duration(poll_interval)
        while True:
            yield from self.drain()
            time.sleep(poll_interval_s)


class ShardedProducer(BlockingContext[_sharded.ShardedProducer]):
    """Blocking form of `penstock.buffer.ShardedProducer`; threads may share it."""

    @property
    def shards(self) -> int:
        return self._inner.shards

    @classmethod
    def open(
        cls, config: ProducerConfig, shards: int | None = None, *, registry: Registry | None = None
    ) -> ShardedProducer:
        """Open all shards. `shards` is required only the first time; later it must match or be None."""
        loop = loop_thread()
        return cls(loop.run(_sharded.ShardedProducer.open(config, shards, registry=registry)), loop)

    produce = blocking(_sharded.ShardedProducer.produce, WriteHandle)
    flush = blocking(_sharded.ShardedProducer.flush)
    close = blocking(_sharded.ShardedProducer.close)


class ShardedConsumer(BlockingContext[_sharded.ShardedConsumer]):
    """Blocking form of `penstock.buffer.ShardedConsumer`."""

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def shards(self) -> int:
        return self._inner.shards

    @classmethod
    def open(
        cls,
        config: ConsumerConfig,
        last_acked: Mapping[int, int] | None = None,
        *,
        registry: Registry | None = None,
    ) -> ShardedConsumer:
        """Take over all shards. `last_acked` maps a shard to its stored sequence."""
        loop = loop_thread()
        return cls(loop.run(_sharded.ShardedConsumer.open(config, last_acked, registry=registry)), loop)

    next_batch = blocking(_sharded.ShardedConsumer.next_batch)
    next_descriptors = blocking(_sharded.ShardedConsumer.next_descriptors)
    fetch_descriptor = blocking(_sharded.ShardedConsumer.fetch_descriptor)
    ack = blocking(_sharded.ShardedConsumer.ack)
    ack_through = blocking(_sharded.ShardedConsumer.ack_through)
    flush = blocking(_sharded.ShardedConsumer.flush)
    close = blocking(_sharded.ShardedConsumer.close)

    def drain(self) -> Iterator[ConsumedBatch]:
        """Yield batches until every shard is empty."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def positions(self) -> dict[int, int]:
        """Return the last acknowledged sequence of every shard that has one."""
        return self._inner.positions()


class GarbageCollector(BlockingProxy[_gc.GarbageCollector]):
    """Blocking form of `penstock.buffer.GarbageCollector`. It may run next to a live consumer."""

    def __init__(
        self, config: GarbageCollectorConfig, *, store: ObjectStore | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(_gc.GarbageCollector(config, store=store, clock=clock), loop_thread())

    collect = blocking(_gc.GarbageCollector.collect)
    close = blocking(_gc.GarbageCollector.close)
