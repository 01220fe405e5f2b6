"""The driver's access to a queue: reading its entries and bounds, and acknowledging entries.

The calls block, because Spark calls them from blocking code. `ConsumedQueue` owns the queue: opening one
raises the epoch of every shard once and fences the previous owner. `ReadQueue` only reads. `QueueWatch`
counts the entries that a query has not processed yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from penstock.blocking import loop_thread
from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    Entry,
    EntryIndex,
    FencedError,
    ProducerConfig,
    QueueReader,
    ShardedConsumer,
    Shards,
    entry_time_ms,
    read_shards,
    storage_error,
)
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.offsets import Bounds, Offset, backlog

Indexes = Mapping[int, EntryIndex]
"""All entries of every shard, read by one call."""

C = TypeVar("C", ConsumerConfig, ProducerConfig)

_POLICY = RetryPolicy(deadline_s=30.0)
_SIZES_AT_ONCE = 64


class Queue(Protocol):
    """The operations that a query performs on its queue."""

    store: ObjectStore

    @property
    def manifests(self) -> Mapping[int, str]:
        """The key of every shard's manifest."""
        ...

    def dequeued(self, shard: int) -> Mapping[int, str]:
        """Return a map of sequence to location for entries that are known to have left a shard."""
        ...

    def look(self) -> Indexes:
        """Return all entries. Retry transient errors. Raise `FencedError` if a newer consumer owns it."""
        ...

    def ack(self, offset: Mapping[int, int]) -> None:
        """Acknowledge everything before `offset`. Safe to repeat."""
        ...


def bounds_of(indexes: Indexes) -> dict[int, Bounds]:
    """Return the first and next sequence of every shard."""
    return {
        shard: Bounds(first=index.first, following=index.footer.next_sequence)
        for shard, index in sorted(indexes.items())
    }


def entries_between(index: EntryIndex, start: int, end: int) -> list[Entry]:
    """Return the entries `start` to `end - 1`, which must be in the queue."""
    return index.after(start - 1, max(0, end - start))


def location_at(index: EntryIndex, sequence: int) -> str | None:
    """Return the location of an entry, or None if it is not in the queue."""
    place = sequence - index.first
    return index[place].location if 0 <= place < len(index) else None


class ConsumedQueue:
    """A queue that this query owns: one fenced consumer per shard."""

    def __init__(self, store: ObjectStore, options: BufferOptions) -> None:
        self.store = store
        self.manifests: Mapping[int, str] = {}
        self._options = options
        self._consumers: dict[int, Consumer] = {}
        self._sharded = False

    @classmethod
    def open(cls, options: BufferOptions) -> ConsumedQueue:
        """Take over the queue, and create it if it does not exist."""

        async def take_over() -> ConsumedQueue:
            store = open_store(options.store)
            queue = cls(store, options)
            await queue._take_over(await find_shards(store, options.consumer, options.sharded))
            return queue

        return loop_thread().run(take_over())

    async def _take_over(self, shards: Shards[ConsumerConfig]) -> None:
        config = replace(shards.config, store=self.store)
        if shards.count is None:
            consumers = {0: await Consumer.open(config)}
        else:
            opened = await ShardedConsumer.open(config)
            consumers = {shard: opened.consumer(shard) for shard in range(opened.shards)}
        self._consumers, self._sharded = consumers, shards.count is not None
        self.manifests = _manifests(shards)

    def look(self) -> Indexes:
        """Return all entries. If an unused queue has become sharded, take over its shards first."""
        try:
            return loop_thread().run(self._entries())
        except FencedError as error:
            raise self._fenced(error) from error

    async def _entries(self) -> Indexes:
        found = await asyncio.gather(*(consumer.entries() for consumer in self._consumers.values()))
        indexes = dict(zip(self._consumers, found, strict=True))
        if not self._sharded and _is_unused(indexes):
            shards = await find_shards(self.store, self._options.consumer, self._options.sharded)
            if shards.count is not None:
                await self._move_to(shards)
                return await self._entries()
        return indexes

    async def _move_to(self, shards: Shards[ConsumerConfig]) -> None:
        """Take over shards that did not exist when this query started.

        Raise `FencedError` if another query has consumed them: it started later and owns them.
        """
        readers = [QueueReader(self.store, path) for path in _manifests(shards).values()]
        for index in await asyncio.gather(*(reader.index() for reader in readers)):
            if index.footer.epoch:
                raise FencedError(f"its {shards.count} shards were consumed before this query saw them")
        emptied = list(self._consumers.values())
        await self._take_over(shards)
        for consumer in emptied:
            await consumer.release()

    def dequeued(self, shard: int) -> Mapping[int, str]:
        """Return the dequeued log. It is read once, because the consumer knows its own acknowledgements."""
        return loop_thread().run(self._consumers[shard].dequeued())

    def ack(self, offset: Mapping[int, int]) -> None:
        """Acknowledge, with one manifest write for each shard that has entries to remove."""

        async def ack_through() -> None:
            await asyncio.gather(*(self._ack(shard, following - 1) for shard, following in offset.items()))

        try:
            loop_thread().run(ack_through())
        except FencedError as error:
            raise self._fenced(error) from error

    async def _ack(self, shard: int, last: int) -> None:
        consumer = self._consumers[shard]
        if last >= 0 and (consumer.acked is None or last > consumer.acked):
            await consumer.ack_through(last)

    def _fenced(self, error: FencedError) -> FencedError:
        return FencedError(
            f"this query no longer owns {self._options.manifest_path} in {self.store.url}: a newer "
            "query or consumer has taken it over, and only one may acknowledge. Stop one of the two; to read "
            f"without owning the queue, set mode=read ({error})"
        )


