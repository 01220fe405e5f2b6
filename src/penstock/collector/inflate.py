"""Compressed bodies, read piece by piece under a cap, so that a bomb stops before it has gone off."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final

from penstock.codec import decompress
from penstock.errors import Corrupt, InvalidInput, LimitExceeded, Unsupported

__all__ = ["ENCODINGS", "inflate"]

_PIECE: Final = 256 * 1024
_GZIP_WINDOW: Final = 31
_ZLIB_WINDOW: Final = 15


def inflate(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body behind a `Content-Encoding`, with at most `limit_bytes`.

    Raises `Unsupported` for an encoding that is not known, `LimitExceeded` as soon as there is more than the
    limit, and `InvalidInput` if the data is damaged, ends early, or goes on behind its end.
    """
    unpack = ENCODINGS.get(encoding)
    if unpack is None:
        known = ", ".join(sorted(name for name in ENCODINGS if name))
        raise Unsupported(f"the content encoding {encoding[:40]!r} is not known; use {known}")
    return unpack(data, limit_bytes)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise LimitExceeded(f"the request is larger than {limit_bytes} bytes, counted after decompression")


def _identity(data: bytes, limit_bytes: int) -> bytes:
    _check_size(len(data), limit_bytes)
    return data


def _zlib(window_bits: int) -> Callable[[bytes, int], bytes]:
    def unpack(data: bytes, limit_bytes: int) -> bytes:
        if not data:
            raise InvalidInput("the body cannot be decompressed: it is empty")
        found: list[bytes] = []
        total = 0
        try:
            for piece in _pieces(data, window_bits):
                total += len(piece)
                _check_size(total, limit_bytes)
                found.append(piece)
        except zlib.error as error:
            raise InvalidInput(f"the body cannot be decompressed: {error}") from None
        return found[0] if len(found) == 1 else b"".join(found)

    return unpack


def _pieces(data: bytes, window_bits: int) -> Iterator[bytes]:
    """A gzip body may be several members, one behind the other."""
    while data:
        member = zlib.decompressobj(wbits=window_bits)
        while not member.eof:
            piece = member.decompress(data, _PIECE)
            data = member.unconsumed_tail
            if piece:
                yield piece
            elif not data and not member.eof:
                raise InvalidInput("the body cannot be decompressed: it ends early")
        data = member.unused_data


def _zstd(data: bytes, limit_bytes: int) -> bytes:
    try:
        return bytes(memoryview(decompress(memoryview(data), bytes_max=limit_bytes)))
    except Corrupt as error:
        # Of a client, not of a disk: there is no evidence to keep.
        raise InvalidInput(f"the body cannot be decompressed: {error}") from None


ENCODINGS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "": _identity,
    "identity": _identity,
    "gzip": _zlib(_GZIP_WINDOW),
    "deflate": _zlib(_ZLIB_WINDOW),
    "zstd": _zstd,
}
