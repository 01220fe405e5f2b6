"""Parts of an HTTP/2 connection: one request with its response, and checks of frames before decoding."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from penstock.http.connection import RequestTask
from penstock.http.message import Application, Request, Response

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_STREAM_BYTES: Final = 4096
"""The overhead of one stream."""
_PIECE_BYTES: Final = 64
"""The overhead of one piece of a body."""


class MalformedHead(Exception):
    """The head of a request breaks the rules of HTTP/2."""


class StreamObserver(Protocol):
    """The writer of a live response, notified by its stream."""

    def emptied(self) -> None: ...

    def dropped(self) -> None: ...


class H2Stream:
    """One stream: the received part of the request, and the unsent part of the response."""

    __slots__ = (
        "_body_mark",
        "_emptied",
        "_headers",
        "_method",
        "_stalled_ticks",
        "_target",
        "_task",
        "body",
        "body_bytes",
        "has_all",
        "head_bytes",
        "held_bytes",
        "id",
        "is_answered",
        "is_complete",
        "live",
        "outbox",
        "outbox_bytes",
        "sender",
    )

    def __init__(self, stream_id: int, headers: Iterable[tuple[bytes, bytes]], fields_max: int = 256) -> None:
        """Raise `MalformedHead` if the head breaks the rules of HTTP/2."""
        self.id = stream_id
        self._method = self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._read_head(list(headers), fields_max)
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.head_bytes = _STREAM_BYTES + sum(len(name) + len(value) for name, value in self._headers.items())
        """Bytes counted in the budget while the stream is open."""
        self.held_bytes = 0
        """Bytes counted now: the head, and the body until the response starts."""
        self.is_complete = False
        self.is_answered = False
        self.outbox: deque[memoryview] = deque()
        self.outbox_bytes = 0
        self.has_all = False
        """Whether the outbox is complete."""
        self.sender: asyncio.Task[None] | None = None
        self.live: StreamObserver | None = None
        self._body_mark = -1
        self._stalled_ticks = 0
        self._task: RequestTask | None = None
        self._emptied: asyncio.Future[None] | None = None

    def _read_head(self, fields: list[tuple[bytes, bytes]], fields_max: int) -> None:
        """Check a head by RFC 9113, 8.2 and 8.3, in time that hardly depends on its size."""
        if len(fields) > fields_max:
            raise MalformedHead(f"more than {fields_max} headers")
        pseudo: dict[bytes, bytes] = {}
        joined: dict[bytes, list[bytes]] = {}
        for name, value in fields:
            if b"\0" in value or b"\n" in value or b"\r" in value or value != value.strip(b" \t"):
                raise MalformedHead("a value has surrounding blanks or contains a line break")
            if name in _PSEUDO and name not in pseudo and not joined:
                pseudo[bytes(name)] = bytes(value)
            elif (
                _NAME(name) is None or name in _OF_THE_CONNECTION or (name == b"te" and value != b"trailers")
            ):
                raise MalformedHead("a header is not allowed in HTTP/2")
            else:
                joined.setdefault(bytes(name), []).append(bytes(value))
        self._method, self._target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if not (self._method and self._target and pseudo.get(b":scheme")):
            raise MalformedHead(":method, :scheme or :path is missing")
        authority, hosts = pseudo.get(b":authority"), joined.get(b"host", [])
        if len(hosts) > 1 or (authority is not None and hosts and hosts[0] != authority):
            raise MalformedHead("the request names more than one host")
        self._headers = {name: b", ".join(values) for name, values in joined.items()}
        if authority is not None:
            self._headers[b"host"] = authority

    def add_body(self, data: bytes) -> int:
        """Append a piece of the body; return how many bytes to count in the budget."""
        if not data:
            return 0
        self.body.append(data)
        self.body_bytes += len(data)
        return len(data) + _PIECE_BYTES

    @property
    def is_head_request(self) -> bool:
        return self._method == b"HEAD"

    @property
    def declared_bytes(self) -> int | None:
        text = self._headers.get(b"content-length", b"")
        return int(text) if text.isdigit() else None

    def head(self) -> Request:
        """Return the request without its body."""
        return Request(self._method, self._target, self._headers)

    def request(self) -> Request:
        return Request(self._method, self._target, self._headers, b"".join(self.body))

    def start(self, app: Application, deliver: Callable[[H2Stream, Response], None]) -> None:
        """Start the request; call `deliver` with its response."""
        self._task = RequestTask(lambda response: deliver(self, response))
        self._task.start(app, self.request())

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
        """Append pieces of the body to the outbox; return their total size."""
        views = [memoryview(piece) for piece in pieces if piece]
        size = sum(map(len, views))
        self.outbox.extend(views)
        self.outbox_bytes += size
        return size

    def is_stalled(self, ticks_max: int) -> bool:
        """Return whether the request's body has stalled for `ticks_max` calls. Call once a second."""
        if self.is_complete or self.is_answered or self.body_bytes != self._body_mark:
            self._body_mark, self._stalled_ticks = self.body_bytes, 0
            return False
        self._stalled_ticks += 1
        return self._stalled_ticks >= ticks_max

    def next_piece(self, room: int) -> bytes:
        """Remove and return at most `room` bytes from the front of the outbox."""
        first = self.outbox.popleft()
        if len(first) > room:
            self.outbox.appendleft(first[room:])
            first = first[:room]
        self.outbox_bytes -= len(first)
        return bytes(first)

    async def emptied(self) -> None:
        """Wait until the outbox is empty."""
        if self.outbox:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def wake(self) -> None:
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        self._emptied = None
        if self.live is not None:
            self.live.emptied()

    def forget(self) -> None:
        """Release the request, to break its reference cycle with the response."""
        self._task = None
        self._headers = {}

    def abandon(self) -> None:
        """Drop the response: the client has left."""
        self.outbox.clear()
        self.outbox_bytes = 0
        if self._task is not None:
            self._task.abandon()
        self.forget()
        if self.sender is not None:
            self.sender.cancel()
        if self.live is not None:
            self.live.dropped()


