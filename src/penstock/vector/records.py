"""Records of a queue that feeds a collection: protobuf messages, and three bytes of metadata.

    WriteRequest  { repeated Vector vectors = 1; }
    DeleteRequest { repeated string ids = 1; }
    Vector        { string id = 1; map<string, Value> attributes = 3; }
    Value         { oneof { string = 1; int64 = 2; double = 3; bool = 4; FloatVector = 5; } }
    FloatVector   { repeated float values = 1; }

Metadata: version 1, operation (1 upsert, 2 delete), encoding 1. Records are untrusted. Every error in one is
`InvalidInput`, and the memory for decoding is proportional to the record's size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

import numpy as np

from penstock.errors import InvalidInput
from penstock.protowire import FIXED32, FIXED64, LENGTH_DELIMITED, VARINT, fields, varint
from penstock.vector.delta import TOMBSTONE, Entry
from penstock.vector.model import VECTOR_FIELD, Floats, Scalar, Vector, check_id

__all__ = [
    "DELETE_METADATA",
    "UPSERT_METADATA",
    "Operation",
    "decode_record",
    "encode_deletes",
    "encode_upserts",
]


class Operation(IntEnum):
    """The operation of a record."""

    UPSERT = 1
    DELETE = 2


_VERSION: Final = 1
_PROTOBUF: Final = 1
UPSERT_METADATA: Final = bytes((_VERSION, Operation.UPSERT, _PROTOBUF))
DELETE_METADATA: Final = bytes((_VERSION, Operation.DELETE, _PROTOBUF))

_DOUBLE: Final = struct.Struct("<d")
_FLOAT: Final = np.dtype("<f4")
_MASK: Final = 2**64 - 1


def decode_record(record: bytes, metadata: bytes) -> list[tuple[str, Entry]]:
    """Decode the entries of a write. Raises `InvalidInput` if the record or its metadata is invalid."""
    if metadata == UPSERT_METADATA:
        vectors = [_vector(_payload(value, kind)) for _, kind, value in _fields(record, only=1)]
        return [(vector.id, vector) for vector in vectors]
    if metadata == DELETE_METADATA:
        ids = [_text(value, kind) for _, kind, value in _fields(record, only=1)]
        for external_id in ids:
            check_id(external_id)
        return [(external_id, TOMBSTONE) for external_id in ids]
    raise InvalidInput(f"metadata {metadata[:16].hex() or 'without a byte'} is unknown")


def encode_upserts(vectors: Iterable[Vector]) -> bytes:
    """Encode a record for `UPSERT_METADATA`."""
    return b"".join(_field(1, _encoded(vector)) for vector in vectors)


def encode_deletes(ids: Iterable[str]) -> bytes:
    """Encode a record for `DELETE_METADATA`."""
    return b"".join(_field(1, external_id.encode()) for external_id in ids)


# Reading


def _vector(data: bytes) -> Vector:
    external_id, embedding = "", None
    attributes: dict[str, Scalar] = {}
    for number, kind, value in _fields(data):
        if number == 1:
            external_id = _text(value, kind)
        elif number == 3:
            name, held = _attribute(_payload(value, kind))
            if isinstance(held, np.ndarray):
                if name != VECTOR_FIELD:
                    raise InvalidInput(
                        f"attribute {name[:80]!r} is a list of floats; only {VECTOR_FIELD!r} may be one"
                    )
                embedding = held
            else:
                attributes[name] = held
    if embedding is None:
        raise InvalidInput(f"vector {external_id[:80]!r} has no attribute {VECTOR_FIELD!r}")
    return Vector(external_id, embedding, attributes)


def _attribute(data: bytes) -> tuple[str, Scalar | Floats]:
    name, held = "", b""
    for number, kind, value in _fields(data):
        if number == 1:
            name = _text(value, kind)
        elif number == 2:
            held += _payload(value, kind)  # protobuf merges a message that occurs twice
    return name, _value(name, held)


def _value(name: str, data: bytes) -> Scalar | Floats:
    held: Scalar | Floats | None = None
    for number, kind, value in _fields(data):
        if number == 1:
            held = _text(value, kind)
        elif number == 2:
            held = _signed(_integer(value, kind))
        elif number == 3 and kind == FIXED64:
            held = float(_DOUBLE.unpack(_raw(value))[0])
        elif number == 4:
            held = bool(_integer(value, kind))
        elif number == 5:
            held = _floats(_payload(value, kind))
    if held is None:
        raise InvalidInput(f"attribute {name[:80]!r} has no value")
    return held


def _floats(data: bytes) -> Floats:
    parts = []
    for _, kind, value in _fields(data, only=1):
        if kind not in (LENGTH_DELIMITED, FIXED32) or len(_raw(value)) % _FLOAT.itemsize:
            raise InvalidInput("a list of floats is truncated")
        parts.append(_raw(value))
    return np.frombuffer(b"".join(parts), _FLOAT)


def _fields(data: bytes, *, only: int | None = None) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield the number, wire type and value of each field, or of those with the number `only`."""
    for number, kind, value, end in fields(data):
        if only is None or number == only:
            yield number, kind, value & _MASK if kind == VARINT else data[value:end]


def _payload(value: int | bytes, kind: int) -> bytes:
    if kind != LENGTH_DELIMITED or isinstance(value, int):
        raise InvalidInput(f"a protobuf message with wire type {kind} where another message is expected")
    return value


def _raw(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


def _integer(value: int | bytes, kind: int) -> int:
    if kind != VARINT or isinstance(value, bytes):
        raise InvalidInput(f"a protobuf message with wire type {kind} where a number is expected")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _text(value: int | bytes, kind: int) -> str:
    try:
        return _payload(value, kind).decode()
    except UnicodeDecodeError:
        raise InvalidInput("a protobuf message has a text that is not UTF-8") from None


# Writing


def _encoded(vector: Vector) -> bytes:
    parts = [_field(1, vector.id.encode())]
    embedding = _field(5, _field(1, vector.vector.astype(_FLOAT).tobytes()))
    for name, value in ((VECTOR_FIELD, embedding), *((n, _scalar(v)) for n, v in vector.attributes.items())):
        parts.append(_field(3, _field(1, name.encode()) + _field(2, value)))
    return b"".join(parts)


def _scalar(value: Scalar) -> bytes:
    if isinstance(value, bool):
        return varint(4 << 3 | VARINT) + varint(value)
    if isinstance(value, int):
        return varint(2 << 3 | VARINT) + varint(value & _MASK)
    if isinstance(value, float):
        return varint(3 << 3 | FIXED64) + _DOUBLE.pack(value)
    return _field(1, value.encode())


def _field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(payload)) + payload
