"""Keys: big-endian, so that their bytes sort as their values do, below a prefix for each subsystem.

Terminated bytes hold any bytes inside a longer key: `00` becomes `01 01`, `01` becomes `01 02`, `FF` becomes
`01 03`, and a `00` ends them. A shorter text sorts before its extensions, and texts sort as they do by
themselves (`FF`, which no UTF-8 text holds, sorts as if it were smaller than `02`).
"""

from __future__ import annotations

import re
from enum import IntEnum

from penstock.errors import Corrupt, InvalidInput

__all__ = ["Subsystem", "key_prefix", "read_terminated", "terminated"]

_TERMINATOR = b"\x00"
_ESCAPED = {b"\x01\x01": b"\x00", b"\x01\x02": b"\x01", b"\x01\x03": b"\xff"}
_ESCAPE = re.compile(rb"\x01[\x01-\x03]")
_WELL_FORMED = re.compile(rb"(?:[^\x00\x01\xff]|\x01[\x01-\x03])*", re.DOTALL)


class Subsystem(IntEnum):
    """Who owns the keys that begin with this byte."""

    TIMESERIES = 1
    VECTOR = 2
    LOG = 3
    KV = 4


def key_prefix(subsystem: int, version: int) -> bytes:
    """The two bytes that begin every key. Raises `InvalidInput` if one of them is none."""
    if not (0 <= subsystem <= 255 and 0 <= version <= 255):
        raise InvalidInput(f"a key begins with two bytes, not with {subsystem} and {version}")
    return bytes((subsystem, version))


def terminated(data: bytes) -> bytes:
    """`data` with its end marked, for use inside a key."""
    escaped = data.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01").replace(b"\xff", b"\x01\x03")
    return escaped + _TERMINATOR


def read_terminated(key: bytes, offset: int = 0) -> tuple[bytes, int]:
    """The data marked by `terminated` at `offset`, and where it ends. Raises `Corrupt`."""
    end = key.find(_TERMINATOR, offset)
    if end < 0:
        raise Corrupt(f"a key part without its terminator at offset {offset}")
    part = key[offset:end]
    if not _WELL_FORMED.fullmatch(part):
        raise Corrupt(f"a key part with a wrong escape behind offset {offset}")
    return _ESCAPE.sub(lambda found: _ESCAPED[found[0]], part), end + 1
