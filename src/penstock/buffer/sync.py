"""The buffer without an event loop: the same names, calls that wait. For scripts and Spark tasks.

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
from types import TracebackType

from penstock.blocking import LoopThread, loop_thread
from penstock.buffer import consumer as _consumer
from penstock.buffer import fetch as _fetch
from penstock.buffer import gc as _gc
from penstock.buffer import producer as _producer
from penstock.buffer import sharded as _sharded
from penstock.buffer import upload as _upload
from penstock.buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch
from penstock.buffer.gc import GcReport
from penstock.buffer.producer import Records
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


class DurabilityWatcher:
    """Blocking twin of `penstock.buffer.DurabilityWatcher`."""

    __slots__ = ("_inner", "_loop")

    def __init__(self, inner: _upload.DurabilityWatcher, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def result(self) -> WriteOutcome | None:
        """None while pending, then how it ended."""
        return self._inner.result()

    def await_durable(self, timeout_s: float | None = None) -> WriteOutcome:
        """Wait. Raises the error of the write, or `TimeoutError`, which leaves the write going."""
        return self._loop.run(self._inner.await_durable(), timeout_s)


class WriteHandle:
    """Blocking twin of `penstock.buffer.WriteHandle`."""

    __slots__ = ("ingestion_time_ms", "watcher")

    def __init__(self, inner: _upload.WriteHandle, loop: LoopThread) -> None:
        self.watcher = DurabilityWatcher(inner.watcher, loop)
        self.ingestion_time_ms = inner.ingestion_time_ms

    def await_durable(self, timeout_s: float | None = None) -> WriteOutcome:
        """Short for `watcher.await_durable`."""
        return self.watcher.await_durable(timeout_s)


class Producer:
    """Blocking twin of `penstock.buffer.Producer`; threads may share it."""

    def __init__(
        self,
        config: ProducerConfig,
        clock: Clock = SYSTEM_CLOCK,
        store: ObjectStore | None = None,
        *,
        registry: Registry | None = None,
    ) -> None:
        self._loop = loop_thread()

        async def make() -> _producer.Producer:
            return await _producer.Producer(config, clock, store, registry=registry).__aenter__()

        self._inner = self._loop.run(make())

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def produce(self, entries: Records, metadata: bytes = b"") -> WriteHandle:
        """Accept records; waits while the producer holds as much as it may."""
        return WriteHandle(self._loop.run(self._inner.produce(entries, metadata)), self._loop)

    def flush(self) -> None:
        """Wait until everything produced before is durable."""
        self._loop.run(self._inner.flush())

    def close(self) -> None:
        """Flush and stop."""
        self._loop.run(self._inner.close())

    def conflict_rate(self) -> float:
        """Percent of manifest writes that lost against another writer."""
        return self._inner.conflict_rate()


class FetchHandle:
    """Blocking twin of `penstock.buffer.FetchHandle`; threads may share it."""

    __slots__ = ("_inner", "_loop")

    def __init__(self, inner: _fetch.FetchHandle, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def fetch(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """The batch. Raises `BatchMissing`, `SerializationError`, or `StorageError`."""
        return self._loop.run(self._inner.fetch(descriptor))


class Consumer:
    """Blocking twin of `penstock.buffer.Consumer`."""

    def __init__(
        self,
        config: ConsumerConfig,
        store: ObjectStore | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> None:
        self._loop = loop_thread()

        async def make() -> _consumer.Consumer:
            return _consumer.Consumer(config, store, clock=clock, registry=registry)

        self._inner = self._loop.run(make())

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
        """A consumer that is ready: `Consumer(config)` and `initialize(last_acked)`."""
        consumer = cls(config, store, clock=clock, registry=registry)
        try:
            consumer.initialize(last_acked)
        except BaseException:
            consumer._loop.run(consumer._inner.release())
            raise
        return consumer

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def acked(self) -> int | None:
        return self._inner.acked

    def initialize(self, last_acked: int | None = None) -> None:
        """Take the queue over and position after `last_acked`."""
        self._loop.run(self._inner.initialize(last_acked))

    def next_batch(self) -> ConsumedBatch | None:
        """The next batch, or None when there is none now."""
        return self._loop.run(self._inner.next_batch())

    def drain(self) -> Iterator[ConsumedBatch]:
        """Batches until the queue is empty."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def batches(self, poll_interval: DurationLike = "100ms") -> Iterator[ConsumedBatch]:
        """Batches without end: waits `poll_interval` whenever the queue is empty."""
        poll_interval_s = parse_duration(poll_interval)
        while True:
            yield from self.drain()
            time.sleep(poll_interval_s)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The batches this consumer has set aside."""
        return self._inner.dead_letters

    def fetch_handle(self) -> FetchHandle:
        """What fetches descriptors. Stateless: share it between threads."""
        return FetchHandle(self._inner.fetch_handle(), self._loop)

    def next_descriptors(self, limit: int) -> list[BatchDescriptor]:
        """Up to `limit` batches, not fetched, in one read of the manifest."""
        return self._loop.run(self._inner.next_descriptors(limit))

    def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """The batch of a descriptor. Any thread may call it."""
        return self._loop.run(self._inner.fetch_descriptor(descriptor))

    def ack(self, sequence: int) -> None:
        """Acknowledge the oldest delivered batch that has no ack yet."""
        self._loop.run(self._inner.ack(sequence))

    def ack_through(self, sequence: int) -> None:
        """Acknowledge everything up to `sequence` in one manifest write."""
        self._loop.run(self._inner.ack_through(sequence))

    def flush(self) -> None:
        """Remove everything acknowledged from the queue now."""
        self._loop.run(self._inner.flush())

    def close(self) -> None:
        """Flush, then stop."""
        self._loop.run(self._inner.close())


class ShardedProducer:
    """Blocking twin of `penstock.buffer.ShardedProducer`; threads may share it."""

    def __init__(self, inner: _sharded.ShardedProducer, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @classmethod
    def open(
        cls, config: ProducerConfig, shards: int | None = None, *, registry: Registry | None = None
    ) -> ShardedProducer:
        """Open all shards. `shards` is needed the first time only; later it must agree or be None."""
        loop = loop_thread()
        return cls(loop.run(_sharded.ShardedProducer.open(config, shards, registry=registry)), loop)

    def __enter__(self) -> ShardedProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def shards(self) -> int:
        return self._inner.shards

    def produce(self, entries: Records, metadata: bytes = b"", *, key: bytes | None = None) -> WriteHandle:
        """Accept records on the shard of `key`, or on the next one in turn."""
        return WriteHandle(self._loop.run(self._inner.produce(entries, metadata, key=key)), self._loop)

    def flush(self) -> None:
        """Wait until everything produced before is durable, in every shard."""
        self._loop.run(self._inner.flush())

    def close(self) -> None:
        """Flush and stop every shard."""
        self._loop.run(self._inner.close())


class ShardedConsumer:
    """Blocking twin of `penstock.buffer.ShardedConsumer`."""

    def __init__(self, inner: _sharded.ShardedConsumer, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @classmethod
    def open(
        cls,
        config: ConsumerConfig,
        last_acked: Mapping[int, int] | None = None,
        *,
        registry: Registry | None = None,
    ) -> ShardedConsumer:
        """Take all shards over. `last_acked` maps a shard to its stored sequence."""
        loop = loop_thread()
        return cls(loop.run(_sharded.ShardedConsumer.open(config, last_acked, registry=registry)), loop)

    def __enter__(self) -> ShardedConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def shards(self) -> int:
        return self._inner.shards

    def next_batch(self) -> ConsumedBatch | None:
        """The next batch of any shard, taking them in turn; None when all are empty."""
        return self._loop.run(self._inner.next_batch())

    def drain(self) -> Iterator[ConsumedBatch]:
        """Batches until every shard is empty."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def next_descriptors(self, limit: int) -> list[BatchDescriptor]:
        """Up to `limit` descriptors of each shard."""
        return self._loop.run(self._inner.next_descriptors(limit))

    def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """The batch of a descriptor. Any thread may call it."""
        return self._loop.run(self._inner.fetch_descriptor(descriptor))

    def ack(self, batch: ConsumedBatch) -> None:
        """Acknowledge a batch in its shard."""
        self._loop.run(self._inner.ack(batch))

    def ack_through(self, positions: Mapping[int, int]) -> None:
        """Acknowledge each named shard through its sequence."""
        self._loop.run(self._inner.ack_through(positions))

    def positions(self) -> dict[int, int]:
        """The last acknowledged sequence of every shard that has one."""
        return self._inner.positions()

    def flush(self) -> None:
        """Remove everything acknowledged from the queues now."""
        self._loop.run(self._inner.flush())

    def close(self) -> None:
        """Flush and stop every shard."""
        self._loop.run(self._inner.close())


class GarbageCollector:
    """Blocking twin of `penstock.buffer.GarbageCollector`, to run beside a live consumer."""

    def __init__(
        self, config: GarbageCollectorConfig, *, store: ObjectStore | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._loop = loop_thread()
        self._inner = _gc.GarbageCollector(config, store=store, clock=clock)

    def collect(self, *, dry_run: bool = False) -> GcReport:
        """One cycle. A dry run tells what is eligible and changes nothing."""
        return self._loop.run(self._inner.collect(dry_run=dry_run))

    def close(self) -> None:
        """Release the store, if it was opened here."""
        self._loop.run(self._inner.close())
