"""A topics server with a console, and a simulated open page."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from topics_load import Connection, HttpAnswer, dial
from topics_server import Server

__all__ = ["Host", "Page", "cpu_s", "with_topics"]

_KEY = "bench"
_EVERY_S = 2.0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds used by all threads of a process, with nanosecond resolution."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux: the clock of another process


def with_topics(server: Server, count: int) -> Server:
    """Create the topics on the server."""
    for number in range(count):
        server.ask("PUT", f"/v0/topics/other-{number:05d}", {})
    return server


class Host:
    """The console's process for a server."""

    def __init__(self, server: Server) -> None:
        program = Path(__file__).with_name("console_host.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), f"http://127.0.0.1:{server.port}", _KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline()
        if not port:
            raise RuntimeError("the console did not start")
        self.port = int(port)
        self.pid = self._process.pid

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


class Page:
    """The requests of an open page: the live stream, and a page of topics every two seconds.

    It reads the bytes without drawing, because browsers usually run on another machine.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.fault: BaseException | None = None

    def open(self) -> None:
        self._over.clear()
        live = dial(self._port)
        live.sendall(_request("live"))
        listing = Connection(self._port, [_request("topics?limit=100")], HttpAnswer())
        self._sockets = [live, listing.socket]
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._follow, live)),
            threading.Thread(target=self._guarded, args=(self._list, listing)),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close the page. Raises any error since it was opened."""
        self._over.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()
        self._sockets, self._threads = [], []
        if self.fault is not None:
            raise RuntimeError("the page could not be read") from self.fault

    def _guarded(self, work: object, on: object) -> None:
        try:
            work(on)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - told when the page is closed
            if not self._over.is_set():
                self.fault = error

    def _follow(self, live: socket.socket) -> None:
        buffer = bytearray(1 << 16)
        live.settimeout(30)
        if not buffer.startswith(b"HTTP/1.1 200", 0, live.recv_into(buffer)):
            raise RuntimeError(f"no live stream: {bytes(buffer[:200])!r}")
        while live.recv_into(buffer):
            pass
        raise RuntimeError("the live stream ended")

    def _list(self, listing: Connection) -> None:
        buffer = bytearray(1 << 16)
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due += _EVERY_S
            listing.send()
            while not listing.receive(buffer):
                pass


def _request(path: str) -> bytes:
    head = f"GET /console/api/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {_KEY}\r\n\r\n"
    return head.encode()
