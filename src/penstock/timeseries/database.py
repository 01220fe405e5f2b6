"""A database of time series over object storage: one writer, PromQL for readers.

    async with await TimeSeries.open("s3://bucket/metrics") as db:
        up = Series(labels=Labels.of({"__name__": "up"}), samples=Samples.of([(now_ms, 1.0)]))
        handle = await db.write([up])
        await handle.wait(Durability.DURABLE)
        result = await db.query("sum(up)")

Writes become visible to readers when they are flushed, all of a write at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import (
    Durability,
    FlushError,
    FlushHandle,
    Storage,
    StorageRead,
    WriteCoordinator,
    WriteHandle,
)
from penstock.coordinator.slate import SlateStorage
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.timeseries.bucket import Bucket
from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.delta import SeriesDelta, SeriesWrite, prepare_write
from penstock.timeseries.directory import Directory
from penstock.timeseries.flusher import SeriesFlusher
from penstock.timeseries.matcher import Matcher
from penstock.timeseries.model import Labels, Metadata, Series, is_stale
from penstock.timeseries.promql import (
    Engine,
    FetchedSource,
    Prepared,
    QueryResult,
    ResultSeries,
    SelectedSeries,
    Selection,
)
from penstock.timeseries.reading import LabelCache, label_names, label_values, matching_series, select
from penstock.timeseries.records import expiry_ms, load_bucket, load_families, load_sequence, merge_records
from penstock.units import parse_duration

__all__ = ["TimeSeries"]

_NAME = "timeseries"
_ALL_TIME = (0, 2**62)


class TimeSeries:
    """One database with this process as its writer. A newer one fences it: see `FlushFenced`."""

    def __init__(
        self,
        storage: Storage,
        config: TimeSeriesConfig,
        flusher: SeriesFlusher,
        directory: Directory,
        snapshot: StorageRead,
        *,
        clock: Clock,
        registry: Registry,
    ) -> None:
        """Use `open`."""
        self._storage = storage
        self._config = config
        self._clock = clock
        self._flusher = flusher
        self._directory = directory
        unflushed_max = config.coordinator.max_frozen_deltas + 1
        self._coordinator: WriteCoordinator[SeriesWrite, SeriesDelta, StorageRead] = WriteCoordinator(
            lambda: SeriesDelta(unflushed_max=unflushed_max),
            flusher,
            image=directory,
            snapshot=snapshot,
            config=config.coordinator,
            clock=clock,
            registry=registry,
            product=_NAME,
            on_failure=self._fail,
        )
        self._engine = Engine(config.engine, clock=clock)
        self._loading = asyncio.Lock()
        self._querying = asyncio.Semaphore(config.queries_max)
        self._cache = LabelCache(live=directory.labels_of, expires=config.retention is not None)
        self._failed: asyncio.Future[FlushError] = asyncio.get_running_loop().create_future()
        self._samples = registry.counter("timeseries.samples_written", "Samples that writes brought.")
        self._expired = registry.counter(
            "timeseries.samples_expired", "Samples too old to be kept, left out."
        )
        self._queries = registry.histogram("timeseries.query_duration_seconds", "Queries, reading included.")

    @classmethod
    async def open(
        cls,
        store: str | Path | Storage,
        config: TimeSeriesConfig | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> TimeSeries:
        """Open or create the database in a store (a URL, a directory, or a storage), and fence its writer.

        A storage must merge with `merge_records`. Raises `ConfigError`, `Unavailable`, `Corrupt`.
        """
        config, registry = config or TimeSeriesConfig(), registry or Registry()
        storage = await _opened(store) if isinstance(store, str | Path) else store
        try:
            flusher = SeriesFlusher(storage, config, clock, registry)
            await flusher.load()
            directory = Directory(
                families=await load_families(storage), sequence=await load_sequence(storage)
            )
            snapshot = await storage.snapshot()
        except BaseException:
            with suppress(PenstockError):
                await storage.close()
            raise
        database = cls(storage, config, flusher, directory, snapshot, clock=clock, registry=registry)
        database._coordinator.start()
        return database

    # Writing

    async def write(
        self,
        series: Sequence[Series],
        *,
        families: Mapping[str, Metadata] | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> WriteHandle:
        """Queue series as one write: all of it is stored and seen together, or none.

        `families` says more of metrics by name. `sequence` is stored in the same batch. Samples that the
        retention has passed by are left out. Waits for room; raises `WriteTimeout` if there is none within
        `timeout`, `InvalidInput` for times out of range, `FlushError` and `Shutdown` when it is over. Labels
        are checked when the write is applied: then the handle raises `ApplyError`.
        """
        write = self._kept(prepare_write(series, families, sequence))
        async with self._loading:
            await self._load(write.parts)
            self._directory.reserve(write.parts)
        try:
            handle = await self._coordinator.write(write, timeout=timeout)
        except BaseException:
            self._directory.release(write.parts)
            raise
        self._samples.inc(sum(len(part.values) for part in write.parts.values()))
        return handle

    async def flush(self, *, durable: bool = False) -> FlushHandle:
        """Have everything flushed whose `write` returned before. See `WriteCoordinator.flush`."""
        return await self._coordinator.flush(durable=durable)

    async def sync(self) -> None:
        """Return when everything written before is durable. Raises `FlushError` and `Shutdown`."""
        handle = await self._coordinator.flush(durable=True)
        await handle.wait(Durability.DURABLE)

    async def stored_sequence(self) -> int | None:
        """The last `sequence` that was written, after making it durable; None if there was none."""
        await self.sync()
        return self._directory.sequence

    def _kept(self, write: SeriesWrite) -> SeriesWrite:
        kept = {bucket: part for bucket, part in write.parts.items() if self._is_kept(bucket)}
        if len(kept) == len(write.parts):
            return write
        self._expired.inc(sum(len(p.values) for b, p in write.parts.items() if b not in kept))
        return SeriesWrite(parts=kept, families=write.families, sequence=write.sequence)

    async def _load(self, buckets: Mapping[Bucket, object]) -> None:
        """Have the series of these buckets in memory. One at a time, so that each is read once."""
        for bucket in buckets:
            if bucket not in self._directory:
                self._directory.load(bucket, await load_bucket(self._coordinator.view().snapshot, bucket))

    # Reading

    async def query(
        self, query: str, at_ms: int | None = None, *, timeout_s: float | None = None
    ) -> QueryResult:
        """A PromQL query at one time, now unless given.

        Raises what `Engine.instant` and `Prepared.evaluate` raise.
        """
        at_ms = self._clock.now_ms() if at_ms is None else at_ms
        return await self._answer(self._engine.instant(query, at_ms, timeout_s=timeout_s))

    async def query_range(
        self, query: str, start_ms: int, end_ms: int, step_ms: int, *, timeout_s: float | None = None
    ) -> QueryResult:
        """A PromQL query at every step from start to end, both included. Raises as `query` does."""
        return await self._answer(self._engine.range(query, start_ms, end_ms, step_ms, timeout_s=timeout_s))

    async def newest(self, selectors: Sequence[Sequence[Matcher]], at_ms: int) -> list[ResultSeries]:
        """The newest sample of each series within the lookback, without those that have ended."""
        lookback_ms = round(parse_duration(self._config.engine.lookback) * 1000)
        found: dict[Labels, ResultSeries] = {}
        snapshot, buckets = self._within(at_ms - lookback_ms, at_ms)
        for matchers in selectors:
            selection = Selection(tuple(matchers), at_ms - lookback_ms + 1, at_ms)
            for labels, times, values in await self._select(snapshot, buckets, selection):
                if not is_stale(values[-1:])[0]:
                    found[labels] = ResultSeries(labels, times[-1:], values[-1:])
        return list(found.values())

    async def series(
        self,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
    ) -> set[Labels]:
        """The series that satisfy any of the selectors in the hours of these times; all without one."""
        snapshot, buckets = self._within(start_ms, end_ms)
        return await matching_series(snapshot, buckets, selectors, self._cache)

    async def label_names(
        self,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
    ) -> set[str]:
        """The names of the labels of such series."""
        if selectors:
            found = await self.series(selectors, start_ms=start_ms, end_ms=end_ms)
            return {name for labels in found for name, _ in labels}
        return await label_names(*self._within(start_ms, end_ms))

    async def label_values(
        self,
        label: str,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
    ) -> set[str]:
        """The values of one label of such series."""
        if selectors:
            found = await self.series(selectors, start_ms=start_ms, end_ms=end_ms)
            return {value for labels in found if (value := labels.value(label))}
        return await label_values(*self._within(start_ms, end_ms), label)

    def metadata(self, metric: str | None = None) -> dict[str, list[Metadata]]:
        """What writers have said of metrics, or of one."""
        families = self._directory.families
        if metric is not None:
            return {metric: [families[metric]]} if metric in families else {}
        return {name: [one] for name, one in families.items()}

    @property
    def buckets(self) -> list[Bucket]:
        """The hours that hold anything that is flushed and still kept, oldest first."""
        return sorted(bucket for bucket in self._flusher.buckets if self._is_kept(bucket))

    async def _answer(self, prepared: Prepared) -> QueryResult:
        began = self._clock.monotonic()
        async with self._querying:
            snapshot, buckets = self._within(None, None)
            answers = {
                selection: await self._select(snapshot, buckets, selection)
                for selection in prepared.selections
            }
            result = await asyncio.to_thread(prepared.evaluate, FetchedSource(answers))
        self._queries.observe(self._clock.monotonic() - began)
        return result

    async def _select(
        self, snapshot: StorageRead, buckets: list[Bucket], selection: Selection
    ) -> list[SelectedSeries]:
        return await select(
            snapshot, buckets, selection, self._cache, samples_max=self._config.engine.samples_max
        )

    def _within(self, start_ms: int | None, end_ms: int | None) -> tuple[StorageRead, list[Bucket]]:
        """The snapshot, and the buckets that hold any of these times."""
        low = _ALL_TIME[0] if start_ms is None else start_ms
        high = _ALL_TIME[1] if end_ms is None else end_ms
        snapshot = self._coordinator.view().snapshot
        return snapshot, [one for one in self.buckets if one.start_ms <= high and one.end_ms > low]

    def _is_kept(self, bucket: Bucket) -> bool:
        expiry = expiry_ms(bucket, self._config.retention_ms)
        return expiry is None or expiry > self._clock.now_ms()

    # Life

    async def check(self) -> None:
        """Ask the storage whether this process is still its writer. Raises `Fenced` and `Unavailable`.

        Writes notice it by themselves; who only reads would go on showing what was.
        """
        await load_sequence(self._storage)

    async def failure(self) -> FlushError:
        """Wait until the database stops by itself, and return why: fenced, or a storage that failed."""
        return await asyncio.shield(self._failed)

    @property
    def failed(self) -> FlushError | None:
        """What stopped the database, if anything did."""
        return self._failed.result() if self._failed.done() else None

    def _fail(self, error: FlushError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def close(self) -> None:
        """Store everything that was written, durably, and give the storage back. May be called again.

        Raises the `FlushError` that stopped the database, if one did.
        """
        try:
            await self._coordinator.close()
        finally:
            await self._storage.close()

    async def __aenter__(self) -> TimeSeries:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _opened(store: str | Path) -> Storage:
    return await SlateStorage.open(_url(store), _NAME, merge=merge_records)


def _url(store: str | Path) -> str:
    text = str(store)
    return text if "://" in text else f"file://{os.path.abspath(text)}"