class ReadQueue:
    """A queue that is only read: nothing is fenced, acknowledged or created."""

    def __init__(self, store: ObjectStore, options: BufferOptions, shards: Shards[ConsumerConfig]) -> None:
        self.store = store
        self._options = options
        self._first: dict[int, int] = {}
        self._show(shards)

    def _show(self, shards: Shards[ConsumerConfig]) -> None:
        self._readers = {shard: QueueReader(self.store, path) for shard, path in _manifests(shards).items()}
        self._sharded = shards.count is not None
        self._dequeued: dict[int, Mapping[int, str]] = {}

    @property
    def manifests(self) -> Mapping[int, str]:
        return {shard: reader.file.path for shard, reader in self._readers.items()}

    @classmethod
    def open(cls, options: BufferOptions, *, must_exist: bool) -> ReadQueue:
        """Open the queue for reading. Raise `StorageRejected` if it must exist and does not."""

        async def find() -> ReadQueue:
            store = open_store(options.store)
            shards = await find_shards(store, options.consumer, options.sharded)
            queue = cls(store, options, shards)
            if must_exist and shards.count is None:
                await queue._readers[0].require()
            return queue

        return loop_thread().run(find())

    def look(self) -> Indexes:
        """Return all entries. If an unused queue has become sharded, read its shards instead."""
        indexes = loop_thread().run(self._entries())
        self._first = {shard: index.first for shard, index in indexes.items()}
        return indexes

    async def _entries(self) -> Indexes:
        found = await asyncio.gather(*(reader.index() for reader in self._readers.values()))
        indexes = dict(zip(self._readers, found, strict=True))
        if not self._sharded and _is_unused(indexes):
            shards = await find_shards(self.store, self._options.consumer, self._options.sharded)
            if shards.count is not None:
                self._show(shards)
                return await self._entries()
        return indexes

    def dequeued(self, shard: int) -> Mapping[int, str]:
        """Return the dequeued log. It is read once; entries that leave the queue later are not checked.

        Include only entries that have left this queue. If a dequeued log outlived its manifest, it still has
        entries of the old queue under numbers that the new queue has not reached.
        """
        if shard not in self._dequeued:
            first = self._first.get(shard, 0)
            ledger = loop_thread().run(self._readers[shard].dequeued())
            self._dequeued[shard] = {n: location for n, location in ledger.items() if n < first}
        return self._dequeued[shard]

    def ack(self, offset: Mapping[int, int]) -> None:
        """Do nothing: a reader does not change the queue."""

    def close(self) -> None:
        loop_thread().run(self.store.close())


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The entries between a query's position and the end of its queue."""

    batches: int
    oldest_ms: int | None
    """The ingestion time of the next record, or None if there is none. Its age is the lag."""
    next: Offset
    """The end of the queue: the next sequence of every shard."""


