"""A request, a response, and the seam between transport and application."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

__all__ = ["JSON", "Application", "Fault", "HeaderList", "Request", "Response", "reason"]

JSON: Final = b"application/json"
HeaderList: TypeAlias = Sequence[tuple[bytes, bytes]]


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

    def query(self) -> dict[str, str]:
        """The query, form-decoded; of a repeated name the first value counts."""
        if not self.query_text:
            return {}
        text = self.query_text.decode("ascii", "replace")
        pairs = parse_qsl(text, keep_blank_values=True, errors="replace")
        return dict(reversed(pairs))


class Response:
    """One answer: a whole body (one buffer, or several that follow each other) or a stream of bytes.

    A stream is sent piece by piece as it yields, waits while the client does not read, and is closed
    (`aclose`) when it ends or the client goes away.
    """

    __slots__ = ("body", "content_type", "headers", "status", "stream")

    def __init__(
        self,
        status: int,
        body: bytes | Sequence[bytes] = b"",
        *,
        content_type: bytes = JSON,
        headers: HeaderList = (),
        stream: AsyncIterator[bytes] | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers
        self.stream = stream


class Fault(enum.Enum):
    """What the transport itself refuses; the application words the answer."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"


class Application(Protocol):
    """What a listener serves."""

    def answer(self, request: Request) -> Coroutine[object, None, Response]:
        """The answer to one request; never raises.

        It is first run without a task of its own. A handler that needs one, for timeouts or to be cancelled
        when the client leaves, says `await asyncio.sleep(0)` before; without it, it always runs to its end.
        """
        ...

    def screen(self, request: Request) -> Response | None:
        """Judge a request by its head alone, before a large body is read: a refusal, or None to go on."""
        ...

    def fault(self, fault: Fault, message: str) -> Response:
        """The answer to what never became a request."""
        ...


_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


def reason(status: int) -> bytes:
    return _REASONS.get(status, b"Unknown")
