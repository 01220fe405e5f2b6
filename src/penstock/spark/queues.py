"""The driver's side of the queue: what it holds, under which numbers, and acknowledging it.

Blocking, because Spark calls it so. `ConsumedQueue` owns the queue: opening one bumps the epoch of every
shard once and fences whoever had it. `ReadQueue` only looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from penstock.blocking import loop_thread
from penstock.buffer import Consumer, FencedError
from penstock.buffer.errors import storage_error
from penstock.buffer.inspect import QueueReader
from penstock.buffer.manifest import Entry, EntryIndex
from penstock.buffer.sharded import ShardedConsumer, read_layout, shard_config
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.offsets import Bounds
from penstock.spark.options import BufferOptions

__all__ = ["ConsumedQueue", "Indexes", "ObjectSizes", "Queue", "ReadQueue", "bounds_of", "entries_between"]

Indexes = Mapping[int, EntryIndex]
"""Every entry of every shard at one moment."""

_POLICY = RetryPolicy(deadline_s=30.0)
_SIZES_AT_ONCE = 64


class Queue(Protocol):
    """What a query needs of its queue."""

    store: ObjectStore

    def look(self) -> Indexes:
        """The queue now. Passing faults are retried; raises `FencedError` if a newer consumer has it."""
        ...

    def ack(self, offset: Mapping[int, int]) -> None:
        """Everything below `offset` is processed. Doing it again is harmless."""
        ...


def bounds_of(indexes: Indexes) -> dict[int, Bounds]:
    """First and next sequence of every shard."""
    return {
        shard: Bounds(first=index.first, following=index.footer.next_sequence)
        for shard, index in sorted(indexes.items())
    }


def entries_between(index: EntryIndex, start: int, end: int) -> list[Entry]:
    """The entries `start` to `end - 1`, which the caller has found to be there."""
    return index.after(start - 1, max(0, end - start))


class ConsumedQueue:
    """The queue in the hands of this query: one fenced consumer per shard."""

    def __init__(self, store: ObjectStore, consumers: dict[int, Consumer], path: str) -> None:
        self.store = store
        self._consumers = consumers
        self._path = path

    @classmethod
    def open(cls, options: BufferOptions) -> ConsumedQueue:
        """Take the queue over, from its earliest entry on. Creates it if it is not there yet."""

        async def take_over() -> ConsumedQueue:
            store = open_store(options.store)
            config = replace(options.consumer, store=store)
            if await _count_shards(store, options) is None:
                return cls(store, {0: await Consumer.open(config)}, options.manifest_path)
            sharded = await ShardedConsumer.open(config)
            consumers = {shard: sharded.consumer(shard) for shard in range(sharded.shards)}
            return cls(store, consumers, options.manifest_path)

        return loop_thread().run(take_over())

    def look(self) -> Indexes:
        async def entries() -> Indexes:
            found = await asyncio.gather(*(consumer.entries() for consumer in self._consumers.values()))
            return dict(zip(self._consumers, found, strict=True))

        try:
            return loop_thread().run(entries())
        except FencedError as error:
            raise self._lost(error) from error

    def ack(self, offset: Mapping[int, int]) -> None:
        """One manifest write per shard that has something to remove."""

        async def ack_through() -> None:
            await asyncio.gather(*(self._ack(shard, following - 1) for shard, following in offset.items()))

        try:
            loop_thread().run(ack_through())
        except FencedError as error:
            raise self._lost(error) from error

    async def _ack(self, shard: int, last: int) -> None:
        consumer = self._consumers[shard]
        if last >= 0 and (consumer.acked is None or last > consumer.acked):
            await consumer.ack_through(last)

    def _lost(self, error: FencedError) -> FencedError:
        return FencedError(
            f"this query no longer owns {self._path} in {self.store.url}: a newer query or consumer has "
            "taken it over, and only one may acknowledge. Stop one of the two; to look without owning, set "
            f"mode=read ({error})"
        )


class ReadQueue:
    """The queue as anybody may see it: nothing is fenced, acknowledged or created."""

    def __init__(self, store: ObjectStore, readers: dict[int, QueueReader]) -> None:
        self.store = store
        self._readers = readers

    @classmethod
    def open(cls, options: BufferOptions, *, must_exist: bool) -> ReadQueue:
        """Raises `StorageRejected` if the queue must exist and does not."""

        async def find() -> ReadQueue:
            store = open_store(options.store)
            count = await _count_shards(store, options)
            if count is None:
                reader = QueueReader(store, options.manifest_path)
                if must_exist:
                    await reader.require()
                return cls(store, {0: reader})
            configs = [shard_config(options.consumer, shard) for shard in range(count)]
            return cls(
                store, {n: QueueReader(store, config.manifest_key) for n, config in enumerate(configs)}
            )

        return loop_thread().run(find())

    def look(self) -> Indexes:
        async def entries() -> Indexes:
            found = await asyncio.gather(*(reader.index() for reader in self._readers.values()))
            return dict(zip(self._readers, found, strict=True))

        return loop_thread().run(entries())

    def ack(self, offset: Mapping[int, int]) -> None:
        """Nothing: a reader leaves the queue as it is."""

    def close(self) -> None:
        loop_thread().run(self.store.close())


async def _count_shards(store: ObjectStore, options: BufferOptions) -> int | None:
    if options.sharded is False:
        return None
    try:
        count = await retry(
            lambda: read_layout(store, options.manifest_path), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
        )
    except PenstockError as error:
        raise storage_error(error, f"looking for {options.manifest_path} in {store.url}") from error
    if count is None and options.sharded:
        raise ConfigError(
            f"sharded: {options.manifest_path} in {store.url} is not a sharded queue (yet); "
            "start its producers first, or leave the option out"
        )
    return count


class ObjectSizes:
    """The stored bytes of batch objects, asked for a few dozen ahead and remembered while they matter."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[tuple[int, int], int] = {}

    def forget_below(self, offset: Mapping[int, int]) -> None:
        self._known = {place: size for place, size in self._known.items() if place[1] >= offset[place[0]]}

    def size(self, index: EntryIndex, shard: int, sequence: int) -> int:
        """The bytes of one batch object; 0 when it is missing, which the task that fetches it will report."""
        if (shard, sequence) not in self._known:
            entries = entries_between(index, sequence, sequence + _SIZES_AT_ONCE)
            for entry, size in zip(entries, loop_thread().run(self._ask(entries)), strict=True):
                self._known[shard, entry.sequence] = size
        return self._known[shard, sequence]

    async def _ask(self, entries: list[Entry]) -> list[int]:
        return await asyncio.gather(*(self._ask_one(entry.location) for entry in entries))

    async def _ask_one(self, location: str) -> int:
        try:
            info = await retry(
                lambda: self._store.head(location), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
            )
        except NotFound:
            return 0
        except PenstockError as error:
            raise storage_error(error, f"asking for the size of {location}") from error
        return info.size
