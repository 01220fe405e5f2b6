"""Encoding of values in storage, and merging of the values of one key.

Small values: the collection, id blocks, ids, centroids, sets of ids, the position of a source.

collection   u32 schema version, u16 dimensions, u8 metric, Array of (Utf8 name, u8 type, u8 indexed)
id block     base u64, size u64, big-endian: the next id is base + size
id           u64
centroid     float32 x dimensions
metadata     u32 length, ids of the vectors with the value; then ids that no longer have it
deletions    ids of deleted vectors that are still in a posting list
position     u64, the sequence of the last batch taken from a queue, and the queue's name

Sets are 64-bit roaring bitmaps in the portable format. Everything else is little-endian.

Attributes: the record of a vector, and values encoded so that their bytes sort in the order of the values.

Record: Utf8 external id, u16 count, count x (Utf8 name, tag u8, value), sorted by name; little-endian.
Tags: 0 string (Utf8), 1 int64, 2 float64, 3 bool (u8), 255 the vector (float32 x dimensions).

Posting lists: the vectors of one centroid, in comparable form.

u32 count, count x (id u64 big-endian, u32), then float32 data; little-endian except for the ids, and sorted
by id. The u32 is the vector's row number in the data, or FFFFFFFF for an id that was removed from the list. A
merge keeps the newer entry of each id.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from penstock.coordinator import array, read_array, read_utf8, utf8
from penstock.errors import ConfigError, Corrupt
from penstock.vector.keys import RecordType, record_type
from penstock.vector.model import VECTOR_FIELD, Collection, Field, FieldType, Floats, Metric, Scalar, Vector

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
    """Decode a collection.

    Raises `Corrupt` if the bytes break the format or have an unknown schema version.
    """
    try:
        version, dimensions, metric = _HEAD.unpack_from(value)
        if version != SCHEMA_VERSION:
            raise Corrupt(
                f"the collection has schema version {version}; this release supports {SCHEMA_VERSION}"
            )
        fields, at = read_array(value, _HEAD.size, _read_field)
        if at != len(value):
            raise ValueError("it has bytes after its end")
        return Collection(dimensions=dimensions, metric=Metric(metric), fields=tuple(fields))
    except (ConfigError, IndexError, ValueError, struct.error) as error:
        raise Corrupt(f"the collection's record breaks its format: {error}") from None


def _read_field(value: bytes, at: int) -> tuple[Field, int]:
    name, at = read_utf8(value, at)
    return Field(name=name, type=_TYPES[value[at]], indexed=bool(value[at + 1])), at + 2


def encode_block(base: int, size: int) -> bytes:
    return _BLOCK.pack(base, size)


def decode_block(value: bytes) -> tuple[int, int]:
    """Return the base and size of an id block. Raises `Corrupt`."""
    if len(value) != _BLOCK.size:
        raise Corrupt(f"an id block has {_BLOCK.size} bytes, not {len(value)}")
    base, size = _BLOCK.unpack(value)
    return base, size


def encode_id(internal_id: int) -> bytes:
    return _ID.pack(internal_id)


def decode_id(value: bytes) -> int:
    """Decode an id. Raises `Corrupt`."""
    if len(value) != _ID.size:
        raise Corrupt(f"an id has {_ID.size} bytes, not {len(value)}")
    return int(_ID.unpack(value)[0])


def encode_centroid(centroid: Floats) -> bytes:
    return centroid.astype("<f4").tobytes()


def decode_centroid(value: bytes, dimensions: int) -> Floats:
    """Decode a centroid. Raises `Corrupt`."""
    if len(value) != 4 * dimensions:
        raise Corrupt(f"a centroid of {dimensions} dimensions has {4 * dimensions} bytes, not {len(value)}")
    return np.frombuffer(value, "<f4").astype(np.float32)


def encode_ids(ids: Iterable[int]) -> bytes:
    return BitMap64(ids).serialize()


def decode_ids(value: bytes) -> BitMap64:
    """Decode a set of ids. Raises `Corrupt`."""
    try:
        return BitMap64.deserialize(value)
    except (IndexError, ValueError) as error:
        raise Corrupt(f"a set of ids is not a bitmap: {error}") from None


def encode_metadata(included: Iterable[int], excluded: Iterable[int] = ()) -> bytes:
    first = encode_ids(included)
    return _LENGTH.pack(len(first)) + first + encode_ids(excluded)


def decode_metadata(value: bytes) -> tuple[BitMap64, BitMap64]:
    """Return the included and excluded ids. Their difference has the value. Raises `Corrupt`."""
    if len(value) < _LENGTH.size:
        raise Corrupt("a record of the metadata index is truncated")
    end = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    if end > len(value):
        raise Corrupt("a set of ids in the metadata index is truncated")
    return decode_ids(value[_LENGTH.size : end]), decode_ids(value[end:])


def merge_ids(operands: Sequence[bytes]) -> bytes:
    """Return the union of sets of ids. The order does not matter."""
    merged = decode_ids(operands[0])
    for operand in operands[1:]:
        merged |= decode_ids(operand)
    return merged.serialize()


def merge_metadata(operands: Sequence[bytes]) -> bytes:
    """Return the unions of both sets. Ids are never reused, so an excluded id stays excluded."""
    pairs = [decode_metadata(operand) for operand in operands]
    included, excluded = pairs[0]
    for more, less in pairs[1:]:
        included |= more
        excluded |= less
    return encode_metadata(included, excluded)


STRING: Final = 0
INT64: Final = 1
FLOAT64: Final = 2
BOOL: Final = 3
VECTOR: Final = 255

_ATTRIBUTE_COUNT: Final = struct.Struct("<H")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_U64_BE: Final = struct.Struct(">Q")
_SIGN: Final = 1 << 63
_MASK: Final = (1 << 64) - 1


def normal(value: Scalar, kind: FieldType | None) -> Scalar:
    """Return the value as a field of this type stores it. A float field stores whole numbers as floats."""
    return float(value) if kind is FieldType.FLOAT64 else value


def encode_vector(vector: Vector) -> bytes:
    """Encode a record, including the embedding. Raises `InvalidInput` for values no collection accepts."""
    entries = [(name.encode(), utf8(name) + _value(value)) for name, value in vector.attributes.items()]
    embedding = utf8(VECTOR_FIELD) + bytes((VECTOR,)) + vector.vector.astype("<f4").tobytes()
    entries.append((VECTOR_FIELD.encode(), embedding))
    entries.sort(key=lambda entry: entry[0])
    return b"".join((utf8(vector.id), _ATTRIBUTE_COUNT.pack(len(entries)), *(entry for _, entry in entries)))


def decode_vector(data: bytes, dimensions: int) -> Vector:
    """Return the vector of a record. Raises `Corrupt`."""
    try:
        external_id, at = read_utf8(data)
        (count,) = _ATTRIBUTE_COUNT.unpack_from(data, at)
        at += _ATTRIBUTE_COUNT.size
        attributes: dict[str, Scalar] = {}
        embedding = None
        for _ in range(count):
            name, at = read_utf8(data, at)
            tag, at = data[at], at + 1
            if tag == VECTOR:
                embedding, at = np.frombuffer(data, "<f4", dimensions, at), at + 4 * dimensions
            else:
                attributes[name], at = _read_value(data, at, tag)
    except (IndexError, ValueError, struct.error) as error:
        raise Corrupt(f"the record of a vector breaks its format: {error}") from None
    if at != len(data) or embedding is None:
        raise Corrupt("the record of a vector has too many bytes, or no embedding")
    return Vector(external_id, embedding, attributes)


def index_value(value: Scalar) -> bytes:
    """Return the tag and value as stored in the metadata index. Their bytes sort in the order of the values.

    The sign bit of integers and of non-negative floats is flipped, and all bits of negative floats. Minus
    zero is stored as zero.
    """
    if isinstance(value, bool):
        return bytes((BOOL, value))
    if isinstance(value, int):
        return bytes((INT64,)) + _U64_BE.pack((value + _SIGN) & _MASK)
    if isinstance(value, float):
        (bits,) = _U64_BE.unpack(struct.pack(">d", value + 0.0))
        return bytes((FLOAT64,)) + _U64_BE.pack(bits ^ (_MASK if bits & _SIGN else _SIGN))
    return bytes((STRING,)) + value.encode()


def _value(value: Scalar) -> bytes:
    if isinstance(value, bool):
        return bytes((BOOL, value))
    if isinstance(value, int):
        return bytes((INT64,)) + _I64.pack(value)
    if isinstance(value, float):
        return bytes((FLOAT64,)) + _F64.pack(value)
    return bytes((STRING,)) + utf8(value)


def _read_value(data: bytes, at: int, tag: int) -> tuple[Scalar, int]:
    if tag == STRING:
        return read_utf8(data, at)
    if tag == BOOL and data[at] in (0, 1):
        return bool(data[at]), at + 1
    if tag in (INT64, FLOAT64):
        return (_I64 if tag == INT64 else _F64).unpack_from(data, at)[0], at + 8
    raise ValueError(f"tag {tag} at offset {at}")


Ids = npt.NDArray[np.uint64]

_ENTRY_COUNT: Final = struct.Struct("<I")
_ENTRY: Final = np.dtype([("id", ">u8"), ("row", "<u4")])
_REMOVED: Final = 0xFFFFFFFF
_FLOAT: Final = np.dtype("<f4")


class Posting(NamedTuple):
    """The content of a posting list, or a change to one."""

    ids: Ids
    rows: Floats
    removed: Ids


def encode_posting(ids: Ids, rows: Floats, removed: Ids | None = None) -> bytes:
    """Encode entries for `ids`, whose vectors are `rows`, and for ids removed from the list."""
    gone = np.empty(0, np.uint64) if removed is None else removed
    entries = np.empty(len(ids) + len(gone), _ENTRY)
    entries["id"] = np.concatenate((ids, gone))
    entries["row"] = _REMOVED
    entries["row"][: len(ids)] = np.arange(len(ids), dtype=np.uint32)
    entries = entries[np.argsort(entries["id"], kind="stable")]
    return b"".join((_ENTRY_COUNT.pack(len(entries)), entries.tobytes(), rows.astype(_FLOAT).tobytes()))


def decode_posting(value: bytes, dimensions: int) -> Posting:
    """Decode a posting list. Raises `Corrupt` if the bytes break the format."""
    entries, data = _split(value)
    if len(data) % (dimensions * _FLOAT.itemsize):
        raise Corrupt(f"the data of a posting list is not in rows of {dimensions}")
    table = np.frombuffer(data, _FLOAT).reshape(-1, dimensions)
    present = entries["row"] != _REMOVED
    rows = entries["row"][present]
    if len(rows) and int(rows.max()) >= len(table):
        raise Corrupt("an entry of a posting list points past its data")
    return Posting(
        ids=entries["id"][present].astype(np.uint64),
        rows=np.ascontiguousarray(table[rows], dtype=np.float32),
        removed=entries["id"][~present].astype(np.uint64),
    )


def merge_postings(operands: Sequence[bytes]) -> bytes:
    """Return the newer entry of each id. The width of a row follows from the data.

    Raises `Corrupt` if an operand breaks the format, or has rows of another width than the others.
    """
    split = [_split(operand) for operand in operands]
    counts = [int((entries["row"] != _REMOVED).sum()) for entries, _ in split]
    width = next((len(data) // count for (_, data), count in zip(split, counts, strict=True) if count), 0)
    for (part, data), count in zip(split, counts, strict=True):
        rows = part["row"][part["row"] != _REMOVED]
        if len(data) != count * width or (count and (not width or int(rows.max()) >= count)):
            raise Corrupt("the entries of a posting list do not fit its data")
    # Without the type, joining would turn big-endian ids into native ones.
    entries = np.concatenate([entries for entries, _ in split], dtype=_ENTRY)
    starts = np.cumsum([0, *counts])[:-1]
    shift = np.repeat(starts, [len(part) for part, _ in split]).astype(np.uint32)
    present = entries["row"] != _REMOVED
    entries["row"][present] += shift[present]
    # The newest comes first among equal ids, and the first is what `unique` keeps.
    newest = entries[::-1]
    newest = newest[np.unique(newest["id"], return_index=True)[1]]
    kept = newest["row"] != _REMOVED
    rows = newest["row"][kept]
    newest["row"][kept] = np.arange(len(rows), dtype=np.uint32)
    table = np.frombuffer(b"".join(data for _, data in split), np.uint8).reshape(-1, width or 1)
    return b"".join((_ENTRY_COUNT.pack(len(newest)), newest.tobytes(), table[rows].tobytes()))


def _split(value: bytes) -> tuple[npt.NDArray[np.void], bytes]:
    """Return the entries, and the data after them. Raises `Corrupt`."""
    if len(value) < _ENTRY_COUNT.size:
        raise Corrupt("a posting list is cut")
    (count,) = _ENTRY_COUNT.unpack_from(value)
    end = _ENTRY_COUNT.size + count * _ENTRY.itemsize
    if end > len(value):
        raise Corrupt(f"a posting list of {count} entries is cut")
    entries = np.frombuffer(value, _ENTRY, count, _ENTRY_COUNT.size).copy()
    ids = entries["id"]
    if count > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise Corrupt("the entries of a posting list are not sorted by id")
    return entries, value[end:]


_MERGES = {
    RecordType.POSTING: merge_postings,
    RecordType.METADATA: merge_metadata,
    RecordType.DELETIONS: merge_ids,
}
_DAMAGED: Final = b"\xff" * 8
"""More entries, a longer set and more parts of a set than any value has: no reader takes it for one."""


def merge_records(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Merge operands; associative for every type that is merged.

    Damaged operands, and those of types that are never merged, are kept as they are after a mark, so that
    reading them raises `Corrupt`.
    """
    try:
        return _MERGES[record_type(key)](operands)
    except (Corrupt, KeyError):
        return _DAMAGED + b"".join(operand.removeprefix(_DAMAGED) for operand in operands)
