"""A cap on items that holds before anything is parsed: two bytes can be a span, and a span takes hundreds.

Almost every request is let through by counting one byte: each item has its tag in front of it, so there are
no more items than such bytes. Only where there are very many is the message followed, length by length.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import LimitExceeded
from penstock.otlp.signal import Signal

__all__ = ["ITEMS_MAX", "check_item_count"]

ITEMS_MAX: Final = 1_000_000
"""As rows they take about as much as a bundle may hold."""

_PATHS: Final[dict[Signal, tuple[frozenset[int], ...]]] = {
    Signal.TRACES: (frozenset({1}), frozenset({2}), frozenset({2})),
    Signal.LOGS: (frozenset({1}), frozenset({2}), frozenset({2})),
    Signal.METRICS: (
        frozenset({1}),
        frozenset({2}),
        frozenset({2}),
        frozenset({5, 7, 9, 10, 11}),
        frozenset({1}),
    ),
}
"""The fields that lead from a request to its items."""

_LAST_TAGS: Final = {Signal.TRACES: b"\x12", Signal.LOGS: b"\x12", Signal.METRICS: b"\x0a"}
_WIRE_BYTES: Final = {1: 8, 5: 4}


def check_item_count(data: bytes, signal: Signal, most: int = ITEMS_MAX) -> None:
    """Raises `LimitExceeded` when `data` holds more than `most` items. Bytes that are no message pass."""
    if data.count(_LAST_TAGS[signal]) <= most:
        return
    try:
        held = _count(data, 0, len(data), _PATHS[signal], most)
    except IndexError:
        return
    if held > most:
        raise LimitExceeded(f"the request holds more than {most} items; send fewer in one")


def _count(data: bytes, start: int, end: int, path: tuple[frozenset[int], ...], most: int) -> int:
    """How many fields `path` leads to; stops soon after `most`. Raises `IndexError` behind the end."""
    found, place = 0, start
    while place < end and found <= most:
        tag, place = _varint(data, place)
        wire = tag & 7
        if wire == 2:
            length, place = _varint(data, place)
            if tag >> 3 in path[0]:
                found += 1 if len(path) == 1 else _count(data, place, place + length, path[1:], most - found)
            place += length
        elif wire == 0:
            _, place = _varint(data, place)
        elif wire in _WIRE_BYTES:
            place += _WIRE_BYTES[wire]
        else:
            raise IndexError("a group or no field at all: the parser tells")
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number and where it ends. A tag or length of several bytes is rare."""
    byte = data[place]
    if byte < 0x80:
        return byte, place + 1
    number, shift = byte & 0x7F, 7
    while True:
        place += 1
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place + 1
        shift += 7
        if shift > 63:
            raise IndexError("a number that never ends")
