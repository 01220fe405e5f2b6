"""Encoding of keys: a prefix for each subsystem, then big-endian values, whose bytes sort in numeric order.

Terminated bytes hold arbitrary bytes inside a longer key: `00` becomes `01 01`, `01` becomes `01 02`, `FF`
becomes `01 03`, and a `00` ends them. A text sorts before its extensions, and texts keep their order. (`FF`,
which never occurs in UTF-8, sorts as if it were smaller than `02`.)
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
    """The first byte of a key: the owner of the key."""

    TIMESERIES = 1
    VECTOR = 2
    LOG = 3
    KV = 4


def key_prefix(subsystem: int, version: int) -> bytes:
    """Return the first two bytes of a key. Raises `InvalidInput` if either is not a byte."""
    if not (0 <= subsystem <= 255 and 0 <= version <= 255):
        raise InvalidInput(f"subsystem and version must be 0 to 255, got {subsystem} and {version}")
    return bytes((subsystem, version))


def terminated(data: bytes) -> bytes:
    """Return `data` escaped and terminated, for use inside a key."""
    escaped = data.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01").replace(b"\xff", b"\x01\x03")
    return escaped + _TERMINATOR


def read_terminated(key: bytes, offset: int = 0) -> tuple[bytes, int]:
    """Decode the `terminated` data at `offset`. Return it and the offset after it. Raises `Corrupt`."""
    end = key.find(_TERMINATOR, offset)
    if end < 0:
        raise Corrupt(f"a key part without its terminator at offset {offset}")
    part = key[offset:end]
    if not _WELL_FORMED.fullmatch(part):
        raise Corrupt(f"a key part with a wrong escape after offset {offset}")
    return _ESCAPE.sub(lambda found: _ESCAPED[found[0]], part), end + 1
