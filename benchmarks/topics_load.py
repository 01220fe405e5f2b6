"""A lightweight load generator: prebuilt requests, one thread, no client library.

Every connection is a closed loop: it sends a request, waits for the whole response, and sends the next one.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

__all__ = ["Answer", "Connection", "HttpAnswer", "Lines", "Load", "dial", "drive"]

_BUFFER_BYTES = 1024 * 1024
_TIMEOUT_S = 180.0


class Answer(Protocol):
    """Detector of complete responses. Each call returns the number of missing bytes, 0 at the end."""

    def begin(self, buffer: bytearray, size: int) -> int: ...

    def go_on(self, buffer: bytearray, size: int, missing: int) -> int: ...


class HttpAnswer:
    """A response with a length. A failure ends the run."""

    def begin(self, buffer: bytearray, size: int) -> int:
        head = buffer.find(b"\r\n\r\n", 0, size)
        if buffer[9:10] != b"2" or head < 0:
            raise RuntimeError(f"the server answered {bytes(buffer[: min(size, 400)])!r}")
        at = buffer.find(b"content-length: ", 0, head) + 16
        return head + 4 + int(buffer[at : buffer.find(b"\r", at)]) - size

    def go_on(self, buffer: bytearray, size: int, missing: int) -> int:
        return missing - size


@dataclass(frozen=True, slots=True)
class Lines:
    """A response that ends after a byte has occurred `count` times."""

    byte: bytes
    count: int

    def begin(self, buffer: bytearray, size: int) -> int:
        return self.go_on(buffer, size, self.count)

    def go_on(self, buffer: bytearray, size: int, missing: int) -> int:
        left = missing - buffer.count(self.byte, 0, size)
        if left < 0:
            raise RuntimeError(f"not what was asked for: {bytes(buffer[: min(size, 400)])!r}")
        return left


class Connection:
    """One client and the requests that it sends repeatedly."""

    __slots__ = ("answer", "missing", "requests", "sent_s", "socket")

    def __init__(self, port: int, requests: Sequence[bytes], answer: Answer, hello: bytes = b"") -> None:
        self.socket = dial(port)
        if hello:
            self.socket.sendall(hello)
        self.requests = cycle(requests)
        self.answer = answer
        self.missing = 0
        self.sent_s = 0.0

    def send(self) -> None:
        self.missing = -1
        request = next(self.requests)
        self.sent_s = time.perf_counter()
        self.socket.sendall(request)

    def receive(self, buffer: bytearray) -> bool:
        """Process the received bytes. Return True at the end of the response."""
        size = self.socket.recv_into(buffer)
        if not size:
            raise RuntimeError("the server closed the connection")
        if not self.missing:
            return False  # no request is pending: a heartbeat of the server
        if self.missing < 0:
            self.missing = self.answer.begin(buffer, size)
        else:
            self.missing = self.answer.go_on(buffer, size, self.missing)
        return not self.missing


def dial(port: int) -> socket.socket:
    """Return a connection to this machine whose sends do not block at the sizes used here."""
    connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _BUFFER_BYTES)
    return connection


@dataclass(frozen=True, slots=True)
class Load:
    """Results of a run: its duration and the response times."""

    seconds: float
    waits_s: list[float]

    @property
    def requests(self) -> int:
        return len(self.waits_s)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.waits_s)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000


def drive(connections: Sequence[Connection], seconds: float) -> Load:
    """Keep all connections busy for the given time, then wait for the outstanding responses."""
    buffer = bytearray(_BUFFER_BYTES)
    began = time.perf_counter()
    with _no_collector():
        if len(connections) == 1:
            waits = _drive_one(connections[0], buffer, began + seconds)
        else:
            waits = _drive_many(connections, buffer, began + seconds)
    return Load(time.perf_counter() - began, waits)


def _drive_one(connection: Connection, buffer: bytearray, end_s: float) -> list[float]:
    waits: list[float] = []
    now = 0.0
    while now < end_s:
        connection.send()
        while not connection.receive(buffer):
            pass
        now = time.perf_counter()
        waits.append(now - connection.sent_s)
    return waits


def _drive_many(connections: Sequence[Connection], buffer: bytearray, end_s: float) -> list[float]:
    waits: list[float] = []
    by_number = {connection.socket.fileno(): connection for connection in connections}
    busy = len(connections)
    with select.epoll() as poll:
        for number, connection in by_number.items():
            poll.register(number, select.EPOLLIN)
            connection.send()
        while busy:
            ready = poll.poll(_TIMEOUT_S)
            if not ready:
                raise TimeoutError("the server does not answer")
            for number, _ in ready:
                connection = by_number[number]
                if not connection.receive(buffer):
                    continue
                now = time.perf_counter()
                waits.append(now - connection.sent_s)
                if now < end_s:
                    connection.send()
                else:
                    busy -= 1
    return waits


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
