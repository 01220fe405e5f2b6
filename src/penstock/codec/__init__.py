"""Codecs: length-prefixed blocks, and Zstandard with a limit of the output."""

from __future__ import annotations

from penstock.codec.block import (
    Block,
    RecordChunk,
    as_binary_array,
    check_records,
    encode_records,
    index_block,
    length_table,
    record_bytes,
    record_lengths,
)
from penstock.codec.zstd import compress, decompress

__all__ = [
    "Block",
    "RecordChunk",
    "as_binary_array",
    "check_records",
    "compress",
    "decompress",
    "encode_records",
    "index_block",
    "length_table",
    "record_bytes",
    "record_lengths",
]
