"""A server of time series from its port to its last flush."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final, Protocol, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import Storage, SyncMode
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.http.limits import HttpLimits
from penstock.http.listener import Listener
from penstock.metrics import Registry
from penstock.server.process import DRAIN_S, write_port_file
from penstock.server.timeseries.routes import TimeSeriesApi, timeseries_app
from penstock.server.timeseries.settings import Acknowledge, TimeSeriesSettings
from penstock.timeseries import TimeSeries, TimeSeriesConfig

__all__ = ["Ingest", "serve"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_CHECK_S: Final = 2.0
"""How often the storage is asked whether this is still its writer, when nothing is written."""


class Ingest(Protocol):
    """What fills the database besides HTTP, for as long as it is served."""

    async def run(self) -> object:
        """Work until stopped. What it raises ends the server."""
        ...

    def stop(self) -> None:
        """End in order; `run` returns soon."""
        ...


async def serve(
    store: str | Path | Storage,
    settings: TimeSeriesSettings,
    stop: asyncio.Event,
    *,
    config: TimeSeriesConfig | None = None,
    ingest: Callable[[TimeSeries, Registry], Ingest] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    registry: Registry | None = None,
    on_bound: Callable[[str, int], None] | None = None,
    on_ready: Callable[[TimeSeries], None] | None = None,
) -> None:
    """Serve the database in `store` until `stop` is set; then everything that was taken is durable.

    The port is taken first: a server that cannot have it does not fence the one that has. Raises `Fenced`
    when a newer process has taken the database or its queue, `ConfigError` if writes would be waited for that
    nobody makes durable, and what else stops it.
    """
    _check_sync(config, settings, fed=ingest is not None)
    registry = registry or Registry()
    api = TimeSeriesApi(settings, clock=clock, registry=registry)
    limits = HttpLimits(
        body_bytes_max=settings.body_bytes_max,
        body_screened_bytes=min(HttpLimits().body_screened_bytes, settings.body_bytes_max),
    )
    listener = Listener(timeseries_app(api, settings), limits, clock=clock)
    host, port = await _bind(listener, settings)
    try:
        if settings.port_file is not None:
            write_port_file(settings.port_file, host, port)
        if on_bound is not None:
            on_bound(host, port)
        database = await _unless(stop, TimeSeries.open(store, config, clock=clock, registry=registry))
        if database is not None:
            await _serve_open(api, database, listener, stop, ingest, clock, registry, on_ready)
    finally:
        await listener.drain(timeout_s=0)


def _check_sync(config: TimeSeriesConfig | None, settings: TimeSeriesSettings, *, fed: bool) -> None:
    """Nobody may wait for what never becomes durable by itself."""
    if config is None or config.coordinator.sync_mode is not SyncMode.EXPLICIT:
        return
    if fed:
        raise ConfigError("sync_mode: a queue is acknowledged when flushes are durable; make it every_flush")
    if settings.acknowledge is Acknowledge.DURABLE:
        raise ConfigError("sync_mode: writes are answered when they are durable; make it every_flush")


async def _serve_open(
    api: TimeSeriesApi,
    database: TimeSeries,
    listener: Listener,
    stop: asyncio.Event,
    ingest: Callable[[TimeSeries, Registry], Ingest] | None,
    clock: Clock,
    registry: Registry,
    on_ready: Callable[[TimeSeries], None] | None,
) -> None:
    feed: Ingest | None = None
    feeding: asyncio.Task[object] | None = None
    try:
        api.database = database
        if on_ready is not None:
            on_ready(database)
        if ingest is not None:
            feed = ingest(database, registry)
            feeding = asyncio.ensure_future(feed.run())
        await _until_over(database, stop, feeding, clock)
    finally:
        _LOG.info("shutting down")
        if feed is not None:
            feed.stop()
        if not await listener.drain(timeout_s=DRAIN_S if database.failed is None else 0):
            _LOG.warning("some connections did not finish within %d s and were cut off", DRAIN_S)
        api.draining = True
        await _closed(database, feeding)


async def _closed(database: TimeSeries, feeding: asyncio.Task[object] | None) -> None:
    """Let the feed finish, then the database. What the database says counts."""
    try:
        if feeding is not None:
            if database.failed is not None:
                feeding.cancel()
            await feeding
    except asyncio.CancelledError:
        pass
    finally:
        await database.close()


async def _until_over(
    database: TimeSeries, stop: asyncio.Event, feeding: asyncio.Task[object] | None, clock: Clock
) -> None:
    """Wait for the word to stop. Raises what ends the server before."""
    waits: list[asyncio.Task[object]] = [
        asyncio.ensure_future(stop.wait()),
        asyncio.ensure_future(database.failure()),
        asyncio.ensure_future(_watch(database, clock)),
    ]
    watched = [*waits, feeding] if feeding is not None else waits
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if database.failed is not None:
            raise database.failed
        for task in watched:
            if task.done():
                await task
    finally:
        for task in waits:
            await _given_up(task)


async def _watch(database: TimeSeries, clock: Clock) -> None:
    """Notice a newer writer when nothing is written. A storage that does not answer may come back."""
    while True:
        await clock.sleep(_CHECK_S)
        with contextlib.suppress(Unavailable):
            await database.check()


async def _unless(stop: asyncio.Event, opening: Coroutine[None, None, T]) -> T | None:
    """What `opening` returns; None if the process is to stop before."""
    task = asyncio.ensure_future(opening)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await _given_up(stopping)
        await _given_up(task)


async def _given_up(task: asyncio.Task[T]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await task


async def _bind(listener: Listener, settings: TimeSeriesSettings) -> tuple[str, int]:
    try:
        return await listener.bind(settings.host, settings.port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise Unavailable(f"cannot listen on {settings.host}:{settings.port}: {why}") from error
