"""Bytes in and out of memory: length-prefixed blocks and Zstandard with caps."""

from __future__ import annotations

from penstock.codec.block import (
    Block,
    as_binary_array,
    encode_records,
    index_block,
    length_table,
    record_bytes,
)
from penstock.codec.zstd import compress, decompress

__all__ = [
    "Block",
    "as_binary_array",
    "compress",
    "decompress",
    "encode_records",
    "index_block",
    "length_table",
    "record_bytes",
]
