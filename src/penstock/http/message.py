"""Requests, responses, and the interface between transport and application."""

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
    """One request with its whole body. Header names are lower case; repeated headers are joined by commas."""

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
        """The query, form-decoded; of a repeated name the first value counts."""
        text = self.query_text
        return _parsed(text) if len(text) <= _SHORT_QUERY else _parsed.__wrapped__(text)


@lru_cache(maxsize=1024)
def _parsed(query_text: bytes) -> Mapping[str, str]:
    """Clients send the same few queries over and over."""
    text = query_text.decode("ascii", "replace")
    return dict(reversed(parse_qsl(text, keep_blank_values=True, errors="replace")))


class StreamWriter(Protocol):
    """The writing side of one client's connection.

    No method waits or raises; what is written after the end is dropped.
    """

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up. A sender that ignores this fills memory."""
        ...

    def write(self, data: bytes) -> None: ...

    def end(self) -> None:
        """Complete the response; what was written is still sent. The body is not notified."""
        ...

    def cut(self) -> None:
        """Close without sending the rest; the body is notified."""
        ...


class StreamingBody(Protocol):
    """A body that sends into its response for as long as it lasts."""

    def attach(self, writer: StreamWriter) -> None:
        """Begin: the head of the response has been sent."""
        ...

    def writable(self) -> None:
        """Continue: the client has caught up after the writer was not writable."""
        ...

    def closed(self) -> None:
        """Stop: the client has left. Called once, unless the writer was ended before."""
        ...


class UpgradeWriter(StreamWriter, Protocol):
    """The writer of a connection that also receives."""

    def pause(self) -> None:
        """Read nothing more from the client until `resume`."""
        ...

    def resume(self) -> None: ...

    def hold(self, size: int) -> bool:
        """Count this many bytes of the client as waiting; False if all connections have no room for them."""
        ...


class Upgrade(StreamingBody, Protocol):
    """A streaming body that also receives: the connection changes to another protocol (101)."""

    def connect(self, writer: UpgradeWriter) -> None:
        """Begin; called instead of `attach`."""
        ...

    def received(self, data: bytes) -> None: ...


class Response:
    """One answer: a whole body (one buffer, or several in a row), a stream, or a streaming body.

    A stream is sent piece by piece as it yields, waits while the client does not read, and is closed
    (`aclose`) when it ends or the client goes away. A streaming body writes into the connection directly;
    one that is an upgrade takes the connection to another protocol, under status 101 and over HTTP/1.1 only.
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
    """A refusal by the transport; the application writes the response."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    FORBIDDEN = "forbidden"


class Application(Protocol):
    """An application that a listener serves."""

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Answer one request: by calling `deliver` once, now or later, or by the coroutine that is returned.

        Never raises, nor does the coroutine. That is first run without a task of its own. A handler that
        needs one, for timeouts or to be cancelled when the client leaves, says `await asyncio.sleep(0)`
        before; without it, it always runs to its end.
        """
        ...

    def screen(self, request: Request) -> Response | None:
        """Judge a request by its head alone, before a large body is read: a refusal, or None to continue."""
        ...

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        """The answer to what never became a request; `head` is what is known of it, if anything is."""
        ...


_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


def reason(status: int) -> bytes:
    return _REASONS.get(status, b"Unknown")
