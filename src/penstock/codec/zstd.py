"""Zstandard with a context per thread, and an output limit that also holds for malicious frames."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pyarrow as pa
import zstandard

from penstock.errors import Corrupt, LimitExceeded
from penstock.units import format_size

LEVEL = 3
_PIECE_BYTES = 2048
"""Input per step of the bounded stream. A frame grows at most 128 KiB per 4 bytes, so excess output is
detected at most 64 MiB past the limit."""

_contexts = threading.local()


def compress(parts: Iterable[memoryview], *, size: int) -> bytes:
    """Compress all parts, `size` bytes in total, into one frame that includes its size and a checksum."""
    # A context shared by two threads crashes the process, so each thread keeps its own.
    context = getattr(_contexts, "compressor", None)
    if context is None:
        context = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
        _contexts.compressor = context
    stream = context.compressobj(size=size)
    out = [stream.compress(part) for part in parts]
    out.append(stream.flush())
    return b"".join(out)


def decompress(data: memoryview, *, bytes_max: int) -> pa.Buffer:
    """Decompress one or more concatenated frames.

    Raise `LimitExceeded` for more than `bytes_max` bytes of output. Raise `Corrupt` if a frame is damaged or
    truncated, or if other data follows the frames.
    """
    declared = _declared_size(data)
    if declared is not None and declared > bytes_max:
        raise LimitExceeded(_over(declared, bytes_max))
    if declared:
        try:
            return pa.Codec("zstd").decompress(data, decompressed_size=declared)
        except (OSError, ValueError):
            pass  # several frames, or damage: the bounded stream below decides
    return _decompress_stream(data, bytes_max)


def _declared_size(data: memoryview) -> int | None:
    try:
        size = zstandard.get_frame_parameters(data[:18]).content_size
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd frame header is damaged: {error}") from error
    return None if size == zstandard.CONTENTSIZE_UNKNOWN else int(size)


def _decompress_stream(data: memoryview, bytes_max: int) -> pa.Buffer:
    chunks: list[bytes] = []
    total = 0
    try:
        position = 0
        while position < len(data):
            # One object per frame: unlike a reader, it distinguishes a truncated frame from a complete one.
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof and position < len(data):
                piece = frame.decompress(data[position : position + _PIECE_BYTES])
                position += min(_PIECE_BYTES, len(data) - position)
                total += len(piece)
                if total > bytes_max:
                    raise LimitExceeded(_over(total, bytes_max))
                chunks.append(piece)
            if not frame.eof:
                raise Corrupt("zstd frame is truncated")
            position -= len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd data is damaged: {error}") from error
    return pa.py_buffer(b"".join(chunks))


def _over(size: int, bytes_max: int) -> str:
    return f"decompressed size {format_size(size)} or more is above the cap of {format_size(bytes_max)}"
