"""The server process: it binds its port, recovers the log, serves, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ConfigError, Unavailable
from penstock.http import HttpLimits, Listener, sites_of
from penstock.servers.settings import ServerSettings, check_exposure, check_places
from penstock.servers.topics.routes import TopicsApi, topics_app
from penstock.storage import data_modes
from penstock.topics import Engine

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

DRAIN_S: Final = 10.0
_SPARE_FILES: Final = 256
"""File descriptors reserved for the log, segments and cold reads."""


async def serve_topics(
    settings: ServerSettings,
    engine: Engine,
    stop: asyncio.Event,
    *,
    clock: Clock = SYSTEM_CLOCK,
    on_bound: Callable[[str, int], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until `stop` is set. The port opens before the log is replayed, and responds with 503 until then.

    Raise any error of the engine. An immediate one, such as a directory in use, is raised before the port
    opens; a later one is raised after the port is closed and its file is deleted.
    """
    check_exposure(settings)
    check_places(settings)
    api = TopicsApi(engine, clock=clock, streams=settings.streams)
    app = topics_app(
        api,
        settings.keys,
        in_flight_per_key_max=settings.in_flight_per_key_max,
        probes_need_key=settings.probes_need_key,
    )
    sites = sites_of(settings.host, settings.keys, settings.allowed_hosts)
    listener = Listener(app, _limits(settings), sites=sites, clock=clock)
    starting = await _start_engine(engine)
    try:
        host, port = await _bind(listener, settings)
        if settings.port_file is not None:
            write_port_file(settings.port_file, host, port)
        if on_bound is not None:
            on_bound(host, port)
        if await _wait_for_recovery(starting, stop, settings.port_file):
            _LOG.info("ready")
            if on_ready is not None:
                on_ready()
            await stop.wait()
        _LOG.info("shutting down")
    finally:
        await _cancel(starting)
        api.drain()
        if not await listener.drain(timeout_s=DRAIN_S):
            _LOG.warning("some connections did not finish within %d s and were cut off", DRAIN_S)
        await engine.close()


async def _start_engine(engine: Engine) -> asyncio.Task[None]:
    """Start the engine, up to its first wait. Raise the error of an immediate failure."""
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    if starting.done():
        await starting
    return starting


async def _bind(listener: Listener, settings: ServerSettings) -> tuple[str, int]:
    try:
        return await listener.bind(settings.host, settings.port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise Unavailable(f"cannot listen on {settings.host}:{settings.port}: {why}") from error


async def _wait_for_recovery(
    starting: asyncio.Task[None], stop: asyncio.Event, port_file: str | None
) -> bool:
    """Return whether the engine is ready; False if the process must stop first."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
    except Exception:
        if port_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(port_file)
        raise
    finally:
        await _cancel(stopping)
    return True


async def _cancel(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for its end. Do nothing if it is done."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _limits(settings: ServerSettings) -> HttpLimits:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = HttpLimits.for_bodies(settings.body_bytes_max)
    most = known.connections_max if soft == resource.RLIM_INFINITY else soft - _SPARE_FILES
    return replace(known, connections_max=max(min(known.connections_max, most), 16))


def write_port_file(path: str, host: str, port: int) -> None:
    """Write `host:port` atomically, so that no reader sees a partial file."""
    staged = f"{path}.{os.getpid()}.tmp"
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        fd = data_modes().new_file(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        with open(fd, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(staged, path)
    except OSError as error:
        raise ConfigError(f"TOPICS_PORT_FILE {path} cannot be written: {error.strerror}") from error
