"""Serve a database, from binding its port to its last flush.

The port is bound first: a server that cannot bind it does not fence the one that has it. Then the database is
opened and its source is started. A stop or a failure ends them in reverse order: the source, the requests in
progress, the database. The shutdown takes bounded time, even if the storage does not respond.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import SyncMode
from penstock.errors import ConfigError, OutcomeUnknown, PenstockError, Unavailable
from penstock.http import (
    App,
    Call,
    Errors,
    HttpLimits,
    Keyring,
    Listener,
    Policy,
    Principal,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    Sites,
    sites_of,
)
from penstock.metrics import Gauge
from penstock.servers.process import DRAIN_S, write_port_file

RETRY: Final = (b"retry-after", b"1")
"""The header of every response that asks the client to retry."""
_READING: Final = "readers"
_WRITING: Final = "writers"
_READS: Final = (Scope.NONE, Scope.READ)

C = TypeVar("C", bound=Call)


class _RequestCount:
    """Counts requests of one kind in progress. Probes and metrics are counted, but never refused."""

    __slots__ = ("_count", "_count_max", "_kind")

    def __init__(self, kind: str, count_max: int) -> None:
        self._kind = kind
        self._count_max = count_max
        self._count = 0

    def check(self) -> None:
        """Raise `Unavailable` if one more request would exceed the limit."""
        if self._count >= self._count_max:
            most = f"{self._count_max} requests of {self._kind}"
            raise Unavailable(f"{most} are in progress, which is the limit")

    def enter(self, principal: Principal) -> None:
        self._count += 1

    def leave(self, principal: Principal) -> None:
        self._count -= 1


class DatabaseApp(App[C]):
    """An `App` with separate limits for readers and writers. It reports how long the database is opening."""

    def __init__(
        self,
        routes: Routes[C],
        keys: Keyring,
        *,
        call: Callable[[Request, Principal, str], C],
        check_ready: Callable[[], None],
        requests_max: int,
        errors: Errors,
    ) -> None:
        policy = Policy(call=call, authenticate=keys.authenticate, check_ready=check_ready, own_task=True)
        super().__init__(_bounded(routes, requests_max), policy, self._refused)
        self._refusal = errors
        self.opening_s: Callable[[], float] | None = None
        """Returns how long the database has been opening; None once it is open."""

    def _refused(self, error: Exception, request: Request | None) -> Response:
        if self.opening_s is not None and isinstance(error, Unavailable):
            error = Unavailable(f"{error}, for {self.opening_s():.0f} s now")
        return self._refusal(error, request)


def _bounded(routes: Routes[C], requests_max: int) -> Iterator[tuple[bytes, bytes, Route[C]]]:
    """Return the routes with their limits. Routes that do not wait for the database are never refused."""
    # Separate limits, because all writers may be waiting for a storage that does not respond.
    counts = {kind: _RequestCount(kind, requests_max) for kind in (_READING, _WRITING)}
    for method, path, route in routes:
        cap = counts[_kind(route)]
        check = _both(cap.check, route.check) if route.ready else route.check
        yield method, path, replace(route, cap=cap, check=check)


def _both(has_room: Callable[[], None], check: Callable[[Request], None] | None) -> Callable[[Request], None]:
    def checked(request: Request) -> None:
        has_room()
        if check is not None:
            check(request)

    return checked


def _kind(route: Route[C]) -> str:
    """Return the kind of a route: readers, or writers, which wait for the storage."""
    return _READING if route.scope in _READS else _WRITING


class DecodedBytes:
    """Bytes of decoded bodies still in use, over all requests. One event loop owns it."""

    def __init__(self, bytes_max: int, gauge: Gauge) -> None:
        """`gauge` shows their number."""
        self._bytes_max = bytes_max
        self._held = 0
        self._gauge = gauge

    @contextmanager
    def holding(self, size: int) -> Iterator[Held]:
        """Count `size` bytes until the context ends. Raise `Unavailable` if they do not fit."""
        held = Held(self)
        try:
            held.grow_to(size)
            yield held
        finally:
            self._change(-held.size)

    def take(self, size: int) -> None:
        """Count `size` more bytes. Raise `Unavailable` if they do not fit."""
        if self._held + size > self._bytes_max:
            raise Unavailable(
                f"requests being decoded already hold {self._held:,} bytes, and the limit is "
                f"{self._bytes_max:,}: send it again"
            )
        self._change(size)

    def _change(self, size: int) -> None:
        self._held += size
        self._gauge.set(self._held)


class Held:
    """The bytes that one request holds."""

    def __init__(self, total: DecodedBytes) -> None:
        self._total = total
        self.size = 0

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. Raise `Unavailable` if they do not fit."""
        if size > self.size:
            self._total.take(size - self.size)
            self.size = size


