"""Heads of HTTP/1.1: those of requests that were parsed before, and those of responses.

Clients send the same few heads over and over, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from penstock.http.message import Request, Response, reason

_REMEMBERED_MAX: Final = 1024
_BYTES_MAX: Final = 2048
_END: Final = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """A parsed head, and the length of the body that it announces."""

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]
    body_bytes: int


class KnownHeads:
    """From the bytes of a head to what it says. The memory of it is bounded.

    Between two requests a parser has no memory, so it takes the same bytes for the same head: it need not see
    them again. Only whole requests are looked up, which come in one piece and have nothing after them.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def request(self, data: bytes) -> Request | None:
        """The request that these bytes are, no more and no less; None if they have to be parsed."""
        end = data.find(_END, 0, _BYTES_MAX) + 4
        head = self._heads.get(data[:end])
        if head is None or len(data) - end != head.body_bytes:
            return None
        return Request(head.method, head.target, head.headers, data[end:])

    def learn(self, data: bytes, request: Request, target: bytes) -> None:
        """Remember the head of a request of HTTP/1.1 that came as these bytes, and after which the connection
        stays as it is.
        """
        end = data.find(_END, 0, _BYTES_MAX) + 4
        # Where the head ends is the parser's to say: the body is what it says, or nothing is learned.
        if end < 4 or data[end:] != request.body:
            return
        if len(self._heads) >= _REMEMBERED_MAX:
            self._heads.clear()
        self._heads[data[:end]] = KnownHead(request.method, target, request.headers, len(request.body))


@lru_cache(maxsize=256)
def _start(status: int, content_type: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ndate: " % (status, reason(status), content_type)


def response_head(
    response: Response, size: int | None, date: bytes, *, keep_alive: bool, is_chunked: bool = False
) -> bytes:
    """Encode the head of a response; `size` None is a body of unknown length."""
    if size is not None:
        ends = b"\r\ncontent-length: %d\r\n" % size
    else:
        ends = b"\r\ntransfer-encoding: chunked\r\n" if is_chunked else b"\r\n"
    if response.headers:
        ends += b"".join([b"%b: %b\r\n" % header for header in response.headers])
    if not keep_alive:
        ends += b"connection: close\r\n"
    return b"%b%b%b\r\n" % (_start(response.status, response.content_type), date, ends)
