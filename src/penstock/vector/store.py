"""A collection of vectors over object storage, with this process as its only writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import (
    ApplyError,
    Durability,
    FedSource,
    FlushError,
    FlushHandle,
    Storage,
    SyncMode,
    WriteCoordinator,
    WriteHandle,
)
from penstock.errors import Corrupt, Fenced, InvalidInput, PenstockError, Unavailable
from penstock.metrics import DEFAULT_REGISTRY, Registry
from penstock.objects import Workers
from penstock.vector.codec import decode_id, decode_vector, merge_records
from penstock.vector.config import VectorConfig
from penstock.vector.delta import VectorDelta, Write
from penstock.vector.filters import Filter, check_filter
from penstock.vector.flush import Snapshot, VectorFlusher
from penstock.vector.index import SAMPLE_MAX, Found, Index, Recall, Tally, compare, sampled
from penstock.vector.keys import RecordType, data_key, dictionary_key, record_prefix
from penstock.vector.load import agreed_collection, load
from penstock.vector.model import (
    VECTOR_FIELD,
    Collection,
    Components,
    Hit,
    Hits,
    Vector,
    check_id,
    components,
)

P = ParamSpec("P")
T = TypeVar("T")

_THREADS_MAX: Final = 4
"""Maximum number of search threads. More searches than cores only slow each other down."""


class Readers:
    """Limits and threads of searches. Flushes use a separate thread, so searches never delay writers."""

    def __init__(self, *, searches_max: int, timeout_s: float) -> None:
        self._searches_max = searches_max
        self._timeout_s = timeout_s
        self._running = 0
        self._workers = Workers("vector-search", min(_THREADS_MAX, os.cpu_count() or 1))

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold a search slot. Raises `Unavailable` if all slots are in use."""
        if self._running >= self._searches_max:
            raise Unavailable(f"{self._searches_max} searches are running, which is the limit: retry later")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Hold a search slot within the time limit.

        Raises `Unavailable` if no slot is free or the time is up.
        """
        with self.place():
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    yield
            except TimeoutError:
                if not limit.expired():
                    raise
                raise Unavailable(
                    f"the search took longer than {self._timeout_s:g} s and was stopped"
                ) from None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the call on a thread. A call that is cancelled before it starts is never run."""
        return await self._workers.run(call, *args, **kwargs)

    def close(self) -> None:
        self._workers.close()


_LOG = logging.getLogger(__name__)

K_MAX: Final = 10_000
_INLINE_CELLS: Final = 2_000_000
"""Number of components that a search may compare on the event loop, in about a millisecond. Larger
searches use a thread."""


