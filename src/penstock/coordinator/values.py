"""Encoding of values, little-endian. Utf8 is a u16 length and the text; Array is a u16 count and the
items."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.errors import Corrupt, InvalidInput

__all__ = ["array", "read_array", "read_utf8", "utf8"]

T = TypeVar("T")
_U16 = struct.Struct("<H")
_U16_MAX = 0xFFFF


def utf8(text: str) -> bytes:
    """Encode `text` with its length. Raises `InvalidInput` for more than 65,535 bytes or invalid Unicode."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"not a Unicode text: {error.reason} at character {error.start}") from error
    if len(data) > _U16_MAX:
        raise InvalidInput(f"a text of {len(data)} bytes is longer than the {_U16_MAX} that can be stored")
    return _U16.pack(len(data)) + data


def read_utf8(data: bytes, offset: int = 0) -> tuple[str, int]:
    """Return the text at `offset` and the offset after it. Raises `Corrupt`."""
    length, begin = _read_u16(data, offset)
    end = begin + length
    if end > len(data):
        raise Corrupt(f"a text of {length} bytes at offset {offset} ends after its value")
    try:
        return bytes(data[begin:end]).decode(), end
    except UnicodeDecodeError as error:
        raise Corrupt(f"a text at offset {offset} is not UTF-8") from error


def array(items: Iterable[bytes]) -> bytes:
    """Encode items after their count. Raises `InvalidInput` for more than 65,535 of them."""
    encoded = list(items)
    if len(encoded) > _U16_MAX:
        raise InvalidInput(
            f"an array of {len(encoded)} items is longer than the {_U16_MAX} that can be stored"
        )
    return _U16.pack(len(encoded)) + b"".join(encoded)


def read_array(data: bytes, offset: int, read: Callable[[bytes, int], tuple[T, int]]) -> tuple[list[T], int]:
    """Return the items at `offset`, each read by `read(data, offset)`, and the offset after them.

    Raises `Corrupt`.
    """
    count, at = _read_u16(data, offset)
    items = []
    for _ in range(count):
        item, at = read(data, at)
        items.append(item)
    return items, at


def _read_u16(data: bytes, offset: int) -> tuple[int, int]:
    if offset < 0 or offset + _U16.size > len(data):
        raise Corrupt(f"a length at offset {offset} ends after its value")
    return _U16.unpack_from(data, offset)[0], offset + _U16.size
