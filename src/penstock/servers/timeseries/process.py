"""A server of time series from its port to its last flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import Storage, SyncMode
from penstock.errors import ConfigError
from penstock.http import HttpLimits, sites_of
from penstock.metrics import Registry
from penstock.servers.database import Place, ServedDatabase, Source
from penstock.servers.timeseries.routes import TimeSeriesApi, timeseries_app
from penstock.servers.timeseries.settings import Acknowledge, TimeSeriesSettings
from penstock.timeseries import TimeSeries, TimeSeriesConfig


async def serve_timeseries(
    store: str | Path | Storage,
    settings: TimeSeriesSettings,
    stop: asyncio.Event,
    *,
    config: TimeSeriesConfig | None = None,
    source: Callable[[TimeSeries, Registry], Source] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    registry: Registry | None = None,
    on_bound: Callable[[str, int], None] | None = None,
    on_ready: Callable[[TimeSeries], None] | None = None,
) -> None:
    """Serve the database in `store` until `stop` is set; then everything that was taken is durable.

    Raises as `ServedDatabase.serve` and `TimeSeries.open` do, and `ConfigError` if writes would be waited for
    that nobody makes durable.
    """
    _check_sync(config, settings, fed=source is not None)
    metrics = registry or Registry()
    api = TimeSeriesApi(settings, clock=clock, registry=metrics)

    async def opening() -> TimeSeries:
        return await TimeSeries.open(store, config, clock=clock, registry=metrics)

    def opened(database: TimeSeries) -> None:
        api.database = database
        if on_ready is not None:
            on_ready(database)

    def draining() -> None:
        api.draining = True

    served = ServedDatabase(
        timeseries_app(api, settings),
        Place(host=settings.host, port=settings.port, port_file=settings.port_file),
        opening=opening,
        opened=opened,
        draining=draining,
        source=None if source is None else lambda database: source(database, metrics),
        limits=HttpLimits.for_bodies(settings.body_bytes_max),
        sites=sites_of(settings.host, settings.keys, settings.allowed_hosts),
        clock=clock,
    )
    await served.serve(stop, on_bound=on_bound)


def _check_sync(config: TimeSeriesConfig | None, settings: TimeSeriesSettings, *, fed: bool) -> None:
    """Nobody may wait for what never becomes durable by itself."""
    if config is None or config.coordinator.sync_mode is not SyncMode.EXPLICIT:
        return
    if fed:
        raise ConfigError("sync_mode: a queue is acknowledged when flushes are durable; make it every_flush")
    if settings.acknowledge is Acknowledge.DURABLE:
        raise ConfigError("sync_mode: writes are answered when they are durable; make it every_flush")
