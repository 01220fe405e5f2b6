"""A vector server from its port to its last flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import SyncMode
from penstock.errors import ConfigError
from penstock.http import HttpLimits, sites_of
from penstock.metrics import Registry
from penstock.servers.database import Place, ServedDatabase, Source
from penstock.servers.vector.routes import VectorApi, vector_app
from penstock.servers.vector.settings import VectorSettings
from penstock.vector import VectorConfig, VectorStore


async def serve_vector(
    config: VectorConfig,
    settings: VectorSettings,
    stop: asyncio.Event,
    *,
    source: Callable[[VectorStore, Registry], Source] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    on_bound: Callable[[str, int], None] | None = None,
    on_ready: Callable[[VectorStore], None] | None = None,
) -> None:
    """Serve the collection until `stop` is set; then everything that was taken is durable.

    Raises as `ServedDatabase.serve` and `VectorStore.open` do, and `ConfigError` for a source whose vectors
    nobody would make durable.
    """
    if source is not None and config.sync_mode == SyncMode.EXPLICIT:
        raise ConfigError("sync_mode: a queue is acknowledged when flushes are durable; make it every_flush")
    registry = Registry()
    api = VectorApi(settings, clock=clock, registry=registry)

    async def opening() -> VectorStore:
        return await VectorStore.open(config, clock=clock, registry=registry)

    def opened(store: VectorStore) -> None:
        api.store = store
        if on_ready is not None:
            on_ready(store)

    def draining() -> None:
        api.draining = True

    served = ServedDatabase(
        vector_app(api, settings),
        Place(host=settings.host, port=settings.port, port_file=settings.port_file),
        opening=opening,
        opened=opened,
        draining=draining,
        source=None if source is None else lambda store: source(store, registry),
        limits=HttpLimits.for_bodies(settings.body_bytes_max),
        sites=sites_of(settings.host, settings.keys, settings.allowed_hosts),
        clock=clock,
    )
    await served.serve(stop, on_bound=on_bound)
