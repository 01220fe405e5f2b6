"""Heads of HTTP/1.1: a cache of parsed request heads, and the encoding of response heads.

Clients send the same few heads repeatedly, byte for byte.
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
    """A parsed head, and the body length that it declares."""

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]
    body_bytes: int


class KnownHeads:
    """A bounded cache of parsed heads, keyed by their bytes.

    The parser keeps no state between two requests, so the same bytes always give the same head and need no
    second parse. Only a complete request that arrives in one piece, with nothing after it, is looked up.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def request(self, data: bytes) -> Request | None:
        """Return the request if `data` is exactly one request with a known head, else None."""
        end = data.find(_END, 0, _BYTES_MAX) + 4
        head = self._heads.get(data[:end])
        if head is None or len(data) - end != head.body_bytes:
            return None
        return Request(head.method, head.target, head.headers, data[end:])

    def learn(self, data: bytes, request: Request, target: bytes) -> None:
        """Store the head of an HTTP/1.1 request that arrived as `data` and leaves the connection open."""
        end = data.find(_END, 0, _BYTES_MAX) + 4
        # Only the parser decides where the head ends: if its body differs from the rest, store nothing.
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
    """Encode the head of a response. A `size` of None means a body of unknown length."""
    if size is not None:
        ends = b"\r\ncontent-length: %d\r\n" % size
    else:
        ends = b"\r\ntransfer-encoding: chunked\r\n" if is_chunked else b"\r\n"
    if response.headers:
        ends += b"".join([b"%b: %b\r\n" % header for header in response.headers])
    if not keep_alive:
        ends += b"connection: close\r\n"
    return b"%b%b%b\r\n" % (_start(response.status, response.content_type), date, ends)
