"""Several queues under one name, for more throughput than one manifest allows.

A shard is an ordinary queue with its own manifest and its own data folder:

    {manifest_path}.shards/layout.json     {"version": 1, "shards": N}, written once
    {manifest_path}.shards/0003            manifest of shard 3
    {data_path_prefix}.shards/0003/        batches of shard 3

Order holds within a shard. Calls with the same key go to the same shard. Calls without a key are distributed
round robin.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, TypeVar

import msgspec
import xxhash

from penstock import errors
from penstock.buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from penstock.buffer.consumer import Consumer
from penstock.buffer.errors import (
    BufferError,
    FencedError,
    InvalidInputError,
    SerializationError,
    storage_error,
)
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch
from penstock.buffer.producer import Producer, Records
from penstock.buffer.upload import WriteHandle
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ConfigError
from penstock.ids import SYSTEM_RNG
from penstock.metrics import Registry
from penstock.objects import ObjectStore, normalise_key, open_store

__all__ = [
    "SHARDS_MAX",
    "ShardedConsumer",
    "ShardedProducer",
    "Shards",
    "read_layout",
    "read_shards",
    "shard_config",
    "shard_of",
]

SHARDS_MAX = 1024

C = TypeVar("C", ProducerConfig, ConsumerConfig, QueueConfig)


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    shards: int


def shard_of(key: bytes, shards: int) -> int:
    """Return the shard of a key. Every producer computes the same one."""
    return int(xxhash.xxh3_64_intdigest(key)) % shards


def shard_config(config: C, shard: int) -> C:
    """Return the configuration of the queue of one shard."""
    return replace(
        config,
        manifest_path=f"{normalise_key(config.manifest_path)}.shards/{shard:04d}",
        data_path_prefix=f"{normalise_key(config.data_path_prefix)}.shards/{shard:04d}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Generic[C]):
    """The shards of a queue, as `read_shards` found them."""

    config: C
    count: int | None
    """None for a queue without shards."""

    @property
    def configs(self) -> dict[int, C]:
        """The configuration of each shard. A queue without shards is its own shard 0."""
        if self.count is None:
            return {0: self.config}
        return {shard: shard_config(self.config, shard) for shard in range(self.count)}

    def of_app(self, app: str) -> tuple[int | None, C]:
        """Return the shard that takes all appends of an application, and the configuration of that shard.

        One shard keeps the writes of the application in order, and records what it has committed.
        """
        if self.count is None:
            return None, self.config
        shard = shard_of(app.encode(), self.count)
        return shard, shard_config(self.config, shard)


async def read_shards(store: ObjectStore, config: C, *, sharded: bool | None = None) -> Shards[C]:
    """Return the shards of a queue. With `sharded=False`, treat it as one queue and send no request.

    Raise `ConfigError` if `sharded` is True and the queue has no shards. Also raise the errors of
    `read_layout`.
    """
    count = None if sharded is False else await read_layout(store, config.manifest_key)
    if count is None and sharded:
        raise ConfigError(
            f"sharded: {config.manifest_key} in {store.url} is not a sharded queue (yet); "
            "start its producers first, or leave the option out"
        )
    return Shards(config=config, count=count)


async def read_layout(store: ObjectStore, manifest_path: str) -> int | None:
    """Read the number of shards, or None if the queue has no layout yet."""
    try:
        blob = await store.get(f"{manifest_path}.shards/layout.json")
        layout = msgspec.json.decode(bytes(blob.data), type=_Layout)
    except errors.NotFound:
        await _check_unsharded(store, manifest_path)
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError(f"the shard layout of {manifest_path} is damaged: {error}") from error
    if layout.version != 1 or not 1 <= layout.shards <= SHARDS_MAX:
        raise SerializationError(f"the shard layout of {manifest_path} is not one of version 1")
    return layout.shards


async def _check_unsharded(store: ObjectStore, manifest_path: str) -> None:
    """Raise `SerializationError` if there are shards: the layout is stored before the first shard."""
    folder = f"{manifest_path}.shards/"
    shards = sorted(
        info.key.removeprefix(folder)[:4]
        for info in await store.list(folder.rstrip("/"))
        if info.key.removeprefix(folder)[:4].isdigit()
    )
    if shards:
        raise SerializationError(
            f"{folder}layout.json is missing, but there are shards up to {shards[-1]}. Restore it: "
            '{"version":1,"shards":N} with the number of shards that the queue had'
        )


async def _settle_layout(store: ObjectStore, manifest_path: str, shards: int | None) -> int:
    """Return the stored number of shards, or store `shards` if there is none. Both must agree."""
    if shards is not None and not 1 <= shards <= SHARDS_MAX:
        raise ConfigError(f"shards must be between 1 and {SHARDS_MAX}, not {shards}")
    stored = await read_layout(store, manifest_path)
    if stored is None and shards is not None:
        raw = msgspec.json.encode(_Layout(version=1, shards=shards))
        try:
            await store.put_if_absent(f"{manifest_path}.shards/layout.json", raw)
            stored = shards
        except errors.Conflict:
            stored = await read_layout(store, manifest_path)
        except errors.OutcomeUnknown:
            stored = await read_layout(store, manifest_path)
            if stored is None:
                raise  # a transient fault: the layout may exist
    if stored is None:
        raise ConfigError(f"{manifest_path} is not a sharded queue yet: set its number of shards")
    if shards is not None and stored != shards:
        raise ConfigError(f"{manifest_path} has {stored} shards, not {shards}; the number cannot change")
    return stored


class ShardedProducer:
    """One `Producer` per shard, sharing the memory bound of the config."""

    def __init__(self, producers: list[Producer], store: ObjectStore, *, owns_store: bool) -> None:
        self._producers = producers
        self._turn = itertools.cycle(range(len(producers)))
        self._store = store
        self._owns_store = owns_store

    @classmethod
    async def open(
        cls,
        config: ProducerConfig,
        shards: int | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> ShardedProducer:
        """Open all shards. `shards` is required the first time. Later it must be the same or None."""
        owns_store = not isinstance(config.store, ObjectStore)
        store = open_store(config.store, deadline_s=config.append_deadline_s)
        async with _opening(store, config.manifest_key, owns_store=owns_store):
            count = await _settle_layout(store, config.manifest_key, shards)
            share = replace(config, max_inflight_bytes=max(2, config.inflight_bytes_max // count))
            producers = [
                Producer(shard_config(share, shard), clock, store, rng=rng, registry=registry)
                for shard in range(count)
            ]
        return cls(producers, store, owns_store=owns_store)

    @property
    def shards(self) -> int:
        return len(self._producers)

    async def __aenter__(self) -> ShardedProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def produce(
        self, entries: Records, metadata: bytes = b"", *, key: bytes | None = None
    ) -> WriteHandle:
        """Produce on the shard of `key`, or on the next one in turn. See `Producer.produce`."""
        shard = next(self._turn) if key is None else shard_of(key, self.shards)
        return await self._producers[shard].produce(entries, metadata)

    async def flush(self) -> None:
        """Flush every shard. Raise the first error after all flushes have ended."""
        await _all_of([producer.flush() for producer in self._producers])

    async def close(self) -> None:
        """Flush and stop every shard."""
        try:
            await _all_of([producer.close() for producer in self._producers])
        finally:
            if self._owns_store:
                await self._store.close()


class ShardedConsumer:
    """One `Consumer` per shard. `batch.shard` is the shard of a batch."""

    def __init__(self, consumers: list[Consumer], store: ObjectStore, *, owns_store: bool) -> None:
        self._consumers = consumers
        self._next = 0
        self._unclaimed: list[BatchDescriptor] = []
        self._store = store
        self._owns_store = owns_store

    @classmethod
    async def open(
        cls,
        config: ConsumerConfig,
        last_acked: Mapping[int, int] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> ShardedConsumer:
        """Take over all shards. `last_acked` maps shards to their stored sequences.

        Every other shard starts at its earliest entry.
        """
        owns_store = not isinstance(config.store, ObjectStore)
        store = open_store(config.store, deadline_s=config.retry_deadline_s)
        positions = dict(last_acked or {})
        async with _opening(store, config.manifest_key, owns_store=owns_store):
            count = await _settle_layout(store, config.manifest_key, None)
            if unknown := sorted(shard for shard in positions if not 0 <= shard < count):
                raise InvalidInputError(f"last_acked names shard {unknown[0]}, but there are only {count}")
            consumers = [
                Consumer(shard_config(config, shard), store, clock=clock, rng=rng, registry=registry)
                for shard in range(count)
            ]
        opened = cls(consumers, store, owns_store=owns_store)
        try:
            await _all_of([c.initialize(positions.get(shard)) for shard, c in enumerate(consumers)])
        except BaseException:
            await opened._release()
            raise
        return opened

    @property
    def shards(self) -> int:
        return len(self._consumers)

    def __len__(self) -> int:
        """The number of entries in all shards when they were last read."""
        return sum(len(consumer) for consumer in self._consumers)

    async def __aenter__(self) -> ShardedConsumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, FencedError):
            await self._release()
        else:
            await self.close()

    async def next_batch(self) -> ConsumedBatch | None:
        """Return the next batch, taking the shards in turn, or None if all are empty."""
        for _ in range(self.shards):
            shard = self._next
            self._next = (shard + 1) % self.shards
            batch = await self._consumers[shard].next_batch()
            if batch is not None:
                return replace(batch, descriptor=replace(batch.descriptor, shard=shard))
        return None

    async def next_descriptors(self, limit: int) -> list[BatchDescriptor]:
        """Return up to `limit` descriptors of each shard.

        If a shard fails, the next call returns the descriptors already read from the others.
        """
        handed, self._unclaimed = self._unclaimed, []
        claimed = {descriptor.shard for descriptor in handed}
        try:
            for shard, consumer in enumerate(self._consumers):
                if shard not in claimed:
                    found = await consumer.next_descriptors(limit)
                    handed += [replace(descriptor, shard=shard) for descriptor in found]
        except BaseException:
            self._unclaimed += handed  # their positions have moved, so they would not be delivered again
            raise
        return handed

    def consumer(self, shard: int) -> Consumer:
        """Return the consumer of one shard."""
        return self._consumers[shard]

    async def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        return await self._consumers[descriptor.shard or 0].fetch_descriptor(descriptor)

    async def ack(self, batch: ConsumedBatch) -> None:
        """Acknowledge a batch in its shard."""
        if batch.shard is None:
            raise InvalidInputError("the batch does not come from a sharded queue")
        await self._consumers[batch.shard].ack(batch.sequence)

    async def ack_through(self, positions: Mapping[int, int]) -> None:
        """Acknowledge each given shard up to its sequence."""
        await _all_of([self._consumers[shard].ack_through(seq) for shard, seq in positions.items()])

    def positions(self) -> dict[int, int]:
        """Return the last acknowledged sequence of every shard that has one. Store it with the rows."""
        return {s: c.acked for s, c in enumerate(self._consumers) if c.acked is not None}

    async def flush(self) -> None:
        await _all_of([consumer.flush() for consumer in self._consumers])

    async def close(self) -> None:
        """Flush and stop every shard."""
        try:
            await _all_of([consumer.close() for consumer in self._consumers])
        finally:
            await self._release()

    async def _release(self) -> None:
        for consumer in self._consumers:
            await consumer.release()
        if self._owns_store:
            await self._store.close()


async def _all_of(works: list[Coroutine[None, None, None]]) -> None:
    """Run all coroutines. Raise the first error after all have ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


@asynccontextmanager
async def _opening(store: ObjectStore, manifest_path: str, *, owns_store: bool) -> AsyncIterator[None]:
    """Convert errors to those of the buffer. After an error, close a store that was opened here."""
    try:
        yield
    except BaseException as error:
        if owns_store:
            await store.close()
        if isinstance(error, errors.PenstockError) and not isinstance(error, (BufferError, ConfigError)):
            raise storage_error(error, f"opening the shards of {manifest_path}") from error
        raise
