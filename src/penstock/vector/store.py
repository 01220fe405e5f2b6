"""A collection of vectors over object storage, with this process as its one writer."""

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
"""More concurrent searches than cores only make each one slower."""


class Readers:
    """Flushes have a thread of their own, so that no number of readers makes writers wait."""

    def __init__(self, *, searches_max: int, timeout_s: float) -> None:
        self._searches_max = searches_max
        self._timeout_s = timeout_s
        self._under_way = 0
        self._workers = Workers("vector-search", min(_THREADS_MAX, os.cpu_count() or 1))

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Be one of those under way. Raises `Unavailable` if there are as many as may be."""
        if self._under_way >= self._searches_max:
            raise Unavailable(f"{self._searches_max} searches are under way, which is the cap: come again")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Hold a search slot within the time limit.

        Raises `Unavailable` without a slot or when time is over.
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
                    f"the search took longer than {self._timeout_s:g} s and was given up"
                ) from None

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it on a thread. One that was given up before it began is never begun."""
        return await self._workers.run(call, *args, **kwargs)

    def close(self) -> None:
        self._workers.close()


_LOG = logging.getLogger(__name__)

K_MAX: Final = 10_000
_INLINE_CELLS: Final = 2_000_000
"""Components a search may compare on the event loop, about a millisecond; more are compared on a thread."""


