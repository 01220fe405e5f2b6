"""Caps that hold before anything is parsed: on very small parts, and on items.

A cap on very small parts that holds before anything is parsed.

An attribute, an event or a link can be two bytes, and takes hundreds as a message or a row. What is counted
is every place that looks like one: the tag of a part with a few bytes in it, or a number spelled longer than
it need be, which no encoder does. Text has a few such places by chance, far fewer than the cap.

A cap on items that holds before anything is parsed: two bytes can be a span, and a span takes hundreds.

Almost every request is let through by counting one byte: each item has its tag in front of it, so there are
no more items than such bytes. Only where there are very many is the message followed, length by length.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import LimitExceeded
from penstock.otlp.schema import Signal

SMALL_PARTS_MAX: Final = 4_000_000
"""Real requests of 64 MiB have a third of it; decoded, this many take no more memory than those do."""

_TAGS: Final = bytes((0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A, 0x42, 0x4A, 0x5A, 0x62, 0x6A))
"""Fields of the protocol that hold messages or text."""
_LENGTH_MAX: Final = 6
_PIECE: Final = 4 << 20


def check_density(data: bytes, most: int = SMALL_PARTS_MAX) -> None:
    """Raises `LimitExceeded` when `data` holds more than `most` very small parts."""
    if len(data) <= 2 * most:
        return
    import numpy as np

    is_tag = np.zeros(256, np.bool_)
    is_tag[list(_TAGS)] = True
    held = 0
    for start in range(0, len(data), _PIECE):
        window = np.frombuffer(data, np.uint8, min(_PIECE + 1, len(data) - start), start)
        first, second = window[:-1], window[1:]
        held += int(np.count_nonzero(is_tag[first] & (second <= _LENGTH_MAX)))
        held += int(np.count_nonzero((first >= 0x80) & (second == 0)))
        if held > most:
            _refuse(most)


def check_json_density(data: bytes, most: int = SMALL_PARTS_MAX) -> None:
    """The same for JSON, by the signs that stand in front of values."""
    if len(data) > 2 * most and sum(data.count(sign) for sign in (b",", b"{", b"[")) > 2 * most:
        _refuse(most)


def _refuse(most: int) -> None:
    raise LimitExceeded(f"the request holds more than {most} very small parts; send fewer in one")


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
