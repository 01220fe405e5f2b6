"""Limits that are checked before a request is parsed: the number of very small parts, and of items.

An attribute, an event or a link can be two bytes long but takes hundreds as a message or a row. The first
limit counts every place that looks like one: the tag of a part with few bytes, or a varint that is longer
than necessary, which no encoder writes. Text has some of these by chance, but far fewer than the limit.

A span can also be two bytes long. The second limit accepts almost every request by counting one byte: each
item begins with its tag, so there are no more items than such bytes. Only if there are very many of them, the
fields of the message are scanned.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidInput, LimitExceeded
from penstock.otlp.schema import Signal
from penstock.protowire import LENGTH_DELIMITED, fields

SMALL_PARTS_MAX: Final = 4_000_000
"""The limit for small parts. Real requests of 64 MiB have a third of it, and more would need too much memory.
"""

_TAGS: Final = bytes((0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A, 0x42, 0x4A, 0x5A, 0x62, 0x6A))
"""The tags of the fields that hold messages or text."""
_LENGTH_MAX: Final = 6
_PIECE: Final = 4 << 20


def check_density(data: bytes, most: int = SMALL_PARTS_MAX) -> None:
    """Raise `LimitExceeded` if `data` has more than `most` very small parts."""
    if len(data) <= 2 * most:
        return
    import numpy as np

    is_tag = np.zeros(256, np.bool_)
    is_tag[list(_TAGS)] = True
    count = 0
    for start in range(0, len(data), _PIECE):
        window = np.frombuffer(data, np.uint8, min(_PIECE + 1, len(data) - start), start)
        first, second = window[:-1], window[1:]
        count += int(np.count_nonzero(is_tag[first] & (second <= _LENGTH_MAX)))
        count += int(np.count_nonzero((first >= 0x80) & (second == 0)))
        if count > most:
            _refuse(most)


def check_json_density(data: bytes, most: int = SMALL_PARTS_MAX) -> None:
    """Raise `LimitExceeded` if JSON has too many values, estimated by the characters that precede values."""
    if len(data) > 2 * most and sum(data.count(sign) for sign in (b",", b"{", b"[")) > 2 * most:
        _refuse(most)


def _refuse(most: int) -> None:
    raise LimitExceeded(f"the request has more than {most} very small parts; send fewer per request")


ITEMS_MAX: Final = 1_000_000
"""The limit for items. As rows they take about as much memory as a bundle may have."""

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


def check_item_count(data: bytes, signal: Signal, most: int = ITEMS_MAX) -> None:
    """Raise `LimitExceeded` if `data` has more than `most` items. Bytes that do not parse are accepted."""
    if data.count(_LAST_TAGS[signal]) <= most:
        return
    try:
        count = _count(data, 0, len(data), _PATHS[signal], most)
    except InvalidInput:
        return
    if count > most:
        raise LimitExceeded(f"the request has more than {most} items; send fewer per request")


def _count(data: bytes, start: int, end: int, path: tuple[frozenset[int], ...], most: int) -> int:
    """Count the fields that `path` leads to, and stop soon after `most`. Raise `InvalidInput`."""
    count = 0
    for number, wire_type, value, stop in fields(data, start, end):
        if wire_type == LENGTH_DELIMITED and number in path[0]:
            count += 1 if len(path) == 1 else _count(data, value, stop, path[1:], most - count)
            if count > most:
                break
    return count
