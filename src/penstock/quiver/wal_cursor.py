"""The sidecar that says up to which position the log is needed no more: 24 bytes, replaced in one step.

magic `QUIVER\\0T` | version u16 | size u16 | wal_position u64 | xxh3 u32 over what is before it
"""

from __future__ import annotations

import os
import struct

from xxhash import xxh3_64_intdigest

from penstock.errors import MediaError, NotFound
from penstock.quiver.wal_layout import CURSOR
from penstock.storage import FileSystem, write_durably

__all__ = ["decode_cursor", "encode_cursor", "read_cursor", "write_cursor"]

_MAGIC = b"QUIVER\0T"
_VERSION = 1
_FIXED = struct.Struct("<8sHHQ")
_SUM = struct.Struct("<I")
_BYTES = _FIXED.size + _SUM.size


def encode_cursor(position: int) -> bytes:
    fixed = _FIXED.pack(_MAGIC, _VERSION, _BYTES, position)
    return fixed + _SUM.pack(xxh3_64_intdigest(fixed) & 0xFFFFFFFF)


def decode_cursor(data: bytes) -> int | None:
    """The position, None if the bytes are no sound cursor."""
    if len(data) != _BYTES:
        return None
    magic, version, size, position = _FIXED.unpack_from(data)
    known = magic == _MAGIC and version == _VERSION and size == _BYTES
    return int(position) if known and encode_cursor(position) == data else None


def read_cursor(fs: FileSystem, directory: str) -> int | None:
    """The position in the sidecar, None if there is none or it is damaged: then all of the log is read."""
    try:
        return decode_cursor(fs.read(os.path.join(directory, CURSOR)))
    except (MediaError, NotFound):
        return None


def write_cursor(fs: FileSystem, directory: str, position: int) -> None:
    """Replace the sidecar, durably."""
    write_durably(fs, os.path.join(directory, CURSOR), [encode_cursor(position)], staging=directory)
