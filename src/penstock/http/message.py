"""Requests, responses, and the interface between the transport and an application."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

JSON: Final = b"application/json"
HeaderList: TypeAlias = Sequence[tuple[bytes, bytes]]
_SHORT_QUERY: Final = 128


class Request:
    """One request with its complete body. Header names are lower case; commas join repeated headers."""

    __slots__ = ("body", "headers", "method", "path", "query_text", "started_s")

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: Mapping[bytes, bytes],
        body: bytes = b"",
    ) -> None:
        self.method = method
        self.path, _, self.query_text = target.partition(b"?")
        self.headers = headers
        self.body = body
        self.started_s = time.perf_counter()

    def query(self) -> Mapping[str, str]:
        """Return the form-decoded query. The first value of a repeated name counts."""
        text = self.query_text
        return _parsed(text) if len(text) <= _SHORT_QUERY else _parsed.__wrapped__(text)


@lru_cache(maxsize=1024)
def _parsed(query_text: bytes) -> Mapping[str, str]:
    """Parse a query; cached, because clients send the same few queries repeatedly."""
    text = query_text.decode("ascii", "replace")
    return dict(reversed(parse_qsl(text, keep_blank_values=True, errors="replace")))


class StreamWriter(Protocol):
    """The writing side of one client's connection.

    No method waits or raises. Data written after the end is dropped.
    """

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up. Writing while this is False fills memory."""
        ...

    def write(self, data: bytes) -> None: ...

    def end(self) -> None:
        """Complete the response. Pending data is still sent. The body is not notified."""
        ...

    def cut(self) -> None:
        """Close without sending pending data. The body is notified."""
        ...


class StreamingBody(Protocol):
    """A body that writes into its response for as long as the connection is open."""

    def attach(self, writer: StreamWriter) -> None:
        """Start writing: the head of the response has been sent."""
        ...

    def writable(self) -> None:
        """Resume writing: the client has caught up."""
        ...

    def closed(self) -> None:
        """Stop: the client has left. Called once, unless the writer was ended first."""
        ...


class UpgradeWriter(StreamWriter, Protocol):
    """The writer of a connection that also receives."""

    def pause(self) -> None:
        """Stop reading from the client until `resume`."""
        ...

    def resume(self) -> None: ...

    def hold(self, size: int) -> bool:
        """Set the client's unprocessed bytes in the shared budget. Return False if they do not fit."""
        ...


class Upgrade(StreamingBody, Protocol):
    """A streaming body that also receives data: the connection changes to another protocol (101)."""

    def connect(self, writer: UpgradeWriter) -> None:
        """Start; called instead of `attach`."""
        ...

    def received(self, data: bytes) -> None: ...


class Response:
    """One response: a complete body (one or several buffers), an iterator of pieces, or a streaming body.

    A `stream` is sent piece by piece, waits while the client does not read, and is closed (`aclose`) when it
    ends or the client leaves. A streaming body (`live`) writes into the connection directly. An `upgrade` is
    a streaming body that changes the protocol, with status 101 and only over HTTP/1.1.
    """

    __slots__ = ("body", "content_type", "headers", "live", "status", "stream", "upgrade")

    def __init__(
        self,
        status: int,
        body: bytes | Sequence[bytes] = b"",
        *,
        content_type: bytes = JSON,
        headers: HeaderList = (),
        stream: AsyncIterator[bytes] | None = None,
        live: StreamingBody | None = None,
        upgrade: Upgrade | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        self.stream = stream
        self.live = live
        self.upgrade = upgrade


class Fault(enum.Enum):
    """The reason of a refusal by the transport; the application writes the response."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    FORBIDDEN = "forbidden"


class Application(Protocol):
    """An application that a listener serves."""

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Start a request. Respond by calling `deliver` once, now or later, or by returning a coroutine.

        Neither this method nor the coroutine raises. The coroutine starts without its own task. A handler
        that needs a task, for timeouts or to be cancelled when the client leaves, first awaits
        `asyncio.sleep(0)`. Without a task, it always runs to completion.
        """
        ...

    def screen(self, request: Request) -> Response | None:
        """Check a request by its head before a large body is read. Return a refusal, or None to continue."""
        ...

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        """Return the response to input that did not become a request; `head` is its known part."""
        ...


_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


def reason(status: int) -> bytes:
    return _REASONS.get(status, b"Unknown")