_LOG = logging.getLogger(__name__)
_CHECK_S: Final = 2.0
"""How often to check that this process is still the writer while nothing is written."""
_WAIT_S: Final = 10.0
"""How often to log that the database is not open yet."""
CLOSE_S: Final = 15.0
"""How long the last flush may take. Together with the drain of requests, this is less than the 30 seconds
after which most supervisors kill a process."""
_STALLED_S: Final = 20.0
"""A storage that has worked on one flush for this long is stalled. Writers wait longer by default."""
_CANCELS: Final = 3
"""How often to cancel a task: while it cleans up, it may wait for the storage again."""
_CANCEL_S: Final = 0.5


class Database(Protocol):
    """A database that the process owns."""

    @property
    def failed(self) -> Exception | None:
        """The error that stopped the database, if any."""
        ...

    async def failure(self) -> Exception:
        """Wait until a failure stops the database, and return the error."""
        ...

    async def check(self) -> None:
        """Raise `Fenced` if another process owns the database, `Unavailable` if that is unknown.

        Any other error means that the storage has stopped permanently; the server ends with it.
        """
        ...

    @property
    def unstored(self) -> int:
        """The number of accepted writes that are not durable."""
        ...

    @property
    def storage_wait_s(self) -> float:
        """How long the storage has worked on its current flush; 0 if it is idle."""
        ...

    async def close(self) -> None:
        """Make every accepted write durable. Raise the error that stopped the database."""
        ...


def check_writable(database: Database) -> None:
    """Raise `Unavailable` while the storage does not respond, so that no write can become durable."""
    if database.storage_wait_s >= _STALLED_S:
        raise Unavailable(_stalled(database))


def _stalled(database: Database) -> str:
    return f"no write succeeds: the storage has not responded for {database.storage_wait_s:.0f} s"


class Source(Protocol):
    """A source that writes to a database while the database is served."""

    async def run(self) -> object:
        """Work until stopped. An error ends the server."""
        ...

    def stop(self) -> None:
        """Stop in order; `run` returns soon after."""
        ...


