"""Protobuf's wire format without message types: varints, and the fields of serialized bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.errors import InvalidInput

__all__ = ["FIXED32", "FIXED64", "LENGTH_DELIMITED", "VARINT", "fields", "read_varint", "varint"]

VARINT: Final = 0
FIXED64: Final = 1
LENGTH_DELIMITED: Final = 2
FIXED32: Final = 5

_MORE: Final = 0x80
_VARINT_BYTES_MAX: Final = 10
_FIXED_BYTES: Final = {FIXED64: 8, FIXED32: 4}


def varint(number: int) -> bytes:
    """Encode a number: seven bits in each byte, the lowest first."""
    encoded = bytearray()
    while number >= _MORE:
        encoded.append(number & (_MORE - 1) | _MORE)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at`, and the offset after it.

    Raise `InvalidInput` for a number that does not end before `end` or has more than ten bytes.
    """
    value = shift = 0
    for place in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = data[place]
        if byte < _MORE:
            return value | byte << shift, place + 1
        value |= (byte & (_MORE - 1)) << shift
        shift += 7
    raise InvalidInput("the protobuf message has a number that is cut or too long")


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, wire type, value and end offset of each field in `data[start:end]`.

    The value of a varint field is the number. The value of any other field is the offset of its content,
    which ends at the field's end. Raise `InvalidInput` for a field that is malformed or does not end before
    `end`.
    """
    at, stop = start, len(data) if end is None else end
    while at < stop:
        tag, at = read_varint(data, at, stop)
        number, wire_type = tag >> 3, tag & 7
        if not number:
            raise InvalidInput("the protobuf message has a field with the number 0")
        if wire_type == LENGTH_DELIMITED:
            size, value = read_varint(data, at, stop)
            at = value + size
        elif wire_type == VARINT:
            value, at = read_varint(data, at, stop)
        elif wire_type in _FIXED_BYTES:
            value, at = at, at + _FIXED_BYTES[wire_type]
        else:
            raise InvalidInput(f"the protobuf message has a field with the wire type {wire_type}")
        if at > stop:
            raise InvalidInput("the protobuf message ends in the middle of a field")
        yield number, wire_type, value, at
