"""ULIDs: 26 characters that sort by the millisecond of their creation.

48 bits of Unix milliseconds, then 80 random bits, in Crockford's base 32 (no I, L, O, U). The caller
passes the time and the random generator, so that this module needs no global state.
"""

from __future__ import annotations

import random
from typing import Final, NewType

from penstock.errors import InvalidInput

__all__ = ["SYSTEM_RNG", "ULID_CHARS", "Ulid", "is_ulid", "mint_ulid", "parse_ulid", "ulid_ms"]

Ulid = NewType("Ulid", str)
"""A ULID in canonical upper case."""

ULID_CHARS: Final = 26

SYSTEM_RNG: Final[random.Random] = random.SystemRandom()
"""Random numbers from the operating system: safe across forks and threads."""

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES: Final = {char: value for value, char in enumerate(_ALPHABET)} | {
    char.lower(): value for value, char in enumerate(_ALPHABET)
}
_RANDOM_BITS: Final = 80
_MS_END: Final = 1 << 48


def mint_ulid(ms: int, rng: random.Random) -> Ulid:
    """Return a new ULID for the millisecond `ms`. Raise `InvalidInput` if `ms` does not fit in 48 bits."""
    if not 0 <= ms < _MS_END:
        raise InvalidInput(f"{ms} ms does not fit in a ULID: expected 0 to {_MS_END - 1}")
    return _encode(ms << _RANDOM_BITS | rng.getrandbits(_RANDOM_BITS))


def parse_ulid(text: str) -> int:
    """Return the 128-bit value of a ULID in either case. Raise `InvalidInput` for any other text."""
    if len(text) != ULID_CHARS:
        raise InvalidInput(f"{text!r} is not a ULID: it has {len(text)} characters instead of {ULID_CHARS}")
    if text[0] > "7":
        raise InvalidInput(f"{text!r} is not a ULID: the first character must be 0 to 7")
    value = 0
    for char in text:
        digit = _VALUES.get(char)
        if digit is None:
            raise InvalidInput(f"{text!r} is not a ULID: {char!r} is not in Crockford's base 32")
        value = value << 5 | digit
    return value


def ulid_ms(text: str) -> int:
    """Return the Unix milliseconds of a ULID. Raise `InvalidInput` if `text` is not a ULID."""
    return parse_ulid(text) >> _RANDOM_BITS


def is_ulid(text: str) -> bool:
    """Return whether `text` is a ULID, in either case."""
    try:
        parse_ulid(text)
    except InvalidInput:
        return False
    return True


def _encode(value: int) -> Ulid:
    shifts = range(5 * (ULID_CHARS - 1), -1, -5)
    return Ulid("".join(_ALPHABET[value >> shift & 31] for shift in shifts))