D = TypeVar("D", bound=Database)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address of a server; port 0 takes a free port, which `port_file` names."""

    host: str
    port: int
    port_file: str | None = None


class ServedDatabase(Generic[D]):
    """A database served over HTTP, from binding its port to closing it."""

    def __init__(
        self,
        app: DatabaseApp[Any],
        place: Place,
        *,
        opening: Callable[[], Coroutine[None, None, D]],
        opened: Callable[[D], None],
        draining: Callable[[], None],
        source: Callable[[D], Source] | None = None,
        limits: HttpLimits | None = None,
        sites: Sites | None = None,
        clock: Clock = SYSTEM_CLOCK,
        close_s: float = CLOSE_S,
    ) -> None:
        """`opened` makes the database available to requests; `draining` refuses late requests.

        The close is abandoned after `close_s` seconds.
        """
        self._app = app
        self._listener = Listener(app, limits, sites=sites, clock=clock)
        self._place = place
        self._opening = opening
        self._opened = opened
        self._draining = draining
        self._make_source = source
        self._clock = clock
        self._close_s = close_s

    async def serve(self, stop: asyncio.Event, *, on_bound: Callable[[str, int], None] | None = None) -> None:
        """Serve until `stop` is set. All accepted writes are then durable.

        Raise `Fenced` if a newer process owns the database or its queue. Raise `OutcomeUnknown` if the
        storage did not store everything in time at the end, or has stopped permanently. Raise any other error
        that stops it.
        """
        host, port = await self._bind()
        try:
            if self._place.port_file is not None:
                write_port_file(self._place.port_file, host, port)
            if on_bound is not None:
                on_bound(host, port)
            database = await self._open(stop)
            if database is not None:
                self._opened(database)
                _LOG.info("ready")
                await self._serve_open(database, stop)
        finally:
            await self._listener.drain(timeout_s=0)

    async def _open(self, stop: asyncio.Event) -> D | None:
        """Open the database and report the wait. Return None if the process must stop first."""
        began = self._clock.monotonic()
        self._app.opening_s = lambda: self._clock.monotonic() - began
        reporting = asyncio.ensure_future(self._report_waiting(self._app.opening_s))
        try:
            return await _open_unless(stop, self._opening())
        finally:
            self._app.opening_s = None
            await _cancel(reporting)

    async def _report_waiting(self, waited_s: Callable[[], float]) -> None:
        while True:
            await self._clock.sleep(_WAIT_S)
            _LOG.warning(
                "the database is not open after %.0f s: the store may not respond, or there is much to read",
                waited_s(),
            )

    async def _serve_open(self, database: D, stop: asyncio.Event) -> None:
        source = None if self._make_source is None else self._make_source(database)
        working = None if source is None else asyncio.ensure_future(source.run())
        try:
            await self._wait_for_end(database, stop, working)
        finally:
            _LOG.info("shutting down")
            if source is not None:
                source.stop()
            patience_s = DRAIN_S if database.failed is None else 0
            if not await self._listener.drain(timeout_s=patience_s) and patience_s:
                _LOG.warning("some connections did not finish within %d s and were cut off", DRAIN_S)
            self._draining()
            await self._close(database, working)

    async def _close(self, database: D, working: asyncio.Future[object] | None) -> None:
        """Close the source and the database. Raise `OutcomeUnknown` if that takes too long."""
        closing = asyncio.ensure_future(_close_all(database, working))
        done, _ = await asyncio.wait({closing}, timeout=self._close_s)
        if done:
            await closing
            return
        count = database.unstored
        await _force_cancel(closing)
        reason = f"the storage did not finish within {self._close_s:g} s"
        if count:
            raise OutcomeUnknown(f"{reason}; accepted writes that may not be stored: {count}")
        _LOG.warning("%s; every accepted write was already stored", reason)

    async def _wait_for_end(
        self, database: D, stop: asyncio.Event, working: asyncio.Future[object] | None
    ) -> None:
        """Wait for the stop. Raise an error that ends the server first."""
        waits: list[asyncio.Future[object]] = [
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(database.failure()),
            asyncio.ensure_future(self._watch(database)),
        ]
        watched = waits if working is None else [*waits, working]
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if database.failed is not None:
                raise database.failed
            for task in watched:
                if task.done():
                    await task
        finally:
            for task in waits:
                await _cancel(task)

    async def _watch(self, database: D) -> None:
        """Detect a newer writer, or a storage that has stopped permanently, while nothing is written.

        A storage that does not respond may recover.
        """
        is_reported = False
        while True:
            await self._clock.sleep(_CHECK_S)
            is_stalled = database.storage_wait_s >= _STALLED_S
            if is_stalled and not is_reported:
                _LOG.warning("%s", _stalled(database))
            is_reported = is_stalled
            with contextlib.suppress(Unavailable):
                await database.check()

    async def _bind(self) -> tuple[str, int]:
        host, port = self._place.host, self._place.port
        try:
            return await self._listener.bind(host, port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"cannot listen on {host}:{port}: {why}") from error


async def _close_all(database: Database, working: asyncio.Future[object] | None) -> None:
    """Wait for the source, then close the database. An error of the database takes precedence."""
    try:
        if working is not None:
            if database.failed is not None:
                working.cancel()
            await working
    except asyncio.CancelledError:
        pass
    finally:
        await database.close()


async def _open_unless(stop: asyncio.Event, opening: Coroutine[None, None, D]) -> D | None:
    """Return the result of `opening`, or None if the process must stop first."""
    task = asyncio.ensure_future(opening)
    stopping = asyncio.ensure_future(stop.wait())
    taken = False
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        taken = task.done()
        return await task if taken else None
    finally:
        await _cancel(stopping)
        if not taken:
            await _close_opened(task)


async def _close_opened(opening: asyncio.Future[D]) -> None:
    """Cancel an open. If it has completed anyway, close the opened database."""
    await _force_cancel(opening)
    if opening.done() and not opening.cancelled() and opening.exception() is None:
        closing = asyncio.ensure_future(opening.result().close())
        await asyncio.wait({closing}, timeout=CLOSE_S)
        await _force_cancel(closing)


async def _force_cancel(task: asyncio.Future[T]) -> None:
    """End a task that may wait for an unresponsive storage; ignore its error."""
    for _ in range(_CANCELS):
        if task.done():
            break
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)
    if task.done() and not task.cancelled() and task.exception() is not None:
        _LOG.debug("given up: %s", task.exception())


async def _cancel(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await task


class DatabaseSettings(Protocol):
    """The settings of a database server that `serve_database` needs."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def port_file(self) -> str | None: ...
    @property
    def keys(self) -> Keyring: ...
    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...
    @property
    def body_bytes_max(self) -> int: ...


