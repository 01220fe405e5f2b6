"""Attributes in storage: a vector's record, and values whose bytes sort as they do.

Record: Utf8 external id, u16 count, count x (Utf8 name, tag u8, value), sorted by name; little-endian.
Tags: 0 string (Utf8), 1 int64, 2 float64, 3 bool (u8), 255 the vector (float32 x dimensions).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from penstock.coordinator.values import read_utf8, utf8
from penstock.errors import Corrupt
from penstock.vector.model import VECTOR_FIELD, FieldType, Scalar, Vector

__all__ = ["decode_vector", "encode_vector", "index_value", "normal"]

STRING: Final = 0
INT64: Final = 1
FLOAT64: Final = 2
BOOL: Final = 3
VECTOR: Final = 255

_COUNT: Final = struct.Struct("<H")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_U64_BE: Final = struct.Struct(">Q")
_SIGN: Final = 1 << 63
_MASK: Final = (1 << 64) - 1


def normal(value: Scalar, kind: FieldType | None) -> Scalar:
    """The value as a field of this kind stores it: a whole number in a float field is a float."""
    return float(value) if kind is FieldType.FLOAT64 else value


def encode_vector(vector: Vector) -> bytes:
    """One record, embedding included. Raises `InvalidInput` for what no collection takes."""
    entries = [(name.encode(), utf8(name) + _value(value)) for name, value in vector.attributes.items()]
    embedding = utf8(VECTOR_FIELD) + bytes((VECTOR,)) + vector.vector.astype("<f4").tobytes()
    entries.append((VECTOR_FIELD.encode(), embedding))
    entries.sort(key=lambda entry: entry[0])
    return b"".join((utf8(vector.id), _COUNT.pack(len(entries)), *(entry for _, entry in entries)))


def decode_vector(data: bytes, dimensions: int) -> Vector:
    """The vector of a record. Raises `Corrupt`."""
    try:
        external_id, at = read_utf8(data)
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
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
    """Tag and value as they stand in the metadata index: byte order is the order of the values.

    Integers have their sign bit flipped; floats too, or if negative all bits. Minus zero is zero.
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
