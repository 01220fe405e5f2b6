"""Encoding of keys: `02 | segment u8 | 01 | type << 4 | suffix`, big-endian.

The subsystem is the first byte, the version the third. These types of the layout are unused: 3 (per-vector
index data), 9 and A (a tree of centroids), D to F (text search).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from penstock.coordinator import Subsystem, read_terminated, terminated
from penstock.errors import Corrupt

_ID: Final = struct.Struct(">Q")
_VERSION: Final = 1
_PREFIX_BYTES: Final = 4
CENTROID_LEVEL: Final = 1 << 56
"""First id of a centroid. The top byte of an id is its level: 0 for data, 1 for centroids of posting
lists."""
BLOCK_SIZE: Final = 4096
"""Number of ids allocated together, so that a restart needs to read only one number."""


class RecordType(IntEnum):
    """The type of a key."""

    POSITION = 0x0
    COLLECTION = 0x1
    CENTROID_BLOCK = 0x2
    POSTING = 0x4
    DICTIONARY = 0x5
    DATA = 0x6
    METADATA = 0x7
    BLOCK = 0x8
    CENTROID = 0xB
    DELETIONS = 0xC


_ANN_SEGMENT: Final = frozenset({RecordType.CENTROID_BLOCK, RecordType.POSTING, RecordType.CENTROID})


def record_prefix(kind: RecordType) -> bytes:
    """Return the prefix of all keys of a type, or the whole key if there is only one."""
    segment = 1 if kind in _ANN_SEGMENT else 0
    return bytes((Subsystem.VECTOR, segment, _VERSION, kind << 4))


_PREFIXES: Final = {kind: record_prefix(kind) for kind in RecordType}
_TYPES: Final = {prefix: kind for kind, prefix in _PREFIXES.items()}


def record_type(key: bytes) -> RecordType:
    """Return the type of a key. Raises `Corrupt` if it is unknown."""
    kind = _TYPES.get(key[:_PREFIX_BYTES])
    if kind is None:
        raise Corrupt(f"{key[:32].hex()} is not a key of a vector collection")
    return kind


def posting_key(centroid_id: int) -> bytes:
    return _PREFIXES[RecordType.POSTING] + _ID.pack(centroid_id)


def centroid_key(centroid_id: int) -> bytes:
    return _PREFIXES[RecordType.CENTROID] + _ID.pack(centroid_id)


def data_key(internal_id: int) -> bytes:
    return _PREFIXES[RecordType.DATA] + _ID.pack(internal_id)


def dictionary_key(external_id: str) -> bytes:
    return _PREFIXES[RecordType.DICTIONARY] + terminated(external_id.encode())


def metadata_key(field: str, value: bytes) -> bytes:
    """Return the key of an indexed value. `value` is a tag and a sortable value, see `codec.index_value`."""
    return _PREFIXES[RecordType.METADATA] + terminated(field.encode()) + value


def read_id_key(key: bytes) -> int:
    """Return the id at the end of a key of a list, a centroid or a vector. Raises `Corrupt`."""
    if len(key) != _PREFIX_BYTES + _ID.size:
        raise Corrupt(f"{key[:32].hex()} does not end in an id")
    return int(_ID.unpack_from(key, _PREFIX_BYTES)[0])


def read_dictionary_key(key: bytes) -> str:
    """Return the external id. Raises `Corrupt`."""
    text, end = read_terminated(key, _PREFIX_BYTES)
    return _text(key, text, end == len(key))


def read_metadata_key(key: bytes) -> tuple[str, bytes]:
    """Return the field, the tag and the sortable value. Raises `Corrupt`."""
    text, end = read_terminated(key, _PREFIX_BYTES)
    return _text(key, text, end < len(key)), key[end:]


def _text(key: bytes, text: bytes, well_formed: bool) -> str:
    try:
        if well_formed:
            return text.decode()
    except UnicodeDecodeError:
        pass
    raise Corrupt(f"{key[:32].hex()} is not a well-formed key")