class DatabaseApi(Generic[D]):
    """The common part of all database handlers: the database, once it is open."""

    def __init__(self, noun: str) -> None:
        """`noun` names the database in messages."""
        self.database: D | None = None
        self.draining = False
        self._noun = noun

    def check_ready(self) -> None:
        """Raise `Unavailable` while requests cannot be served."""
        self.check_failed()
        if self.database is None:
            raise Unavailable(f"the {self._noun} is being opened")
        if self.draining:
            raise Unavailable("the server is shutting down")

    def check_failed(self) -> None:
        """Raise `Unavailable` if the database has stopped after a failure."""
        if self.database is not None and self.database.failed is not None:
            raise Unavailable(f"the {self._noun} has stopped: {self.database.failed}")

    @property
    def _db(self) -> D:
        self.check_ready()
        assert self.database is not None
        return self.database


async def serve_database(
    app: DatabaseApp[Any],
    api: DatabaseApi[D],
    settings: DatabaseSettings,
    stop: asyncio.Event,
    *,
    opening: Callable[[], Coroutine[None, None, D]],
    sync_mode: SyncMode,
    source: Callable[[D], Source] | None,
    clock: Clock,
    on_bound: Callable[[str, int], None] | None,
    on_ready: Callable[[D], None] | None,
) -> None:
    """Serve a database until `stop` is set. Every accepted write is then durable.

    Raise the errors of `ServedDatabase.serve` and `opening`, and `ConfigError` for a source whose records no
    flush would make durable.
    """
    if source is not None and sync_mode is SyncMode.EXPLICIT:
        raise ConfigError("sync_mode: a queue is acknowledged after a durable flush; use every_flush")

    def opened(database: D) -> None:
        api.database = database
        if on_ready is not None:
            on_ready(database)

    def draining() -> None:
        api.draining = True

    served = ServedDatabase(
        app,
        Place(host=settings.host, port=settings.port, port_file=settings.port_file),
        opening=opening,
        opened=opened,
        draining=draining,
        source=source,
        limits=HttpLimits.for_bodies(settings.body_bytes_max),
        sites=sites_of(settings.host, settings.keys, settings.allowed_hosts),
        clock=clock,
    )
    await served.serve(stop, on_bound=on_bound)
