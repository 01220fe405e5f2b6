"""A time-series database over object storage, with one writer and PromQL queries.

    async with await TimeSeries.open("s3://bucket/metrics") as db:
        up = Series(labels=Labels.of({"__name__": "up"}), samples=Samples.of([(now_ms, 1.0)]))
        handle = await db.write([up])
        await handle.wait(Durability.DURABLE)
        result = await db.query("sum(up)")

Writes become visible to readers when they are flushed. Each write is atomic.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import (
    Backpressure,
    Durability,
    FlushError,
    FlushHandle,
    Position,
    SlateStorage,
    Storage,
    StorageRead,
    SyncMode,
    WriteCoordinator,
    WriteHandle,
    WriteTimeout,
)
from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.delta import SeriesDelta, SeriesWrite, prepare_write, write_size
from penstock.timeseries.flush import SeriesFlusher
from penstock.timeseries.matchers import Matcher
from penstock.timeseries.model import Bucket, Labels, Metadata, Series, is_stale
from penstock.timeseries.promql import (
    Budget,
    Engine,
    FetchedSource,
    Prepared,
    QueryResult,
    ResultSeries,
    SelectedSeries,
    Selection,
    is_read_at_once,
)
from penstock.timeseries.read import (
    BucketLoader,
    LabelCache,
    label_names,
    label_values,
    matching_series,
    select,
)
from penstock.timeseries.records import load_families, load_position, merge_records
from penstock.timeseries.series_index import SeriesIndex

_NAME = "timeseries"
_ALL_TIME = (0, 2**62)


class TimeSeries:
    """A database with this process as its writer. A newer writer fences it: see `FlushFenced`."""

    def __init__(
        self,
        storage: Storage,
        config: TimeSeriesConfig,
        flusher: SeriesFlusher,
        directory: SeriesIndex,
        snapshot: StorageRead,
        *,
        clock: Clock,
        registry: Registry,
    ) -> None:
        """Initialise the database. Call `open` instead."""
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
            size_of=write_size,
            on_failure=self._fail,
        )
        self._engine = Engine(config.engine, clock=clock)
        self._loader = BucketLoader(
            directory,
            snapshot=lambda: self._coordinator.view().snapshot,
            is_expired=lambda bucket: not self._is_kept(bucket),
            damage=flusher.damage,
        )
        self._querying = asyncio.Semaphore(config.queries_max)
        self._cache = LabelCache(
            live=directory.labels_of, expires=flusher.retention.expires, report=flusher.damage.report
        )
        self._failed: asyncio.Future[FlushError] = asyncio.get_running_loop().create_future()
        self._samples = registry.counter("timeseries.samples_written", "Samples received in writes.")
        self._expired = registry.counter(
            "timeseries.samples_expired", "Samples discarded because they had expired."
        )
        self._queries = registry.histogram(
            "timeseries.query_duration_seconds", "Time of queries, including reads."
        )

    @classmethod
    async def open(
        cls,
        store: str | Path | Storage,
        config: TimeSeriesConfig | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> TimeSeries:
        """Open or create the database in a store (a URL, a directory, or a storage), and fence its previous
        writer.

        A storage must use the merge operator `merge_records`. Raises `ConfigError`, `Unavailable`, `Corrupt`.
        """
        config, registry = config or TimeSeriesConfig(), registry or Registry()
        storage = await _opened(store, config) if isinstance(store, str | Path) else store
        flusher = SeriesFlusher(storage, config, clock, registry)
        try:
            await flusher.load()
            families, damaged = await load_families(storage)
            flusher.damage.report(None, damaged)
            directory = SeriesIndex(families=families, position=await load_position(storage), clock=clock)
            snapshot = await storage.snapshot()
        except BaseException:
            flusher.close()
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
        source: str = "",
        location: str = "",
        timeout: float | None = None,
    ) -> WriteHandle:
        """Queue series as one atomic write.

        `families` maps metric names to metadata. `sequence` is stored in the same batch, with the name of its
        `source` and the name of its batch there (`location`). Expired samples are discarded.

        The call waits for room and for hours that must be read first. It raises `WriteTimeout`, with `series`
        in its `write`, if that takes longer than `timeout`. It raises `InvalidInput` for times out of range,
        for more than `HOURS_MAX` hours, and for metadata or a source that cannot be stored. It raises
        `FlushError` or `Shutdown` after the database has stopped. Labels are checked when the write is
        applied; the handle then raises `ApplyError`.
        """
        position = None if sequence is None else Position(sequence, source, location)
        write = self._kept(prepare_write(series, families, position))
        try:
            handle = await self._queued(write, timeout)
        except Backpressure as error:
            error.write = series  # a retry prepares and reserves the series again
            raise
        self._samples.inc(sum(len(part.values) for part in write.parts.values()))
        return handle

    async def _queued(self, write: SeriesWrite, timeout: float | None) -> WriteHandle:
        began = self._clock.monotonic()
        if not self._loader.try_hold(write.parts):
            await self._hold(write, timeout)
        left = None if timeout is None else max(0.0, timeout - (self._clock.monotonic() - began))
        try:
            return await self._coordinator.write(write, timeout=left)
        except BaseException:
            self._directory.release(write.parts)
            self._directory.expect(write.parts)
            raise

    async def flush(self, *, durable: bool = False) -> FlushHandle:
        """Flush every write whose `write` call has returned. See `WriteCoordinator.flush`."""
        return await self._coordinator.flush(durable=durable)

    async def sync(self) -> None:
        """Wait until all earlier writes are durable. Raises `FlushError` and `Shutdown`."""
        handle = await self._coordinator.flush(durable=True)
        await handle.wait(Durability.DURABLE)

    async def stored_sequence(self) -> int | None:
        """Make the last written `sequence` durable and return it. Return None if there is none."""
        await self.sync()
        position = self._directory.source.position
        return None if position is None else position.sequence

    async def stored_position(self) -> Position | None:
        """Like `stored_sequence`, but return the sequence with the name of its source."""
        await self.sync()
        return self._directory.source.position

    def _kept(self, write: SeriesWrite) -> SeriesWrite:
        kept = {bucket: part for bucket, part in write.parts.items() if self._is_kept(bucket)}
        if len(kept) == len(write.parts):
            return write
        self._expired.inc(sum(len(p.values) for b, p in write.parts.items() if b not in kept))
        return replace(write, parts=kept)

    async def _hold(self, write: SeriesWrite, timeout: float | None) -> None:
        """Load and reserve the series of the write's hours. Raises `WriteTimeout`, `Unavailable`."""
        if timeout is None:
            await self._loader.hold(write.parts)
            return
        holding = asyncio.ensure_future(self._loader.hold(write.parts))
        alarm = asyncio.ensure_future(self._clock.sleep(timeout))
        try:
            await asyncio.wait((holding, alarm), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not holding.cancel() and holding.exception() is None:
                self._directory.release(write.parts)
            raise
        finally:
            alarm.cancel()
        if holding.cancel():
            raise WriteTimeout(f"the hours of the write were not read within {timeout} s", write)
        await holding

    # Reading

    async def query(
        self,
        query: str,
        at_ms: int | None = None,
        *,
        timeout_s: float | None = None,
        warnings: list[str] | None = None,
    ) -> QueryResult:
        """Evaluate a PromQL query at one time, which defaults to now.

        With `warnings`, damaged records are left out of the result, and a sentence for each, with its hour,
        is appended to the list. Without it, they raise `Corrupt`. Raises the errors of `Engine.instant` and
        `Prepared.evaluate`, and `Unavailable` if no query slot becomes free within the timeout.
        """
        at_ms = self._clock.now_ms() if at_ms is None else at_ms
        prepare = partial(self._engine.instant, query, at_ms, timeout_s=timeout_s)
        return await self._answer(await _prepared(prepare, query), warnings)

    async def query_range(
        self,
        query: str,
        start_ms: int,
        end_ms: int,
        step_ms: int,
        *,
        timeout_s: float | None = None,
        warnings: list[str] | None = None,
    ) -> QueryResult:
        """Evaluate a PromQL query at every step from start to end, inclusive. Raises the same errors as
        `query`."""
        prepare = partial(self._engine.range, query, start_ms, end_ms, step_ms, timeout_s=timeout_s)
        return await self._answer(await _prepared(prepare, query), warnings)

    async def newest(self, selectors: Sequence[Sequence[Matcher]], at_ms: int) -> list[ResultSeries]:
        """Return the newest sample of each series within the lookback, except for series that have ended.

        Raises the same errors as `query`.
        """
        lookback_ms = self._config.engine.lookback_ms
        found: dict[Labels, ResultSeries] = {}
        async with self._reading(self._engine.budget()) as budget:
            snapshot, buckets = self._within(at_ms - lookback_ms, at_ms)
            for matchers in selectors:
                selection = Selection(tuple(matchers), at_ms - lookback_ms + 1, at_ms)
                for labels, times, values in await select(snapshot, buckets, selection, self._cache, budget):
                    if not is_stale(values[-1:])[0]:
                        found[labels] = ResultSeries(labels, times[-1:], values[-1:])
        return list(found.values())

    async def series(
        self,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[Labels]:
        """Return the series in these hours that satisfy any selector, or all series without selectors.

        Reading stops after `limit` series, if it is given. `warnings` are as in `query`. Raises
        `TooManySamples` if the labels exceed the limit of a query, `QueryTimeout`, and `Unavailable` if no
        query slot becomes free in time.
        """
        async with self._reading(self._engine.budget()) as budget:
            snapshot, buckets = self._within(start_ms, end_ms)
            return await matching_series(snapshot, buckets, selectors, self._cache, budget, limit, warnings)

    async def label_names(
        self,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[str]:
        """Return the label names of the selected series, at least the first `limit`. See `series`."""
        if selectors:
            found = await self.series(selectors, start_ms=start_ms, end_ms=end_ms, warnings=warnings)
            return {name for labels in found for name, _ in labels}
        async with self._reading(self._engine.budget()) as budget:
            return await label_names(*self._within(start_ms, end_ms), budget, limit)

    async def label_values(
        self,
        label: str,
        selectors: Sequence[Sequence[Matcher]] = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[str]:
        """Return the values of a label in the selected series, at least the first `limit`.

        Raises the same errors as `series`.
        """
        if selectors:
            found = await self.series(selectors, start_ms=start_ms, end_ms=end_ms, warnings=warnings)
            return {value for labels in found if (value := labels.value(label))}
        async with self._reading(self._engine.budget()) as budget:
            return await label_values(*self._within(start_ms, end_ms), label, budget, limit)

    def metadata(self, metric: str | None = None) -> dict[str, list[Metadata]]:
        """Return the metadata that writers sent for one metric or for all."""
        families = self._directory.families
        if metric is not None:
            return {metric: [families[metric]]} if metric in families else {}
        return {name: [one] for name, one in families.items()}

    @property
    def buckets(self) -> list[Bucket]:
        """The hours with flushed samples that retention still keeps, oldest first."""
        return sorted(bucket for bucket in self._flusher.buckets if self._is_kept(bucket))

    async def _answer(self, prepared: Prepared, warnings: list[str] | None) -> QueryResult:
        began = self._clock.monotonic()
        answers: dict[Selection, list[SelectedSeries]] = {}
        async with self._place(prepared.budget):
            async with self._time(prepared.budget):
                snapshot, buckets = self._within(None, None)
                for one in prepared.selections:
                    answers[one] = await select(
                        snapshot, buckets, one, self._cache, prepared.budget, warnings
                    )
            try:
                result = await asyncio.to_thread(prepared.evaluate, FetchedSource(answers), charged=True)
            except asyncio.CancelledError:
                prepared.budget.stop()  # a thread cannot be cancelled
                raise
        self._queries.observe(self._clock.monotonic() - began)
        return result

    @asynccontextmanager
    async def _reading(self, budget: Budget) -> AsyncIterator[Budget]:
        """Hold a query slot and enforce the time limit of the budget."""
        async with self._place(budget), self._time(budget):
            yield budget

    @asynccontextmanager
    async def _place(self, budget: Budget) -> AsyncIterator[None]:
        """Hold a query slot. Raises `Unavailable` if none becomes free within the time limit."""
        try:
            async with asyncio.timeout(budget.seconds_left):
                await self._querying.acquire()
        except TimeoutError:
            raise Unavailable(
                f"all {self._config.queries_max} query slots are in use; send the query again"
            ) from None
        try:
            yield
        finally:
            self._querying.release()

    @asynccontextmanager
    async def _time(self, budget: Budget) -> AsyncIterator[None]:
        """Raise `QueryTimeout` when the time is up, even if the store does not respond."""
        try:
            async with asyncio.timeout(budget.seconds_left):
                yield
        except TimeoutError:
            raise budget.timed_out() from None

    def _within(self, start_ms: int | None, end_ms: int | None) -> tuple[StorageRead, list[Bucket]]:
        """Return the snapshot, and the buckets that overlap these times."""
        low = _ALL_TIME[0] if start_ms is None else start_ms
        high = _ALL_TIME[1] if end_ms is None else end_ms
        snapshot = self._coordinator.view().snapshot
        return snapshot, [one for one in self.buckets if one.start_ms <= high and one.end_ms > low]

    def _is_kept(self, bucket: Bucket) -> bool:
        return self._flusher.is_kept(bucket)

    # Lifecyclecycle

    async def check(self) -> None:
        """Check with the storage that this process is still its writer. Raises `Fenced` and `Unavailable`.

        Writes detect fencing. A process that only reads would otherwise keep returning old data.
        """
        await load_position(self._storage)

    async def failure(self) -> FlushError:
        """Wait until an error stops the database, and return it: fencing, or a failed storage."""
        return await asyncio.shield(self._failed)

    @property
    def failed(self) -> FlushError | None:
        """The error that stopped the database, or None."""
        return self._failed.result() if self._failed.done() else None

    def _fail(self, error: FlushError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    async def close(self) -> None:
        """Store all writes durably and release the storage. May be called again.

        Raises the `FlushError` that stopped the database, if any. If the call is cancelled, unstored writes
        are lost as in a crash, and the storage is not closed, because it may not respond.
        """
        try:
            await self._coordinator.close()
        except asyncio.CancelledError:
            await self._coordinator.abort()
            raise
        except PenstockError:
            await self._storage.close()
            raise
        finally:
            self._flusher.close()
        await self._storage.close()

    @property
    def unstored(self) -> int:
        """Number of accepted writes that are not durable yet."""
        return self._coordinator.watermark(Durability.APPLIED) - self._coordinator.watermark(
            Durability.DURABLE
        )

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._coordinator.storage_wait_s

    async def __aenter__(self) -> TimeSeries:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _prepared(prepare: Callable[[], Prepared], query: str) -> Prepared:
    """Parse short queries on the loop. Parse others in a thread, because they may take tenths of a second."""
    return prepare() if is_read_at_once(query) else await asyncio.to_thread(prepare)


async def _opened(store: str | Path, config: TimeSeriesConfig) -> Storage:
    at_once = config.coordinator.sync_mode is SyncMode.EVERY_FLUSH
    return await SlateStorage.open(
        _url(store),
        _NAME,
        merge=merge_records,
        persist_at_once=at_once,
        open_timeout_s=config.open_timeout_s,
    )


def _url(store: str | Path) -> str:
    text = str(store)
    return text if "://" in text else f"file://{os.path.abspath(text)}"