class VectorStore:
    """Store of vectors by id. Writes have an epoch and a level of durability; searches see the last flush.

    store = await VectorStore.open(VectorConfig(store="file:///data", dimensions=3, metric="cosine"))
    handle = await store.upsert([Vector("a", [1, 0, 0], {"lang": "en"})])
    await store.flush()
    hits = await store.search([1, 0, 0], k=10)

    Opening a collection fences its previous writer. A fenced or failed store refuses every call except
    `close`.
    """

    def __init__(
        self,
        storage: Storage,
        collection: Collection,
        coordinator: WriteCoordinator[Write, VectorDelta, Snapshot],
        failed: asyncio.Future[FlushError],
        *,
        flusher: VectorFlusher,
        readers: Readers,
        registry: Registry,
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._failed = failed
        self._flusher = flusher
        self._readers = readers
        self._registry = registry
        self._damaged_hits = registry.counter(
            "vector.damaged_hits", "Hits that searches left out because their records are damaged."
        )
        self._reported: set[int] = set()
        self.collection = collection

    @classmethod
    async def open(
        cls,
        config: VectorConfig,
        *,
        storage: Storage | None = None,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> VectorStore:
        """Open the collection and read its vectors into memory. Create it if it does not exist.

        Damaged parts that can be derived from others are rebuilt, stored, logged and counted.

        `storage` replaces the configured store and must use the merge operator `merge_records`. Either is
        closed with the store. Raises `ConfigError` if the collection was created with other dimensions,
        another metric or another schema. Raises `Corrupt`, `Fenced` and, if the store fails or does not
        respond within `open_timeout`, `Unavailable`.
        """
        storage = storage or await _open_storage(config)
        try:
            collection = await agreed_collection(storage, config.claim)
            held = await load(storage, collection, config.tuning)
            flusher, source = VectorFlusher(storage, held), FedSource(held.position)
            if held.damage is not None:
                held.damage.report(registry or DEFAULT_REGISTRY)
                # Store the rebuilt parts in one batch.
                await flusher.flush(VectorDelta(source))
                await flusher.sync()
            failed: asyncio.Future[FlushError] = asyncio.get_running_loop().create_future()
            coordinator: WriteCoordinator[Write, VectorDelta, Snapshot] = WriteCoordinator(
                lambda: VectorDelta(source),
                flusher,
                image=collection,
                snapshot=await flusher.snapshot(),
                config=config.coordinator,
                clock=clock,
                registry=registry,
                product="vector",
                size_of=lambda write: write.items,
                on_failure=failed.set_result,
            )
        except BaseException:
            await storage.close()
            raise
        coordinator.start()
        return cls(
            storage,
            collection,
            coordinator,
            failed,
            flusher=flusher,
            readers=Readers(searches_max=config.searches_max, timeout_s=config.search_timeout_s),
            registry=registry or DEFAULT_REGISTRY,
        )

    # For writers

    async def upsert(self, vectors: Iterable[Vector], *, timeout: float | None = None) -> WriteHandle:
        """Store vectors. Each replaces the vector with its id. If one is invalid, none is stored.

        Returns when they are applied; wait on the handle for higher levels. Raises `InvalidInput`,
        `WriteTimeout` if there is no room within `timeout` seconds, and `FlushError` if the store has
        stopped.
        """
        return await self.write(Write.upsert(vectors), timeout=timeout)

    async def delete(self, ids: Iterable[str], *, timeout: float | None = None) -> WriteHandle:
        """Delete vectors. An unknown id is not an error. Otherwise like `upsert`."""
        return await self.write(Write.delete(ids), timeout=timeout)

    async def write(self, write: Write, *, timeout: float | None = None) -> WriteHandle:
        """Apply upserts and deletions in order, with the position of their source. Otherwise like
        `upsert`."""
        handle = await self._coordinator.write(write, timeout=timeout)
        try:
            await handle.epoch()
        except ApplyError as error:
            if isinstance(error.__cause__, InvalidInput):
                raise error.__cause__ from None
            raise
        return handle

    async def flush(self, *, durable: bool = True) -> None:
        """Wait until all earlier writes are visible and, with `durable`, durable. Raises `FlushError`."""
        handle: FlushHandle = await self._coordinator.flush(durable=durable)
        await handle.wait(Durability.DURABLE if durable else Durability.FLUSHED)

    # For readers: flushed data only

    def __len__(self) -> int:
        return self._snapshot.index.live

    @property
    def position(self) -> int | None:
        """The position in the source of the vectors, as of the last flush."""
        position = self._snapshot.position
        return None if position is None else position.sequence

    @property
    def source(self) -> str:
        """The name of the source that `position` refers to, or empty if it has none."""
        position = self._snapshot.position
        return "" if position is None else position.source

    @property
    def location(self) -> str:
        """The name of the batch that `position` refers to, or empty if none was stored."""
        position = self._snapshot.position
        return "" if position is None else position.location

    async def get(self, external_id: str) -> Vector | None:
        """Return the vector as written, or None.

        Raises `Unavailable` (also after the time limit of a search), `Fenced`, and `Corrupt` if its record is
        damaged. Writing the vector again repairs the record.
        """
        check_id(external_id)
        snapshot = self._snapshot
        async with self._readers.limited():
            stored = await snapshot.records.get(dictionary_key(external_id))
            try:
                return None if stored is None else await _record(snapshot, decode_id(stored), external_id)
            except Corrupt as error:
                raise Corrupt(f"vector {external_id!r} is damaged, write it again: {error}") from None

    async def search(
        self,
        vector: Components,
        k: int = 10,
        *,
        filter: Filter | None = None,
        include_fields: Sequence[str] | None = None,
        nprobe: int | None = None,
    ) -> Hits:
        """Return the `k` vectors nearest to this one, best first.

        `include_fields` selects the attributes of the hits, which include `vector`. None selects all, and an
        empty list avoids reading them. `nprobe` is the number of posting lists to compare. Without it, up to
        `exact_max` vectors (after the filter) are all compared. Fewer than `k` are returned only if no more
        match. A vector with a damaged record is left out and named in `damaged` of the result. Raises
        `InvalidInput`, and `Unavailable` if too many searches are running or this one takes too long.
        """
        query = components(vector)
        self.collection.check_components(query, "the query")
        self._check_search(k, filter, nprobe)
        if isinstance(include_fields, str):
            raise InvalidInput("include_fields must be a list of names")
        self.collection.check_names(include_fields or ())
        snapshot = self._snapshot
        index = snapshot.index
        wanted = k
        records: dict[int, Vector | None] = {}
        async with self._readers.limited():
            while True:
                if index.count * self.collection.dimensions <= _INLINE_CELLS:
                    found = index.search(query, wanted, filter=filter, nprobe=nprobe)
                else:
                    found = await self._readers.run(index.search, query, wanted, filter=filter, nprobe=nprobe)
                if include_fields is not None and not include_fields:
                    return _bare_hits(index, found)
                await self._read(snapshot, found, records)
                hits = _hits(index, found, records, k, include_fields)
                if len(hits) == k or len(found.slots) < wanted:
                    return hits
                # Damaged records displace intact ones, so search for more hits each time.
                wanted = k + 2 * len(hits.damaged)

    async def recall(
        self, *, sample: int = 100, k: int = 10, filter: Filter | None = None, nprobe: int | None = None
    ) -> Recall:
        """Measure the share of exact results that `search` finds, for a sample of the stored vectors.

        Each sampled vector costs an exact search, in a thread. Together they count as one running search,
        without a time limit. A measurement without `filter` and `nprobe` also sets the metric
        `vector.recall`. Raises the same errors as `search`.
        """
        if isinstance(sample, bool) or not isinstance(sample, int) or not 1 <= sample <= SAMPLE_MAX:
            raise InvalidInput(f"sample must be 1 to {SAMPLE_MAX:,}, not {sample!r}")
        self._check_search(k, filter, nprobe)
        index, total = self._snapshot.index, Tally()
        with self._readers.place():
            slots = (await self._readers.run(sampled, index, sample)).tolist()
            for slot in slots:
                one = await self._readers.run(compare, index, slot, k, filter=filter, nprobe=nprobe)
                total = Tally(total.found + one.found, total.wanted + one.wanted)
        if filter is None and nprobe is None:
            self._registry.gauge("vector.recall", "Recall of the last measurement.").set(total.share)
        return Recall(recall=total.share, k=k, sample=len(slots), vectors=index.live)

    def _check_search(self, k: int, filter: Filter | None, nprobe: int | None) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= K_MAX:
            raise InvalidInput(f"k must be 1 to {K_MAX:,}, not {k!r}")
        if nprobe is not None and (isinstance(nprobe, bool) or not isinstance(nprobe, int) or nprobe < 1):
            raise InvalidInput(f"nprobe must be a whole number of at least 1, not {nprobe!r}")
        if filter is not None:
            check_filter(self.collection, filter)

    async def _read(self, snapshot: Snapshot, found: Found, records: dict[int, Vector | None]) -> None:
        """Add the missing records of these rows by slot, with None for damaged ones."""
        slots = [slot for slot in found.slots.tolist() if slot not in records]
        read = await asyncio.gather(*(self._sound_record(snapshot, slot) for slot in slots))
        records.update(zip(slots, read, strict=True))

    async def _sound_record(self, snapshot: Snapshot, slot: int) -> Vector | None:
        internal_id, name = int(snapshot.index.ids[slot]), snapshot.index.names[slot]
        try:
            return await _record(snapshot, internal_id, name)
        except Corrupt as error:
            if internal_id not in self._reported:
                self._reported.add(internal_id)
                _LOG.error("searches leave %r out until it is written again: %s", name, error)
            self._damaged_hits.inc()
            return None

    @property
    def _snapshot(self) -> Snapshot:
        return self._coordinator.view().snapshot

    # Lifecycle

    @property
    def failed(self) -> FlushError | None:
        """The error that stopped the store (fencing or a failed storage), or None."""
        return self._failed.result() if self._failed.done() else None

    async def failure(self) -> FlushError:
        """Wait until an error stops the store, and return it."""
        return await asyncio.shield(self._failed)

    async def check(self) -> None:
        """Check with the storage that this process is still its writer. Raises `Fenced` and `Unavailable`.

        Raises `OutcomeUnknown` if the storage has stopped permanently. Writes detect fencing. A process that
        only reads would otherwise keep returning old data.
        """
        try:
            await self._storage.get(record_prefix(RecordType.COLLECTION))
        except Fenced as error:
            raise Fenced(f"another process has opened the collection and fenced this one: {error}") from error

    async def close(self) -> None:
        """Make all writes durable and release the collection. Raises the `FlushError` that stopped it."""
        try:
            await self._coordinator.close()
        finally:
            self._close_threads()
            await self._storage.close()

    def _close_threads(self) -> None:
        self._flusher.close()
        self._readers.close()

    @property
    def unstored(self) -> int:
        """Number of accepted writes that are not durable yet."""
        applied = self._coordinator.watermark(Durability.APPLIED)
        return applied - self._coordinator.watermark(Durability.DURABLE)

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._coordinator.storage_wait_s

    async def abort(self) -> None:
        """Stop immediately, as a crash would. Writes that are not durable may be lost."""
        await self._coordinator.abort()
        self._close_threads()
        try:
            await self._storage.close()
        except PenstockError:
            pass

    async def __aenter__(self) -> VectorStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _open_storage(config: VectorConfig) -> Storage:
    from penstock.coordinator import SlateStorage, SlateStore

    place = SlateStore(config.store, config.store_options)
    at_once = config.sync_mode is SyncMode.EVERY_FLUSH
    return await SlateStorage.open(
        place,
        config.name,
        merge=merge_records,
        persist_at_once=at_once,
        open_timeout_s=config.open_timeout_s,
    )


async def _record(snapshot: Snapshot, internal_id: int, name: str) -> Vector:
    """Return the stored vector with this name. Raises `Corrupt`."""
    key = data_key(internal_id)
    data = await snapshot.records.get(key)
    if data is None:
        raise Corrupt(f"record {key.hex()} is missing")
    try:
        vector = decode_vector(data, snapshot.index.collection.dimensions)
    except Corrupt as error:
        raise Corrupt(f"record {key.hex()}: {error}") from None
    if vector.id != name:
        raise Corrupt(f"record {key.hex()} belongs to {vector.id!r}")
    return vector


def _bare_hits(index: Index, found: Found) -> Hits:
    """Return hits without attributes, which requires no records."""
    return Hits(
        Hit(id=index.names[slot], score=score, attributes={})
        for slot, score in zip(found.slots.tolist(), found.scores.tolist(), strict=True)
    )


def _hits(
    index: Index,
    found: Found,
    records: Mapping[int, Vector | None],
    k: int,
    include_fields: Sequence[str] | None,
) -> Hits:
    """Return the best `k` with intact records, and the ids of damaged ones among the results."""
    wanted = None if include_fields is None else set(include_fields)
    hits: list[Hit] = []
    damaged: list[str] = []
    for slot, score in zip(found.slots.tolist(), found.scores.tolist(), strict=True):
        record = records[slot]
        if record is None:
            damaged.append(index.names[slot])
        else:
            hits.append(_hit(record, score, wanted))
        if len(hits) == k:
            break
    return Hits(hits, damaged=damaged)


def _hit(record: Vector, score: float, wanted: set[str] | None) -> Hit:
    if wanted is None:
        return Hit(id=record.id, score=score, attributes=record.attributes, vector=record.vector)
    attributes = {name: value for name, value in record.attributes.items() if name in wanted}
    return Hit(
        id=record.id,
        score=score,
        attributes=attributes,
        vector=record.vector if VECTOR_FIELD in wanted else None,
    )
