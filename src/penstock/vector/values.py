"""Small values in storage: the collection, id blocks, ids, centroids, sets of ids, the position of a source.

collection   u32 schema version, u16 dimensions, u8 metric, Array of (Utf8 name, u8 type, u8 indexed)
id block     base u64, size u64, big-endian: ids go on at base + size
id           u64
centroid     float32 x dimensions
metadata     u32 length, ids of the vectors that have the value; then ids that no longer have it
deletions    ids of vectors that are gone but still stand in a posting list
position     u64, the sequence of the last batch that was fed in, and the name of its queue

Sets are 64-bit roaring bitmaps in the portable format. All else is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from pyroaring import BitMap64

from penstock.coordinator.values import array, read_array, read_utf8, utf8
from penstock.errors import ConfigError, Corrupt
from penstock.vector.model import Collection, Field, FieldType, Floats, Metric

__all__ = [
    "SCHEMA_VERSION",
    "decode_block",
    "decode_centroid",
    "decode_collection",
    "decode_id",
    "decode_ids",
    "decode_metadata",
    "encode_block",
    "encode_centroid",
    "encode_collection",
    "encode_id",
    "encode_ids",
    "encode_metadata",
    "merge_ids",
    "merge_metadata",
]

SCHEMA_VERSION: Final = 1
_HEAD: Final = struct.Struct("<IHB")
_BLOCK: Final = struct.Struct(">QQ")
_ID: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
_TYPES: Final = tuple(FieldType)


def encode_collection(collection: Collection) -> bytes:
    fields = (utf8(one.name) + bytes((_TYPES.index(one.type), one.indexed)) for one in collection.fields)
    return _HEAD.pack(SCHEMA_VERSION, collection.dimensions, collection.metric) + array(fields)


def decode_collection(value: bytes) -> Collection:
    """Raises `Corrupt` if the bytes break the format, or belong to a schema version that is not known."""
    try:
        version, dimensions, metric = _HEAD.unpack_from(value)
        if version != SCHEMA_VERSION:
            raise Corrupt(f"the collection has schema version {version}; this release knows {SCHEMA_VERSION}")
        fields, at = read_array(value, _HEAD.size, _read_field)
        if at != len(value):
            raise ValueError("it has bytes behind its end")
        return Collection(dimensions=dimensions, metric=Metric(metric), fields=tuple(fields))
    except (ConfigError, IndexError, ValueError, struct.error) as error:
        raise Corrupt(f"the collection's record breaks its format: {error}") from None


def _read_field(value: bytes, at: int) -> tuple[Field, int]:
    name, at = read_utf8(value, at)
    return Field(name=name, type=_TYPES[value[at]], indexed=bool(value[at + 1])), at + 2


def encode_block(base: int, size: int) -> bytes:
    return _BLOCK.pack(base, size)


def decode_block(value: bytes) -> tuple[int, int]:
    """Base and size. Raises `Corrupt`."""
    if len(value) != _BLOCK.size:
        raise Corrupt(f"an id block has {_BLOCK.size} bytes, not {len(value)}")
    base, size = _BLOCK.unpack(value)
    return base, size


def encode_id(internal_id: int) -> bytes:
    return _ID.pack(internal_id)


def decode_id(value: bytes) -> int:
    """Raises `Corrupt`."""
    if len(value) != _ID.size:
        raise Corrupt(f"an id has {_ID.size} bytes, not {len(value)}")
    return int(_ID.unpack(value)[0])


def encode_centroid(centroid: Floats) -> bytes:
    return centroid.astype("<f4").tobytes()


def decode_centroid(value: bytes, dimensions: int) -> Floats:
    """Raises `Corrupt`."""
    if len(value) != 4 * dimensions:
        raise Corrupt(f"a centroid of {dimensions} dimensions has {4 * dimensions} bytes, not {len(value)}")
    return np.frombuffer(value, "<f4").astype(np.float32)


def encode_ids(ids: Iterable[int]) -> bytes:
    return BitMap64(ids).serialize()


def decode_ids(value: bytes) -> BitMap64:
    """Raises `Corrupt`."""
    try:
        return BitMap64.deserialize(value)
    except (IndexError, ValueError) as error:
        raise Corrupt(f"a set of ids is no bitmap: {error}") from None


def encode_metadata(included: Iterable[int], excluded: Iterable[int] = ()) -> bytes:
    first = encode_ids(included)
    return _LENGTH.pack(len(first)) + first + encode_ids(excluded)


def decode_metadata(value: bytes) -> tuple[BitMap64, BitMap64]:
    """Included and excluded ids; those that have the value are the difference. Raises `Corrupt`."""
    if len(value) < _LENGTH.size:
        raise Corrupt("a record of the metadata index is cut")
    end = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    if end > len(value):
        raise Corrupt("a set of ids in the metadata index is cut")
    return decode_ids(value[_LENGTH.size : end]), decode_ids(value[end:])


def merge_ids(operands: Sequence[bytes]) -> bytes:
    """The union, whatever the order."""
    merged = decode_ids(operands[0])
    for operand in operands[1:]:
        merged |= decode_ids(operand)
    return merged.serialize()


def merge_metadata(operands: Sequence[bytes]) -> bytes:
    """The unions of both sides: an id is used once, so it never comes back after it was excluded."""
    pairs = [decode_metadata(operand) for operand in operands]
    included, excluded = pairs[0]
    for more, less in pairs[1:]:
        included |= more
        excluded |= less
    return encode_metadata(included, excluded)