class QueueWatch:
    """A read-only monitor of a query's backlog, for displays on the driver."""

    def __init__(self, queue: ReadQueue) -> None:
        self._queue = queue

    @classmethod
    def open(cls, options: BufferOptions) -> QueueWatch:
        """Open a watch. The queue need not exist yet. Raise `StorageError` or `ConfigError`."""
        return cls(ReadQueue.open(options, must_exist=False))

    def look(self, done: Mapping[int, int]) -> Backlog:
        """Return the backlog after `done`, the first undelivered sequence of every shard (0 if missing).

        This costs one small request per shard while nothing changes. `oldest_ms` is the minimum over the next
        batch of each shard, because batches are in the queue in the order in which they were stored.
        """
        indexes = self._queue.look()
        bounds = bounds_of(indexes)
        start = {shard: max(held.first, done.get(shard, 0)) for shard, held in bounds.items()}
        end = {shard: held.following for shard, held in bounds.items()}
        upcoming = [entries_between(indexes[s], start[s], min(start[s] + 1, end[s])) for s in bounds]
        times = [entry_time_ms(entry) for entries in upcoming for entry in entries]
        return Backlog(
            batches=backlog(start, end),
            oldest_ms=min((ms for ms in times if ms is not None), default=None),
            next=end,
        )

    def close(self) -> None:
        self._queue.close()


def _is_unused(indexes: Indexes) -> bool:
    """Return whether nothing was ever produced. The producers may then still store the number of shards."""
    return not any(index.footer.next_sequence for index in indexes.values())


def _manifests(shards: Shards[ConsumerConfig]) -> dict[int, str]:
    return {shard: config.manifest_key for shard, config in shards.configs.items()}


async def find_shards(store: ObjectStore, config: C, sharded: bool | None) -> Shards[C]:
    """Return the shards of a queue, if it has any. `sharded` is the user's option.

    Raise `ConfigError` if the option requires shards and there are none, or `StorageError`.
    """
    try:
        return await retry(
            lambda: read_shards(store, config, sharded=sharded), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
        )
    except ConfigError:
        raise
    except PenstockError as error:
        raise storage_error(error, f"looking for {config.manifest_key} in {store.url}") from error


class ObjectSizes:
    """The sizes of batch objects, requested in groups and cached while they are needed."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[tuple[int, int], int] = {}

    def forget_below(self, offset: Mapping[int, int]) -> None:
        self._known = {place: size for place, size in self._known.items() if place[1] >= offset[place[0]]}

    def size(self, index: EntryIndex, shard: int, sequence: int) -> int:
        """Return the size of a batch object, or 0 if it is missing: the task that fetches it reports that."""
        if (shard, sequence) not in self._known:
            entries = entries_between(index, sequence, sequence + _SIZES_AT_ONCE)
            for entry, size in zip(entries, loop_thread().run(self._fetch_sizes(entries)), strict=True):
                self._known[shard, entry.sequence] = size
        return self._known[shard, sequence]

    async def _fetch_sizes(self, entries: list[Entry]) -> list[int]:
        return await asyncio.gather(*(self._fetch_size(entry.location) for entry in entries))

    async def _fetch_size(self, location: str) -> int:
        try:
            info = await retry(
                lambda: self._store.head(location), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
            )
        except NotFound:
            return 0
        except PenstockError as error:
            raise storage_error(error, f"reading the size of {location}") from error
        return info.size
