"""One TCP port: accept connections, detect HTTP/1.1 or HTTP/2, enforce timeouts, and drain.

`run` gives a server process its event loop and signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Final, cast

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.http.connection import Host
from penstock.http.h1 import H1Connection
from penstock.http.h1_heads import response_head
from penstock.http.h2 import PREFACE, H2Connection
from penstock.http.limits import HttpLimits
from penstock.http.message import Application, Fault
from penstock.http.sites import Guarded, Sites

_BACKLOG = 2048
_SWITCH_INTERVAL_S: Final = 0.0005
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 120_000}
"""A client that disappears without closing is detected after two minutes, even on an idle connection."""


class _NewConnection(asyncio.Protocol):
    """A connection whose first bytes, which select the protocol, have not arrived."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._first = b""
        self._ticks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._host.is_full or self._host.draining:
            self._refuse()
            return
        self._host.connections.add(self)

    def data_received(self, data: bytes) -> None:
        data = self._first + data
        if len(data) < len(PREFACE) and PREFACE.startswith(data):
            self._first = data
            return
        self._host.connections.discard(self)
        is_h2 = data.startswith(PREFACE)
        protocol = H2Connection(self._host) if is_h2 else H1Connection(self._host)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.connections.discard(self)

    def _refuse(self) -> None:
        response = self._host.app.fault(Fault.OVERLOADED, "the server has as many connections as it may")
        body = response.body if isinstance(response.body, bytes) else b"".join(response.body)
        self._transport.write(response_head(response, len(body), self._host.date, keep_alive=False) + body)
        self._transport.close()

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks >= self._host.limits.head_timeout_s:
            self.abort()

    def drain(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class Listener:
    """Serves an application on one port.

    listener = Listener(app, limits)
    address = await listener.bind("127.0.0.1", 0)
    ...
    await listener.drain(timeout_s=10)
    """

    def __init__(
        self,
        app: Application,
        limits: HttpLimits | None = None,
        *,
        sites: Sites | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`sites` blocks pages of other sites. Pass None for a server with keys or its own check."""
        self._app = app if sites is None else Guarded(app, sites)
        self._limits = limits or HttpLimits()
        self._clock = clock
        self._host: Host | None = None
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def bind(self, host: str, port: int, *, reuse_port: bool = False) -> tuple[str, int]:
        """Start accepting connections. Return the address, including the chosen port for port 0.

        `reuse_port` lets several processes accept on one port; the kernel distributes the connections. Raise
        `OSError` if the port cannot be bound.
        """
        loop = asyncio.get_running_loop()
        shared = self._host = Host(self._app, self._limits, self._clock, loop)
        self._server = await loop.create_server(
            lambda: _NewConnection(shared),
            host,
            port,
            backlog=_BACKLOG,
            start_serving=False,
            reuse_port=reuse_port or None,
        )
        for listening in self._server.sockets:
            _keep_alive(listening)
        await self._server.start_serving()
        self._ticker = loop.create_task(self._keep_time())
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    @property
    def connections(self) -> int:
        return len(self._host.connections) if self._host is not None else 0

    def tick(self) -> None:
        """Enforce timeouts; called once a second."""
        if self._host is not None:
            self._host.set_date()
            for connection in list(self._host.connections):
                connection.tick()

    async def _keep_time(self) -> None:
        while True:
            await self._clock.sleep(1)
            self.tick()

    async def stop_accepting(self) -> None:
        """Refuse new connections, and further requests on open ones."""
        if self._host is None or self._server is None:
            return
        self._host.draining = True
        self._server.close()
        for connection in list(self._host.connections):
            connection.drain()

    async def drain(self, *, timeout_s: float) -> bool:
        """Let requests in progress finish, then close all connections. Return False if some were cut off."""
        await self.stop_accepting()
        if self._host is None:
            return True
        deadline = self._clock.monotonic() + timeout_s
        while self._host.connections and self._clock.monotonic() < deadline:
            await self._clock.sleep(0.01)
        left = list(self._host.connections)
        for connection in left:
            connection.abort()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        await asyncio.sleep(0)  # lets the transports of aborted connections close
        return not left


def _keep_alive(listening: socket.socket) -> None:
    """Enable TCP keepalive on a listening socket, where supported. Accepted connections inherit it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def run(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    """Run `main` on the fastest available event loop. SIGINT and SIGTERM set the event passed to it."""
    tune()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_with_signals(main))


async def _with_signals(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await main(stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def tune() -> None:
    """Apply process-wide settings for a server; a library must not change them."""
    # After a sync, the commit thread needs the interpreter lock, which the event loop holds.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Requests leave little for the cycle collector, so it can run less often.
    gc.set_threshold(50_000, 20, 100)
    if sys.platform == "linux":
        _keep_large_buffers()


def settle() -> None:
    """Exempt the objects that recovery built from the cycle collector: they are permanent and numerous."""
    gc.collect()
    gc.freeze()


def _keep_large_buffers() -> None:
    """Let glibc reuse the memory of large buffers; otherwise each one causes new page faults."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 64 << 20)