class VectorStore:
    """Vectors under ids: writes have an epoch and a level of durability, searches see the last flush.

    store = await VectorStore.open(VectorConfig(store="file:///data", dimensions=3, metric="cosine"))
    handle = await store.upsert([Vector("a", [1, 0, 0], {"lang": "en"})])
    await store.flush()
    hits = await store.search([1, 0, 0], k=10)

    Opening a collection fences its previous writer. A fenced or failed store refuses everything but `close`.
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
        self._told: set[int] = set()
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
        """Open the collection, or create it if there is none; its vectors are read into memory.

        Damaged parts that can be derived from others are rebuilt, stored, logged and counted.

        `storage` replaces the configured store; its merge operator is `merge_records`. Either is closed with
        the store. Raises `ConfigError` if the collection was created with other dimensions, another metric or
        another schema, `Corrupt`, `Fenced`, and `Unavailable`, also if the store does not answer within
        `open_timeout`.
        """
        storage = storage or await _open_storage(config)
        try:
            collection = await agreed_collection(storage, config.claim)
            held = await load(storage, collection, config.tuning)
            flusher, source = VectorFlusher(storage, held), FedSource(held.position)
            if held.damage is not None:
                held.damage.tell(registry or DEFAULT_REGISTRY)
                # Store the rebuilt parts, as one batch.
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
        """Store vectors, each replacing the vector of its id; all of them or, if one is invalid, none.

        Returns when they are applied; wait on the handle for more. Raises `InvalidInput`, `WriteTimeout` if
        there is no room within `timeout` seconds, and `FlushError` when the store has stopped.
        """
        return await self.write(Write.upsert(vectors), timeout=timeout)

    async def delete(self, ids: Iterable[str], *, timeout: float | None = None) -> WriteHandle:
        """Delete vectors. An unknown id is no error. Otherwise as `upsert`."""
        return await self.write(Write.delete(ids), timeout=timeout)

    async def write(self, write: Write, *, timeout: float | None = None) -> WriteHandle:
        """Apply upserts and deletions in order, with the position of their source. Otherwise as `upsert`."""
        handle = await self._coordinator.write(write, timeout=timeout)
        try:
            await handle.epoch()
        except ApplyError as error:
            if isinstance(error.__cause__, InvalidInput):
                raise error.__cause__ from None
            raise
        return handle

    async def flush(self, *, durable: bool = True) -> None:
        """Return when everything written before is visible, and with `durable` safe. Raises `FlushError`."""
        handle: FlushHandle = await self._coordinator.flush(durable=durable)
        await handle.wait(Durability.DURABLE if durable else Durability.FLUSHED)

    # For readers: only what is flushed

    def __len__(self) -> int:
        return self._snapshot.index.live

    @property
    def position(self) -> int | None:
        """The position in the source of the vectors, as of the last flush."""
        position = self._snapshot.position
        return None if position is None else position.sequence

    @property
    def source(self) -> str:
        """The name of the source that `position` refers to; empty if it has none."""
        position = self._snapshot.position
        return "" if position is None else position.source

    @property
    def location(self) -> str:
        """The name of the batch that `position` refers to; empty if none was stored."""
        position = self._snapshot.position
        return "" if position is None else position.location

    async def get(self, external_id: str) -> Vector | None:
        """Return the vector as it was written, or None.

        Raises `Unavailable` (also after the time limit of a search), `Fenced`, and `Corrupt` if its record
        is damaged; writing the vector again repairs that.
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

        `include_fields` are the attributes of the hits, `vector` among them; None stands for all, and an
        empty list saves reading them. `nprobe` is the number of posting lists to compare; without it, up to
        `exact_max` vectors (after the filter) are compared completely. Fewer than `k` are returned only if no
        more match. A vector with a damaged record is left out and named in `damaged` of the result. Raises
        `InvalidInput`, and `Unavailable` if too many searches are running or this one takes too long.
        """
        query = components(vector)
        self.collection.check_components(query, "the query")
        self._check_search(k, filter, nprobe)
        if isinstance(include_fields, str):
            raise InvalidInput("include_fields is a list of names")
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
                # Each damaged one is in the place of a sound one: look for as many more, and then for more.
                wanted = k + 2 * len(hits.damaged)

    async def recall(
        self, *, sample: int = 100, k: int = 10, filter: Filter | None = None, nprobe: int | None = None
    ) -> Recall:
        """Measure the share of exact results that `search` finds, over a sample of the stored vectors.

        Each sampled vector costs an exact search, in a thread; together they count as one running search,
        without a time limit. A measurement without a filter and `nprobe` also sets the metric
        `vector.recall`. Raises as `search` does.
        """
        if isinstance(sample, bool) or not isinstance(sample, int) or not 1 <= sample <= SAMPLE_MAX:
            raise InvalidInput(f"sample is 1 to {SAMPLE_MAX:,}, not {sample!r}")
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
            raise InvalidInput(f"k is 1 to {K_MAX:,}, not {k!r}")
        if nprobe is not None and (isinstance(nprobe, bool) or not isinstance(nprobe, int) or nprobe < 1):
            raise InvalidInput(f"nprobe is a whole number of at least 1, not {nprobe!r}")
        if filter is not None:
            check_filter(self.collection, filter)

    async def _read(self, snapshot: Snapshot, found: Found, records: dict[int, Vector | None]) -> None:
        """Add the records of these rows that are not there yet, by slot: None for a damaged one."""
        slots = [slot for slot in found.slots.tolist() if slot not in records]
        read = await asyncio.gather(*(self._sound_record(snapshot, slot) for slot in slots))
        records.update(zip(slots, read, strict=True))

    async def _sound_record(self, snapshot: Snapshot, slot: int) -> Vector | None:
        internal_id, name = int(snapshot.index.ids[slot]), snapshot.index.names[slot]
        try:
            return await _record(snapshot, internal_id, name)
        except Corrupt as error:
            if internal_id not in self._told:
                self._told.add(internal_id)
                _LOG.error("searches leave %r out until it is written again: %s", name, error)
            self._damaged_hits.inc()
            return None

    @property
    def _snapshot(self) -> Snapshot:
        return self._coordinator.view().snapshot

    # Life

    @property
    def failed(self) -> FlushError | None:
        """The error that stopped the store, or None: a newer writer, or a failed storage."""
        return self._failed.result() if self._failed.done() else None

    async def failure(self) -> FlushError:
        """Wait until an error stops the store, and return it."""
        return await asyncio.shield(self._failed)

    async def check(self) -> None:
        """Check with the storage that this process is still its writer. Raises `Fenced` and `Unavailable`.

        Raises `OutcomeUnknown` if the storage has stopped for good. Writes notice fencing; a process that
        only reads would keep returning old data.
        """
        try:
            await self._storage.get(record_prefix(RecordType.COLLECTION))
        except Fenced as error:
            raise Fenced(f"another process has opened the collection and fenced this one: {error}") from error

    async def close(self) -> None:
        """Flush, make durable, and give the collection back. Raises the `FlushError` that stopped it."""
        try:
            await self._coordinator.close()
        finally:
            self._give_threads_back()
            await self._storage.close()

    def _give_threads_back(self) -> None:
        self._flusher.close()
        self._readers.close()

    @property
    def unstored(self) -> int:
        """Writes that were taken and are not durable."""
        applied = self._coordinator.watermark(Durability.APPLIED)
        return applied - self._coordinator.watermark(Durability.DURABLE)

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._coordinator.storage_wait_s

    async def abort(self) -> None:
        """Stop immediately, as a crash would: writes that are not durable may be lost."""
        await self._coordinator.abort()
        self._give_threads_back()
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
    """Return the stored vector of this name. Raises `Corrupt`."""
    key = data_key(internal_id)
    data = await snapshot.records.get(key)
    if data is None:
        raise Corrupt(f"record {key.hex()} is missing")
    try:
        vector = decode_vector(data, snapshot.index.collection.dimensions)
    except Corrupt as error:
        raise Corrupt(f"record {key.hex()}: {error}") from None
    if vector.id != name:
        raise Corrupt(f"record {key.hex()} is that of {vector.id!r}")
    return vector


def _bare_hits(index: Index, found: Found) -> Hits:
    """Without attributes, which need no record."""
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
    """Return the best `k` with sound records, and the damaged ones among the results."""
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
