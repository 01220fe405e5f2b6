"""Time-series databases over a disk in memory, and series to write."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.coordinator import CoordinatorConfig, SyncMode
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage
from penstock.timeseries import Labels, Samples, Series, TimeSeries, TimeSeriesConfig
from penstock.timeseries.records import merge_records

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
"""The start of a bucket."""


def disk() -> MemoryDisk:
    return MemoryDisk(merge=merge_records)


def config(**settings: object) -> TimeSeriesConfig:
    """Return a configuration with explicit flushes."""
    coordinator = CoordinatorConfig(flush_interval="1h", sync_mode=SyncMode.EVERY_FLUSH)
    return TimeSeriesConfig(coordinator=coordinator, **settings)  # type: ignore[arg-type]


async def opened(storage: MemoryStorage, **settings: object) -> TimeSeries:
    return await TimeSeries.open(storage, config(**settings))


def series(name: str, *samples: tuple[int, float], **labels: str) -> Series:
    """Return a series with samples at milliseconds after START_MS."""
    return Series(
        labels=Labels.of({"__name__": name, **labels}),
        samples=Samples.of([(START_MS + at, value) for at, value in samples]),
    )


async def contents(database: TimeSeries, selector: str = '{__name__!=""}') -> Mapping[str, dict[int, float]]:
    """Return every series and its samples, by milliseconds after START_MS."""
    result = await database.query(f"{selector}[3650d]", START_MS + 1000 * HOUR_MS)
    return {
        str(one.labels): dict(zip((one.timestamps - START_MS).tolist(), one.values.tolist(), strict=True))
        for one in result.series
    }
