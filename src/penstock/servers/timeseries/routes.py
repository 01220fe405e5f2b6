"""Routes of Prometheus' HTTP API, ingest, and operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import Storage, SyncMode
from penstock.errors import ConfigError
from penstock.http import Response, Route, Routes, Scope, no_key
from penstock.metrics import Registry
from penstock.servers.database import DatabaseApi, DatabaseApp, Source, check_writable, serve_database
from penstock.servers.timeseries.app import OTLP_PATH, REMOTE_WRITE_PATH, Call, response_of, response_to
from penstock.servers.timeseries.settings import Acknowledge, TimeSeriesSettings
from penstock.servers.timeseries.writing import WriteApi
from penstock.timeseries import (
    Answer,
    Parameters,
    QueryResult,
    SeriesRequest,
    TimeSeries,
    TimeSeriesConfig,
    federation_answer,
    instant_request,
    is_read_at_once,
    labels_request,
    metadata_answer,
    metadata_request,
    names_answer,
    query_answer,
    range_request,
    reads_any_name,
    series_answer,
    series_request,
)

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_INLINE_ITEMS: Final = 200
"""Below this many points or names, encoding a response directly is cheaper than using a thread."""


class TimeSeriesApi(DatabaseApi[TimeSeries]):
    """The handlers. `database` is None until the database is open."""

    def __init__(self, settings: TimeSeriesSettings, *, clock: Clock, registry: Registry) -> None:
        super().__init__("database")
        self._clock = clock
        self._registry = registry
        self.writing = WriteApi(lambda: self._db, settings, registry)

    # Readers

    async def query(self, call: Call) -> Response:
        wanted = instant_request(call.parameters(), self._clock.now_ms())
        warnings: list[str] = []
        result = await self._db.query(
            wanted.query, wanted.at_ms, timeout_s=wanted.timeout_s, warnings=warnings
        )
        return await _written(partial(query_answer, result, warnings), _points(result))

    async def query_range(self, call: Call) -> Response:
        wanted = range_request(call.parameters())
        warnings: list[str] = []
        result = await self._db.query_range(
            wanted.query,
            wanted.start_ms,
            wanted.end_ms,
            wanted.step_ms,
            timeout_s=wanted.timeout_s,
            warnings=warnings,
        )
        return await _written(partial(query_answer, result, warnings), _points(result))

    async def series(self, call: Call) -> Response:
        wanted = await _selected(series_request, call)
        warnings: list[str] = []
        found = await self._db.series(
            wanted.selectors,
            start_ms=wanted.start_ms,
            end_ms=wanted.end_ms,
            limit=wanted.read_max,
            warnings=warnings,
        )
        return await _written(partial(series_answer, found, wanted.limit, warnings), len(found))

    async def labels(self, call: Call) -> Response:
        wanted = await _selected(labels_request, call)
        warnings: list[str] = []
        found = await self._db.label_names(
            wanted.selectors,
            start_ms=wanted.start_ms,
            end_ms=wanted.end_ms,
            limit=wanted.read_max,
            warnings=warnings,
        )
        return await _written(partial(names_answer, found, wanted.limit, warnings), len(found))

    async def label_values(self, call: Call) -> Response:
        wanted = await _selected(labels_request, call)
        warnings: list[str] = []
        found = await self._db.label_values(
            call.name,
            wanted.selectors,
            start_ms=wanted.start_ms,
            end_ms=wanted.end_ms,
            limit=wanted.read_max,
            warnings=warnings,
        )
        return await _written(partial(names_answer, found, wanted.limit, warnings), len(found))

    async def metadata(self, call: Call) -> Response:
        wanted = metadata_request(call.parameters())
        found = self._db.metadata(wanted.metric)
        write = partial(metadata_answer, found, wanted.limit, wanted.limit_per_metric)
        return await _written(write, len(found))

    async def federate(self, call: Call) -> Response:
        wanted = await _selected(series_request, call)
        newest = await self._db.newest(wanted.selectors, self._clock.now_ms())
        any_name = reads_any_name(call.request.headers.get(b"accept", b"").decode("latin-1"))
        return await _written(partial(federation_answer, newest, any_name=any_name), len(newest))

    async def build_info(self, call: Call) -> Response:
        """Return the version and features; Grafana requests them first."""
        body = f'{{"status":"success","data":{{"version":"{__version__}","application":"penstock"}}}}'
        return response_of(Answer(200, body.encode()))

    # Operators

    async def metrics(self, call: Call) -> Response:
        return Response(200, self._registry.prometheus_text().encode(), content_type=_TEXT)

    async def healthy(self, call: Call) -> Response:
        return Response(200, b"Penstock is healthy.\n", content_type=b"text/plain")

    async def ready(self, call: Call) -> Response:
        check_writable(self._db)
        return Response(200, b"Penstock is ready.\n", content_type=b"text/plain")


def timeseries_app(api: TimeSeriesApi, settings: TimeSeriesSettings) -> DatabaseApp[Call]:
    """Return the application that serves `api`."""
    return DatabaseApp(
        _routes(api),
        settings.keys,
        call=Call,
        check_ready=api.check_ready,
        requests_max=settings.requests_max,
        errors=response_to,
    )


def _routes(api: TimeSeriesApi) -> Routes[Call]:
    for path, handler in (
        (b"/api/v1/query", api.query),
        (b"/api/v1/query_range", api.query_range),
        (b"/api/v1/series", api.series),
        (b"/api/v1/labels", api.labels),
    ):
        for method in (b"GET", b"POST"):
            yield method, path, Route(handler=handler, scope=Scope.READ)
    for path, handler in (
        (b"/api/v1/label/{name}/values", api.label_values),
        (b"/api/v1/metadata", api.metadata),
        (b"/api/v1/status/buildinfo", api.build_info),
        (b"/federate", api.federate),
    ):
        yield b"GET", path, Route(handler=handler, scope=Scope.READ)
    yield b"POST", REMOTE_WRITE_PATH, Route(handler=api.writing.remote_write, scope=Scope.WRITE)
    yield b"POST", OTLP_PATH, Route(handler=api.writing.otlp, scope=Scope.WRITE)
    yield b"POST", b"/-/flush", Route(handler=api.writing.flush, scope=Scope.ADMIN)
    yield b"GET", b"/metrics", Route(handler=api.metrics, scope=Scope.READ, ready=False)
    yield b"GET", b"/-/healthy", Route(handler=api.healthy, scope=Scope.NONE, auth=no_key, ready=False)
    yield b"GET", b"/-/ready", Route(handler=api.ready, scope=Scope.NONE, auth=no_key, ready=False)


async def _selected(read: Callable[[Parameters], SeriesRequest], call: Call) -> SeriesRequest:
    """Read the parameters of a request. Parse slow selectors in a thread."""
    parameters = call.parameters()
    if is_read_at_once(*parameters.get("match[]", ())):
        return read(parameters)
    return await asyncio.to_thread(read, parameters)


async def _written(write: Callable[[], Answer], size: int) -> Response:
    """Encode an answer as a response. Encode a large one in a thread, so that the loop stays responsive."""
    return response_of(write() if size < _INLINE_ITEMS else await asyncio.to_thread(write))


def _points(result: QueryResult) -> int:
    return sum(len(one.values) for one in result.series)


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
    """Serve the database in `store` until `stop` is set; see `serve_database`.

    Raise `ConfigError` if writes would wait for durability and no flush provides it.
    """
    metrics = registry or Registry()
    sync_mode = SyncMode.EVERY_FLUSH if config is None else config.coordinator.sync_mode
    if source is None and sync_mode is SyncMode.EXPLICIT and settings.acknowledge is Acknowledge.DURABLE:
        raise ConfigError("sync_mode: writes are acknowledged when they are durable; use every_flush")
    api = TimeSeriesApi(settings, clock=clock, registry=metrics)
    await serve_database(
        timeseries_app(api, settings),
        api,
        settings,
        stop,
        opening=lambda: TimeSeries.open(store, config, clock=clock, registry=metrics),
        sync_mode=sync_mode,
        source=None if source is None else lambda database: source(database, metrics),
        clock=clock,
        on_bound=on_bound,
        on_ready=on_ready,
    )
