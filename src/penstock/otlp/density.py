"""A cap on very small parts that holds before anything is parsed.

An attribute, an event or a link can be two bytes, and takes hundreds as a message or a row. What is counted
is every place that looks like one: the tag of a part with a few bytes in it, or a number spelled longer than
it need be, which no encoder does. Text has a few such places by chance, far fewer than the cap.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import LimitExceeded

__all__ = ["SMALL_PARTS_MAX", "check_density", "check_json_density"]

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
