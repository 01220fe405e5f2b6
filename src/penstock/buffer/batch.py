"""The data batch: a block of records, perhaps compressed, and a seven-byte footer.

block | u8 compression | u32 record_count | u16 version (=1)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa

from penstock.buffer.errors import InvalidInputError, SerializationError
from penstock.codec import Block, RecordChunk, compress, decompress, index_block, length_table
from penstock.errors import Corrupt, LimitExceeded
from penstock.ids import is_ulid, ulid_ms
from penstock.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX

BATCH_VERSION = 1
_FOOTER = struct.Struct("<BIH")
FOOTER_BYTES = _FOOTER.size
_SUFFIX = ".batch"

PIECE_BYTES = 4 << 20
"""The bytes encoded at a time: small enough for the processor's cache, large enough to amortise the call."""


def batch_minted_ms(key: str) -> int | None:
    """Return the mint time of a `{ULID}.batch`, or None for any other name."""
    name = key.rpartition("/")[2]
    stem = name.removesuffix(_SUFFIX)
    return ulid_ms(stem) if stem != name and is_ulid(stem) else None


def is_own(key: str, prefix: str) -> bool:
    """Return whether `key` is directly in the folder `prefix`. Deeper keys may belong to another queue."""
    return key.rpartition("/")[0] == prefix


class CompressionType(enum.IntEnum):
    """The compression of the block of a batch."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The content of a batch object: buffers that are stored one after the other."""

    parts: Sequence[memoryview]
    record_count: int
    size: int

    def to_bytes(self) -> bytes:
        return b"".join(self.parts)


class _Parts(Sequence[memoryview]):
    """An uncompressed batch that is encoded in pieces, on demand.

    Each piece passes from the encoder to the store while it is in the processor's cache. Memory never holds
    a second copy of the batch. A second iteration encodes the same bytes again.
    """

    def __init__(self, chunks: Sequence[RecordChunk], tail: bytes) -> None:
        self._pieces = [piece for chunk in chunks for piece in chunk.pieces(PIECE_BYTES)]
        self._tail = memoryview(tail)

    def __len__(self) -> int:
        return len(self._pieces) + 1

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._tail if number == len(self._pieces) else self._pieces[number].encode()


def encode_batch(
    chunks: Sequence[RecordChunk | pa.BinaryArray], compression: CompressionType
) -> EncodedBatch:
    """Encode the records of all chunks, in order, as one batch object.

    Without compression the encoding is lazy: each part is encoded when it is read.
    """
    held = [chunk if isinstance(chunk, RecordChunk) else RecordChunk.of_array(chunk) for chunk in chunks]
    count = sum(map(len, held))
    if count > BATCH_RECORDS_MAX:
        raise InvalidInputError(f"a batch of {count} records is beyond the format's {BATCH_RECORDS_MAX}")
    table = length_table(np.concatenate([chunk.lengths for chunk in held])) if held else b""
    footer = _FOOTER.pack(compression, count, BATCH_VERSION)
    size = sum(chunk.record_bytes for chunk in held) + 4 * count + len(table)
    if compression is CompressionType.ZSTD:
        body = memoryview(compress(_Parts(held, table), size=size))
        parts: Sequence[memoryview] = (body, memoryview(footer))
        return EncodedBatch(parts=parts, record_count=count, size=body.nbytes + len(footer))
    parts = _Parts(held, table + footer)
    return EncodedBatch(parts=parts, record_count=count, size=size + len(footer))


def record_count(footer: memoryview) -> int:
    """Return the number of records of a batch from its last `FOOTER_BYTES` bytes.

    Raise `SerializationError` if they are not a footer.
    """
    if len(footer) != FOOTER_BYTES:
        raise SerializationError(
            f"batch of {len(footer)} bytes is shorter than its {FOOTER_BYTES}-byte footer"
        )
    _, count, version = _FOOTER.unpack(footer)
    if version != BATCH_VERSION:
        raise SerializationError(f"batch version {version} is unknown; only version {BATCH_VERSION} exists")
    return int(count)


def decode_batch(data: memoryview, *, bytes_max: int = BATCH_BYTES_MAX) -> Block:
    """Find and check the records of a batch object, without converting them.

    Raise `SerializationError` if the object is truncated, damaged, of an unknown kind, or above `bytes_max`.
    """
    if len(data) < FOOTER_BYTES:
        raise SerializationError(f"batch of {len(data)} bytes is shorter than its {FOOTER_BYTES}-byte footer")
    compression, count, version = _FOOTER.unpack_from(data, len(data) - FOOTER_BYTES)
    if version != BATCH_VERSION:
        raise SerializationError(f"batch version {version} is unknown; only version {BATCH_VERSION} exists")
    body = data[: len(data) - FOOTER_BYTES]
    try:
        return index_block(_block(body, compression, bytes_max), count)
    except (Corrupt, LimitExceeded) as error:
        raise SerializationError(f"batch of {len(data)} bytes does not decode: {error}") from error


def _block(body: memoryview, compression: int, bytes_max: int) -> pa.Buffer:
    if compression == CompressionType.ZSTD:
        return decompress(body, bytes_max=bytes_max)
    if compression != CompressionType.NONE:
        raise Corrupt(f"compression type {compression} is unknown")
    if len(body) > bytes_max:
        raise LimitExceeded(f"block of {len(body)} bytes is above the cap of {bytes_max}")
    return pa.py_buffer(body)
