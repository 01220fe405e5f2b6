"""Reads a queue for the console: its manifest by conditional requests, and its batches on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from penstock.buffer import (
    FOOTER_BYTES,
    BatchDescriptor,
    BatchMissing,
    ConsumedBatch,
    Entry,
    EntryIndex,
    QueueConfig,
    QueueReader,
    QueueSurvey,
    SerializationError,
    Snapshot,
    TransactionLog,
    entry_time_ms,
    find_tag,
    newest_version,
    read_shards,
    record_count,
    survey,
)
from penstock.clock import Clock
from penstock.console.relayed import Relayed, RelayMemory, sequences_in
from penstock.errors import NotFound
from penstock.objects import ByteRange, ObjectStore, StoreConfig, Version, open_store
from penstock.up import QueuePlace

_Readers: TypeAlias = dict[int, tuple[QueueReader, str]]
_SIZES_KEPT: Final = 20_000
_AT_ONCE: Final = 8
_COUNTED_PER_LOOK: Final = 64
"""Limit of the new batches that one poll counts. With more, the rate is unknown."""
_RETRY_S: Final = 1.0
LAYOUT_AGAIN_S: Final = 60.0
"""How often a queue without shards is checked for them. A queue is drained before it gets shards."""
_SEARCHED_BYTES: Final = 16 << 20
_GRACE_MS: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The size of a batch. The fields are None if its object is missing or damaged."""

    records: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReading:
    """The state of one manifest."""

    shard: int
    exists: bool
    depth: int
    first: int
    following: int
    """The next sequence."""
    epoch: int
    manifest_bytes: int
    oldest_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReading:
    """The state of a queue, and its input since the console began to poll it."""

    shards: tuple[ShardReading, ...]
    is_sharded: bool
    positions: Mapping[str, int | None]
    """The last committed version of each application of interest."""
    seen_records: int | None
    """Records of new batches, or None if there were too many to count."""
    seen_bytes: int | None

    @property
    def exists(self) -> bool:
        return any(shard.exists for shard in self.shards)

    @property
    def depth(self) -> int:
        return sum(shard.depth for shard in self.shards)

    @property
    def following(self) -> int:
        return sum(shard.following for shard in self.shards)

    @property
    def first(self) -> int:
        return sum(shard.first for shard in self.shards)

    @property
    def manifest_bytes(self) -> int:
        return sum(shard.manifest_bytes for shard in self.shards)

    @property
    def epoch(self) -> int:
        """The sum of the epochs of all shards, which rises with each of them."""
        return sum(shard.epoch for shard in self.shards)

    @property
    def oldest_ms(self) -> int | None:
        return min((shard.oldest_ms for shard in self.shards if shard.oldest_ms is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """An entry of the manifest, with the size and time of its batch."""

    shard: int
    sequence: int
    location: str
    at_ms: int | None
    producer: str | None
    """The application that appended it in a transaction, if any."""
    metadata: Sequence[bytes]
    size: BatchSize


class QueueSource:
    """A queue of the fleet, which is only read. Nothing is fenced, acknowledged or changed."""

    def __init__(self, place: QueuePlace, clock: Clock) -> None:
        self.place = place
        self._clock = clock
        store_url = place.store if "://" in place.store else Path(place.store).absolute().as_uri()
        self._store_config = StoreConfig(url=store_url, options=place.store_options)
        self._config = QueueConfig(
            store=self._store_config,
            manifest_path=place.manifest_path,
            data_path_prefix=place.data_path_prefix,
        )
        self._opened: ObjectStore | None = None
        self._readers: _Readers = {}
        self._is_sharded = False
        self._layout_s = 0.0
        """When the number of shards was last read."""
        self._books: dict[int, tuple[Version | None, Mapping[str, int]]] = {}
        """For each shard, the transaction log, and the version of the manifest that was read before it."""
        self._sizes: OrderedDict[str, BatchSize] = OrderedDict()
        self._counted: dict[int, int] = {}
        """The sequence per shard up to which batches are counted."""
        self._seen: tuple[int, int] | None = (0, 0)
        self._indexes: dict[int, EntryIndex] = {}
        self._memory = RelayMemory()
        self.apps: frozenset[str] = frozenset()
        """Applications whose positions are read."""

    @property
    def store_url(self) -> str:
        return self._store_config.url

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _store(self) -> ObjectStore:
        """The store, opened on first use, so that wrong settings affect only this queue."""
        if self._opened is None:
            self._opened = open_store(replace(self._store_config, retries=1))
        return self._opened

    async def readers(self) -> _Readers:
        """Return the reader and folder of each shard. A queue without shards is its own shard 0."""
        if not self._knows_layout():
            shards = await read_shards(self._store, self._config)
            self._layout_s = self._clock.monotonic()
            if shards.count is not None and not self._is_sharded:
                self._readers, self._is_sharded = {}, True
                self._counted, self._books = {}, {}
            if not self._readers:
                self._readers = {shard: self._reader(own) for shard, own in shards.configs.items()}
        return self._readers

    def _knows_layout(self) -> bool:
        """Return whether the shards are known without a request.

        Their number never changes. A manifest without shards is trusted for `LAYOUT_AGAIN_S`.
        """
        if self._is_sharded or not self._readers:
            return self._is_sharded
        known = self._readers[0][0].known
        has_manifest = known is not None and known.version is not None
        return has_manifest and self._clock.monotonic() - self._layout_s < LAYOUT_AGAIN_S

    def _reader(self, config: QueueConfig) -> tuple[QueueReader, str]:
        path = config.manifest_key
        return QueueReader(self._store, path, retry_deadline_s=_RETRY_S, clock=self._clock), config.prefix

    async def indexes(self) -> dict[int, EntryIndex]:
        """Return the current entries of every shard."""
        return await _indexes_of(await self.readers())

    async def look(self) -> QueueReading:
        """Read the queue: one conditional request per shard, and two for each new batch.

        If the queue changed and batches of a relay have left it, this takes one more request per shard. While
        there is no queue, and once a minute without shards, it takes one more for the layout.
        """
        readers = await self.readers()
        indexes = self._indexes = await _indexes_of(readers)
        self._memory.look(indexes, self.apps)
        await self._count_new(indexes)
        shards = []
        for shard, index in indexes.items():
            snapshot = _known(readers[shard][0])
            shards.append(
                ShardReading(
                    shard=shard,
                    exists=snapshot.version is not None,
                    depth=len(index),
                    first=index.first,
                    following=index.footer.next_sequence,
                    epoch=index.footer.epoch,
                    manifest_bytes=len(snapshot.raw) if snapshot.version is not None else 0,
                    oldest_ms=entry_time_ms(index[0]) if len(index) else None,
                )
            )
        seen = self._seen
        return QueueReading(
            shards=tuple(shards),
            is_sharded=self._is_sharded,
            positions={app: await self._position(readers, app) for app in sorted(self.apps)},
            seen_records=None if seen is None else seen[0],
            seen_bytes=None if seen is None else seen[1],
        )

    async def relayed(self, app: str, topic: str, seq: int) -> Relayed | None:
        """Return the batch with a topic's record from an application, if it was seen in the queue."""
        placed = self._memory.find(app, topic, seq)
        if placed is None:
            return None
        end = placed.end
        if end is None:
            end = (await self.sizes([placed.location]))[placed.location].records
        return placed.place_of(seq, end)

    async def search(self, seq: int) -> Relayed | None:
        """Find the batch with a record of a topic by the sequences in the records.

        The topic must be the only one that is relayed here. By default, a relay stores records in order and
        with their sequences, so a binary search over the stored batches finds the record. Only an exact match
        counts.
        """
        for shard, (reader, _) in (await self.readers()).items():
            index = await reader.index()
            places = {**await reader.dequeued(), **dict(index.locations())}
            sequences = sorted(places)
            low, high = 0, len(sequences) - 1
            while low <= high:
                middle = (low + high) // 2
                seqs = await self._seqs(reader, places[sequences[middle]])
                if seqs is None:  # older batches are collected first
                    low = middle + 1
                elif not seqs:
                    break
                elif seqs[0] <= seq <= seqs[-1]:
                    if seq in seqs:
                        return Relayed(shard=shard, sequence=sequences[middle], index=seqs.index(seq))
                    break
                elif seqs[-1] < seq:
                    low = middle + 1
                else:
                    high = middle - 1
        return None

    async def _seqs(self, reader: QueueReader, location: str) -> list[int] | None:
        """Return the sequences in the records of a batch, if they have any, or None without the batch."""
        size = (await self.sizes([location]))[location]
        if size.bytes is None:
            return None
        if size.bytes > _SEARCHED_BYTES:
            return []
        try:
            batch = await reader.fetch(BatchDescriptor(sequence=0, location=location, metadata=()))
        except BatchMissing:
            return None
        return sequences_in(batch.entries)

    async def following(self, shard: int) -> int:
        """Return the next sequence of a shard."""
        return (await self.indexes())[shard].footer.next_sequence

    async def fetch(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch a batch. Raise `BufferError`."""
        reader, _ = next(iter((await self.readers()).values()))
        return await reader.fetch(descriptor)

    def oldest_from(self, reached: Mapping[int, int]) -> int | None:
        """Return the time of the oldest unread entry at the last poll, or None if all are read."""
        found = [
            entry_time_ms(index[sequence - index.first])
            for shard, index in self._indexes.items()
            if (sequence := max(reached.get(shard, 0), index.first)) < index.footer.next_sequence
        ]
        return min((ms for ms in found if ms is not None), default=None)

    async def _position(self, readers: _Readers, app: str) -> int | None:
        """Return the last version that `app` committed, from the queue or the transaction log."""
        best: int | None = None
        for shard, (reader, _) in readers.items():
            queued = newest_version(_known(reader).raw, app)
            if queued is None:
                queued = (await self._book(shard, reader)).get(app)
            if queued is not None:
                best = queued if best is None else max(best, queued)
        return best

    async def _book(self, shard: int, reader: QueueReader) -> Mapping[str, int]:
        """Return the transaction log, which is read again when the manifest has changed.

        A tag is entered there before its entry leaves the queue. A log that was read after a manifest
        therefore contains the tag of every entry that has left the manifest.
        """
        version = _known(reader).version
        held = self._books.get(shard)
        if held is None or held[0] != version:
            held = self._books[shard] = (version, await TransactionLog(reader.file).read())
        return held[1]

    async def _count_new(self, indexes: Mapping[int, EntryIndex]) -> None:
        """Add the input since the last poll. Too much input restarts the count."""
        fresh: list[str] = []
        new = 0
        for shard, index in indexes.items():
            last = index.footer.next_sequence - 1
            known = self._counted.get(shard, last)
            new += max(0, last - known)
            fresh += [entry.location for entry in index.after(known, _COUNTED_PER_LOOK)]
            self._counted[shard] = last
        if len(fresh) < new or new > _COUNTED_PER_LOOK:  # too many to count, or already dequeued
            self._seen = None
            return
        sizes = await self.sizes(fresh)
        records = [size.records for size in sizes.values() if size.records is not None]
        amounts = [size.bytes for size in sizes.values() if size.bytes is not None]
        if len(records) < len(fresh) or len(amounts) < len(fresh):
            self._seen = None
            return
        before = self._seen or (0, 0)
        self._seen = (before[0] + sum(records), before[1] + sum(amounts))

    async def sizes(self, locations: Iterable[str]) -> dict[str, BatchSize]:
        """Return the sizes of batches. A batch never changes, so each is read once."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(location: str) -> tuple[str, BatchSize]:
            known = self._sizes.get(location)
            if known is None:
                async with limit:
                    known = await _size_of(self._store, location)
                if known.records is not None:
                    self._sizes[location] = known
                    while len(self._sizes) > _SIZES_KEPT:
                        self._sizes.popitem(last=False)
            return location, known

        return dict(await asyncio.gather(*(one(location) for location in locations)))

    async def newest(self, limit: int) -> list[EntryView]:
        """Return the last entries of all shards, newest first, with their sizes."""
        found = [
            (shard, index[number])
            for shard, index in (await self.indexes()).items()
            for number in range(max(0, len(index) - limit), len(index))
        ]
        found.sort(key=lambda pair: (entry_time_ms(pair[1]) or 0, pair[1].sequence), reverse=True)
        found = found[:limit]
        sizes = await self.sizes(entry.location for _, entry in found)
        return [view_of(shard, entry, sizes[entry.location]) for shard, entry in found]

    async def surveys(self) -> list[QueueSurvey]:
        """Return the statistics of each shard. Each costs a listing, so do not call this every second."""
        now = self._clock.now_ms()
        return [
            await survey(reader, prefix, now_ms=now, grace_ms=_GRACE_MS)
            for reader, prefix in (await self.readers()).values()
        ]

    async def find(self, shard: int, sequence: int) -> tuple[Entry | None, str | None]:
        """Return the entry of a sequence, or its location if it was dequeued and is still in the log."""
        readers = await self.readers()
        if shard not in readers:
            raise NotFound(f"{self.place.name} has no shard {shard}")
        reader, _ = readers[shard]
        index = await reader.index()
        if index.first <= sequence < index.footer.next_sequence:
            return index[sequence - index.first], None
        return None, (await reader.dequeued()).get(sequence)

    async def locate(self, text: str) -> tuple[int, int, str] | None:
        """Return (shard, sequence, location) of a batch with this location or ULID, or None.

        The batch is in the queue or was dequeued recently.
        """
        for shard, (reader, _) in (await self.readers()).items():
            index, dequeued = await reader.index(), await reader.dequeued()
            entries = itertools.chain(index.locations(), dequeued.items())
            # This runs in a thread because a queue without a consumer may have a hundred thousand entries.
            found = await asyncio.to_thread(_named, entries, text)
            if found is not None:
                return shard, *found
        return None


def _named(places: Iterable[tuple[int, str]], text: str) -> tuple[int, str] | None:
    """Return the batch with this location or ULID."""
    for sequence, location in places:
        if text in (location, location.rpartition("/")[2].removesuffix(".batch")):
            return sequence, location
    return None


async def _indexes_of(readers: _Readers) -> dict[int, EntryIndex]:
    found = await asyncio.gather(*(reader.index() for reader, _ in readers.values()))
    return dict(zip(readers, found, strict=True))


def _known(reader: QueueReader) -> Snapshot:
    assert reader.known is not None, "its index was read"
    return reader.known


def view_of(shard: int, entry: Entry, size: BatchSize) -> EntryView:
    tag = find_tag(entry.tail)
    return EntryView(
        shard=shard,
        sequence=entry.sequence,
        location=entry.location,
        at_ms=entry_time_ms(entry),
        producer=None if tag is None else tag.app,
        metadata=[item.payload for item in entry.metadata],
        size=size,
    )


async def _size_of(store: ObjectStore, location: str) -> BatchSize:
    try:
        info = await store.head(location)
        tail = await store.get(location, ByteRange(start=None, length=FOOTER_BYTES))
        return BatchSize(records=record_count(tail.data), bytes=info.size)
    except (NotFound, SerializationError):
        return BatchSize(records=None, bytes=None)
