"""A look at a request's outermost fields, so that garbage is refused without building a message. Pure."""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidInput, LimitExceeded

__all__ = ["RESOURCES_MAX", "check_framing"]

RESOURCES_MAX: Final = 100_000
"""A request with more outermost fields would hold up everybody else while they are counted."""

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5
_VARINT_BYTES_MAX: Final = 10


def check_framing(data: bytes) -> int:
    """How many resources a serialized export request holds (field 1, of any signal).

    Costs one step per resource, whatever they hold. Raises `InvalidInput` unless the bytes are a whole
    number of well-formed fields; what is inside a field is not looked at. Raises `LimitExceeded` for more
    than `RESOURCES_MAX`.
    """
    at, end, resources, fields = 0, len(data), 0, 0
    while at < end:
        fields += 1
        if fields > RESOURCES_MAX:
            raise LimitExceeded(f"the request holds more than {RESOURCES_MAX} resources; send fewer in one")
        tag, at = _varint(data, at, end)
        if tag >> 3 == 0:
            raise InvalidInput("this is no OTLP request: a field has the number 0")
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, at = _varint(data, at, end)
            at += length
            resources += tag >> 3 == 1
        elif wire_type == _VARINT:
            _, at = _varint(data, at, end)
        elif wire_type in (_FIXED64, _FIXED32):
            at += 8 if wire_type == _FIXED64 else 4
        else:
            raise InvalidInput(f"this is no OTLP request: a field has the wire type {wire_type}")
        if tag >> 3 == 1 and wire_type != _LENGTH:
            raise InvalidInput("this is no OTLP request: its first field is no message")
    if at != end:
        raise InvalidInput("this is no OTLP request: it ends in the middle of a field")
    return resources


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise InvalidInput("this is no OTLP request: it ends in the middle of a field")
