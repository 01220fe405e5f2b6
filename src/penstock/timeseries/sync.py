"""Time series without an event loop: the same names, calls that wait. For scripts and Spark tasks.

with TimeSeries.open("file:///var/metrics") as database:
    database.write([series]).wait(Durability.DURABLE)
    database.query("sum(up)")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import BlockingDatabase, Position, Storage
from penstock.coordinator import BlockingFlushHandle as FlushHandle
from penstock.coordinator import BlockingWriteHandle as WriteHandle
from penstock.metrics import Registry
from penstock.timeseries import database as _database
from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.matchers import Matcher
from penstock.timeseries.model import Bucket, Labels, Metadata, Series
from penstock.timeseries.promql import QueryResult, ResultSeries

__all__ = ["TimeSeries"]

Selectors = Sequence[Sequence[Matcher]]


class TimeSeries(BlockingDatabase[_database.TimeSeries]):
    """Blocking twin of `penstock.timeseries.TimeSeries`; threads may share it."""

    @classmethod
    def open(
        cls,
        store: str | Path | Storage,
        config: TimeSeriesConfig | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        registry: Registry | None = None,
    ) -> TimeSeries:
        """Open or create the database in a store, and fence its writer. See the async `open`."""
        loop = loop_thread()
        opening = _database.TimeSeries.open(store, config, clock=clock, registry=registry)
        return cls(loop.run(opening), loop)

    def write(
        self,
        series: Sequence[Series],
        *,
        families: Mapping[str, Metadata] | None = None,
        sequence: int | None = None,
        source: str = "",
        location: str = "",
        timeout: float | None = None,
    ) -> WriteHandle:
        """Queue series as one write, when there is room. See the async `write`."""
        writing = self._inner.write(
            series,
            families=families,
            sequence=sequence,
            source=source,
            location=location,
            timeout=timeout,
        )
        return WriteHandle(self._loop.run(writing), self._loop)

    def flush(self, *, durable: bool = False) -> FlushHandle:
        """Have everything flushed whose `write` returned before."""
        return FlushHandle(self._loop.run(self._inner.flush(durable=durable)), self._loop)

    def sync(self) -> None:
        """Return when everything written before is durable. Raises `FlushError` and `Shutdown`."""
        self._loop.run(self._inner.sync())

    def stored_sequence(self) -> int | None:
        """The last `sequence` that was written, after making it durable; None if there was none."""
        return self._loop.run(self._inner.stored_sequence())

    def stored_position(self) -> Position | None:
        """As `stored_sequence`, with the name of its source."""
        return self._loop.run(self._inner.stored_position())

    def query(
        self,
        query: str,
        at_ms: int | None = None,
        *,
        timeout_s: float | None = None,
        warnings: list[str] | None = None,
    ) -> QueryResult:
        """A PromQL query at one time, now unless given. See the async `query`."""
        return self._loop.run(self._inner.query(query, at_ms, timeout_s=timeout_s, warnings=warnings))

    def query_range(
        self,
        query: str,
        start_ms: int,
        end_ms: int,
        step_ms: int,
        *,
        timeout_s: float | None = None,
        warnings: list[str] | None = None,
    ) -> QueryResult:
        """A PromQL query at every step from start to end, both included."""
        asking = self._inner.query_range(
            query, start_ms, end_ms, step_ms, timeout_s=timeout_s, warnings=warnings
        )
        return self._loop.run(asking)

    def newest(self, selectors: Selectors, at_ms: int) -> list[ResultSeries]:
        """The newest sample of each series within the lookback, without those that have ended."""
        return self._loop.run(self._inner.newest(selectors, at_ms))

    def series(
        self,
        selectors: Selectors = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[Labels]:
        """The series that satisfy any of the selectors in the hours of these times; all without one."""
        asking = self._inner.series(
            selectors, start_ms=start_ms, end_ms=end_ms, limit=limit, warnings=warnings
        )
        return self._loop.run(asking)

    def label_names(
        self,
        selectors: Selectors = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[str]:
        """The names of the labels of such series."""
        asking = self._inner.label_names(
            selectors, start_ms=start_ms, end_ms=end_ms, limit=limit, warnings=warnings
        )
        return self._loop.run(asking)

    def label_values(
        self,
        label: str,
        selectors: Selectors = (),
        *,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        warnings: list[str] | None = None,
    ) -> set[str]:
        """The values of one label of such series."""
        asking = self._inner.label_values(
            label, selectors, start_ms=start_ms, end_ms=end_ms, limit=limit, warnings=warnings
        )
        return self._loop.run(asking)

    def metadata(self, metric: str | None = None) -> dict[str, list[Metadata]]:
        """What writers have said of metrics, or of one."""
        return self._loop.run(self._metadata(metric))

    async def _metadata(self, metric: str | None) -> dict[str, list[Metadata]]:
        return self._inner.metadata(metric)

    @property
    def buckets(self) -> list[Bucket]:
        """The hours that hold anything that is flushed and still kept, oldest first."""
        return self._loop.run(self._buckets())

    async def _buckets(self) -> list[Bucket]:
        return self._inner.buckets
