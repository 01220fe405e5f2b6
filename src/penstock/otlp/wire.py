"""The little of protobuf's wire format that is written and read by hand."""

from __future__ import annotations

from typing import Final

from penstock.otlp.errors import Unflattenable

__all__ = ["field_content", "varint"]

_MORE: Final = 0x80


def varint(number: int) -> bytes:
    """A length as the wire has it."""
    out = bytearray()
    while number >= _MORE:
        out.append(number & 0x7F | _MORE)
        number >>= 7
    out.append(number)
    return bytes(out)


def field_content(message: bytes | None, number: int) -> bytes:
    """The bytes of field `number`, which is all that `message` holds. Raises `Unflattenable` if it is not."""
    tag = number << 3 | 2
    if not message or message[0] != tag:
        raise Unflattenable("a serialized value is not of its type")
    length = shift = 0
    for place in range(1, len(message)):
        length |= (message[place] & 0x7F) << shift
        shift += 7
        if message[place] < _MORE:
            content = message[place + 1 :]
            if len(content) != length:
                break
            return content
    raise Unflattenable("a serialized value is not whole")
