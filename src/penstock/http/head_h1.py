"""The head of an HTTP/1.1 response as bytes."""

from __future__ import annotations

from functools import lru_cache

from penstock.http.message import Response, reason

__all__ = ["response_head"]


@lru_cache(maxsize=256)
def _start(status: int, content_type: bytes) -> bytes:
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ndate: " % (status, reason(status), content_type)


def response_head(
    response: Response, size: int | None, date: bytes, *, keep_alive: bool, is_chunked: bool = False
) -> bytes:
    """Everything before the body; `size` None is a body whose length nobody knows."""
    if size is not None:
        ends = b"\r\ncontent-length: %d\r\n" % size
    else:
        ends = b"\r\ntransfer-encoding: chunked\r\n" if is_chunked else b"\r\n"
    if response.headers:
        ends += b"".join([b"%b: %b\r\n" % header for header in response.headers])
    if not keep_alive:
        ends += b"connection: close\r\n"
    return b"%b%b%b\r\n" % (_start(response.status, response.content_type), date, ends)