_HEAD_BYTES: Final = 9
_DATA: Final = 0
_HEADERS: Final = 1
_CONTINUATION: Final = 9
_END_STREAM: Final = 1
_END_HEADERS: Final = 4
_HEADERS_WORK: Final = 4
"""A HEADERS frame costs as much as this many other frames, plus one per `_HEAD_BYTES_PER_WORK` bytes."""
_HEAD_BYTES_PER_WORK: Final = 16
_CONTINUATIONS_MAX: Final = 32


class FrameLengths:
    """Checks the lengths of one connection's frames; its first `skip` bytes are not frames.

    The state machine checks a frame's length only once the frame is complete, and a length may announce
    16 MiB. It also decodes the headers of a request before it counts them. Without this check, a client could
    make the server buffer and decode as much as it announces.
    """

    __slots__ = ("_head_length", "_head_length_max", "_length_max", "_part", "_skip")

    def __init__(self, *, length_max: int, head_length_max: int, skip: int) -> None:
        self._length_max = length_max
        self._head_length_max = head_length_max
        self._head_length = 0
        self._skip = skip
        self._part = b""

    def allow(self, data: bytes) -> bool:
        """Return whether every frame that begins in the next bytes of the connection is short enough."""
        if self._part:
            data = self._part + data
        at, size = self._skip, len(data)
        while at + _HEAD_BYTES <= size:
            length, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
            if kind == _CONTINUATION:
                self._head_length += length
            elif kind == _HEADERS:
                self._head_length = length
            if length > self._length_max or self._head_length > self._head_length_max:
                return False
            at += _HEAD_BYTES + length
        self._skip = max(at - size, 0)
        self._part = data[at:]
        return True


class Turn(NamedTuple):
    """The frames handled in one turn of the event loop."""

    size: int
    """Their size in bytes; 0 if no frame is complete."""
    idle: int
    """How many of them carry no request: settings, pings, window updates, priorities, resets."""
    is_flood: bool
    """Whether one head spans more frames than any client needs."""


def next_turn(data: bytes, work_max: int) -> Turn:
    """Return the complete frames at the start of `data`, up to `work_max` units of work.

    The last frame may exceed the limit. The frames of one head stay together, so that an incomplete head
    waits here, where it counts in the budget.
    """
    at = size = idle = work = parts = 0
    while at + _HEAD_BYTES <= len(data) and (work < work_max or size != at):
        length, kind, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 3], data[at + 4]
        at += _HEAD_BYTES + length
        is_head = kind in (_HEADERS, _CONTINUATION)
        parts = parts + 1 if kind == _CONTINUATION else 0
        if at > len(data) or parts > _CONTINUATIONS_MAX:
            break
        work += _HEADERS_WORK if kind == _HEADERS else 1
        work += length // _HEAD_BYTES_PER_WORK if is_head else 0
        is_idle = not is_head and (kind != _DATA or (length == 0 and not flags & _END_STREAM))
        idle += is_idle
        if not is_head or flags & _END_HEADERS:
            size = at
    return Turn(size, idle, parts > _CONTINUATIONS_MAX)
