"""The data batch: a block of records, perhaps compressed, and a seven-byte footer.

block | u8 compression | u32 record_count | u16 version (=1)
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.buffer.errors import InvalidInputError, SerializationError
from penstock.codec import Block, compress, decompress, encode_records, index_block, length_table
from penstock.errors import Corrupt, LimitExceeded
from penstock.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX

__all__ = ["CompressionType", "EncodedBatch", "decode_batch", "encode_batch"]

VERSION = 1
_FOOTER = struct.Struct("<BIH")
FOOTER_BYTES = _FOOTER.size


class CompressionType(enum.IntEnum):
    """How the block of a batch is stored."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """A batch object, as buffers that are stored one after the other."""

    parts: tuple[memoryview, ...]
    record_count: int

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to_bytes(self) -> bytes:
        return b"".join(self.parts)


def encode_batch(chunks: Sequence[pa.BinaryArray], compression: CompressionType) -> EncodedBatch:
    """All records of all chunks, in order, as one batch object.

    Uncompressed, the encoded chunks go to the store as they are: nothing is joined.
    """
    count = sum(len(chunk) for chunk in chunks)
    if count > BATCH_RECORDS_MAX:
        raise InvalidInputError(f"a batch of {count} records is beyond the format's {BATCH_RECORDS_MAX}")
    encoded = [encode_records(chunk) for chunk in chunks]
    parts = [part for part, _ in encoded]
    if encoded:
        table = length_table(np.concatenate([lengths for _, lengths in encoded]))
        if table:
            parts.append(memoryview(table))
    if compression is CompressionType.ZSTD:
        parts = [memoryview(compress(parts or [memoryview(b"")]))]
    parts.append(memoryview(_FOOTER.pack(compression, count, VERSION)))
    return EncodedBatch(parts=tuple(parts), record_count=count)


def decode_batch(data: memoryview, *, bytes_max: int = BATCH_BYTES_MAX) -> Block:
    """The records of a batch object, found and checked but not yet converted.

    Raises `SerializationError` for anything truncated, damaged, unknown or larger than `bytes_max`.
    """
    if len(data) < FOOTER_BYTES:
        raise SerializationError(f"batch of {len(data)} bytes is shorter than its {FOOTER_BYTES}-byte footer")
    compression, count, version = _FOOTER.unpack_from(data, len(data) - FOOTER_BYTES)
    if version != VERSION:
        raise SerializationError(f"batch version {version} is unknown; only version {VERSION} exists")
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
