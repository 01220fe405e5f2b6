"""One request and its response within an HTTP/2 connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.http.flight import Flight
from penstock.http.message import Application, Request, Response

__all__ = ["H2Stream"]


class LiveStream(Protocol):
    """The sink of a live response, as its stream tells it what became of the client."""

    def emptied(self) -> None: ...

    def dropped(self) -> None: ...


class H2Stream:
    """What was read of the request, and what is still to be sent of the response."""

    __slots__ = (
        "_body_mark",
        "_emptied",
        "_flight",
        "_headers",
        "_method",
        "_stalled_ticks",
        "_target",
        "body",
        "body_bytes",
        "has_all",
        "held_bytes",
        "id",
        "is_answered",
        "is_complete",
        "live",
        "outbox",
        "outbox_bytes",
        "sender",
    )

    def __init__(self, stream_id: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.id = stream_id
        self._method = self._target = b""
        self._headers: dict[bytes, bytes] = {}
        for name, value in headers:
            self._add_header(bytes(name), bytes(value))
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.held_bytes = 0
        """How much of the body counts in the budget."""
        self.is_complete = False
        self.is_answered = False
        self.outbox: deque[memoryview] = deque()
        self.outbox_bytes = 0
        self.has_all = False
        """Nothing will be added to the outbox."""
        self.sender: asyncio.Task[None] | None = None
        self.live: LiveStream | None = None
        self._body_mark = -1
        self._stalled_ticks = 0
        self._flight: Flight | None = None
        self._emptied: asyncio.Future[None] | None = None

    def _add_header(self, name: bytes, value: bytes) -> None:
        if name == b":method":
            self._method = value
        elif name == b":path":
            self._target = value
        elif name == b":authority":
            self._headers[b"host"] = value
        elif not name.startswith(b":"):
            before = self._headers.get(name)
            self._headers[name] = value if before is None else before + b", " + value

    @property
    def is_head_request(self) -> bool:
        return self._method == b"HEAD"

    @property
    def declared_bytes(self) -> int | None:
        text = self._headers.get(b"content-length", b"")
        return int(text) if text.isdigit() else None

    def head(self) -> Request:
        """The request without its body."""
        return Request(self._method, self._target, self._headers)

    def request(self) -> Request:
        return Request(self._method, self._target, self._headers, b"".join(self.body))

    def fly(self, app: Application, deliver: Callable[[H2Stream, Response], None]) -> None:
        """Have the request answered."""
        self._flight = Flight(lambda response: deliver(self, response))
        self._flight.start(app, self.request())

    def response_headers(self, response: Response, date: bytes) -> list[tuple[bytes, bytes]]:
        headers = [
            (b":status", b"%d" % response.status),
            (b"content-type", response.content_type),
            (b"date", date),
        ]
        if response.stream is None and response.live is None:
            body = response.body
            size = len(body) if isinstance(body, bytes) else sum(map(len, body))
            headers.append((b"content-length", b"%d" % size))
        headers.extend(response.headers)
        return headers

    def put(self, pieces: Iterable[bytes]) -> int:
        """Put pieces of the body into the outbox; returns how many bytes they are."""
        views = [memoryview(piece) for piece in pieces if piece]
        size = sum(map(len, views))
        self.outbox.extend(views)
        self.outbox_bytes += size
        return size

    def is_stalled(self, ticks_max: int) -> bool:
        """Called once a second: whether the request's body has not moved for so many."""
        if self.is_complete or self.is_answered or self.body_bytes != self._body_mark:
            self._body_mark, self._stalled_ticks = self.body_bytes, 0
            return False
        self._stalled_ticks += 1
        return self._stalled_ticks >= ticks_max

    def next_piece(self, room: int) -> bytes:
        """At most `room` bytes from the front of the outbox."""
        first = self.outbox.popleft()
        if len(first) > room:
            self.outbox.appendleft(first[room:])
            first = first[:room]
        self.outbox_bytes -= len(first)
        return bytes(first)

    async def emptied(self) -> None:
        """Wait until everything put into the outbox has gone out."""
        if self.outbox:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def wake(self) -> None:
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        self._emptied = None
        if self.live is not None:
            self.live.emptied()

    def abandon(self) -> None:
        """Nobody waits for the response any more."""
        self.outbox.clear()
        self.outbox_bytes = 0
        if self._flight is not None:
            self._flight.abandon()
        if self.sender is not None:
            self.sender.cancel()
        if self.live is not None:
            self.live.dropped()
