"""Raw HTTP/1.1, for requests that well-behaved clients cannot send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.contract.topics_server import Server, check_error

__all__ = ["RawConnection", "RawReply", "connect", "request_bytes"]

JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReply:
    """One response as received."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> Any:
        """Return the content of `error`, after checking its shape."""
        body = self.json()
        check_error(body, self.status, self.headers.get("retry-after"))
        return body["error"]


class RawConnection:
    """One TCP connection; bytes are sent unchanged."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self._file = peer.makefile("rb")

    def send(self, data: bytes) -> None:
        self.peer.sendall(data)

    def reply(self) -> RawReply:
        """Return the next response that is not `100 Continue`."""
        status = self.status_line()
        headers = self._headers()
        if status == 100:
            return self.reply()
        body = self._file.read(int(headers.get("content-length", "0")))
        return RawReply(status=status, headers=headers, body=body)

    def status_line(self) -> int:
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        return int(line.split()[1])

    def skip_headers(self) -> None:
        self._headers()

    def _headers(self) -> dict[str, str]:
        headers = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.decode().lower()] = value.strip().decode()
        return headers

    def is_closed_by_the_server(self) -> bool:
        """Return whether the stream ends without further data."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._file.close()
        self.peer.close()


@contextmanager
def connect(server: Server, timeout_s: float = 20) -> Iterator[RawConnection]:
    connection = RawConnection(socket.create_connection(server.host_and_port, timeout=timeout_s))
    try:
        yield connection
    finally:
        connection.close()


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a request with a length, as ordinary clients send it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
