"""Limits on incoming JSON: depth and numbers, checked on the bytes before decoding.

Every later stage must be able to decode accepted JSON. Decoders differ in the depth and in the length of
numbers that they support, so these limits are well below all of them: `JSON_DEPTH_MAX` levels,
`JSON_NUMBER_DIGITS_MAX` digits, and numbers with a fraction or an exponent in the range of a 64-bit float.

The check handles strings and escapes exactly. Most texts have few brackets and no suspicious number, and are
not scanned. Text that is not JSON may pass; the decoder then rejects it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInput
from penstock.limits import JSON_DEPTH_MAX, JSON_NUMBER_DIGITS_MAX, JSON_STORED_DEPTH_MAX

__all__ = [
    "Shallow",
    "check_json",
    "decode_list",
    "json_depth",
    "json_problem",
    "members",
    "parts_problem",
    "shallow",
    "stored_problem",
]

T = TypeVar("T")

_Places: TypeAlias = npt.NDArray[np.int64]
_SHORT: Final = 200
"""A number with at most this many digits and a two-digit exponent is in the range of a 64-bit float."""
_EXPONENT_DIGITS_MAX: Final = 3
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = b'"\\{}'
_FOLD: Final = np.uint8(0x20)
"""The bit that maps brackets to braces."""
_NUMBER: Final = re.compile(rb"-?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_IN_NUMBER: Final = frozenset(b"0123456789.+-eE")
_AROUND: Final = frozenset(b"[]{},: \t\r\n")
_LONG_RUN: Final = b"0" * (_SHORT + 1)
_STRIDE: Final = 40
_SAMPLES: Final = b"0" * (_SHORT // _STRIDE)
_EXPONENTS: Final = (b"0e000", b"0e-000")
_EXPONENT_END: Final = re.compile(rb"[eE][+-]?[0-9]{3,}(?:[\]},\s]|\Z)")
_ARRAY_BYTES_MIN: Final = 4096
"""Text longer than this is searched with arrays, which is faster."""
_DIGIT: Final = ord("0")
_KEY: Final = re.compile(rb'("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)


def _kinds() -> bytes:
    table = bytearray(b" " * 256)
    for digit in b"0123456789.":
        table[digit] = ord("0")
    table[ord("e")] = table[ord("E")] = ord("e")
    table[ord("+")] = table[ord("-")] = ord("-")
    return bytes(table)


_KINDS: Final = _kinds()


def check_json(text: bytes, what: str = "the body", *, depth_max: int = JSON_DEPTH_MAX) -> None:
    """Raise `InvalidInput`, naming `what`, for JSON that a later stage may be unable to decode."""
    problem = json_problem(text, depth_max=depth_max)
    if problem is not None:
        raise InvalidInput(f"{what} {problem}")


def json_problem(text: bytes, *, depth_max: int = JSON_DEPTH_MAX) -> str | None:
    """Return which limit JSON text exceeds, as a predicate for an error message, or None."""
    if _is_deep(text, depth_max):
        return f"is nested more than {depth_max} levels deep; send JSON of at most {depth_max} levels"
    return _number_problem(text)


def stored_problem(text: bytes) -> str | None:
    """Return why a decoder may reject a stored record, without advice, or None.

    A number outside the range of a float is allowed: every stage accepts it as text.
    """
    if _is_deep(text, JSON_STORED_DEPTH_MAX):
        return f"is nested more than {JSON_STORED_DEPTH_MAX} levels deep"
    problem = _number_problem(text, ranges=False)
    return None if problem is None else problem.partition(";")[0]


def parts_problem(
    text: bytes, parts: Iterable[bytes], *, depth_max: int = JSON_DEPTH_MAX, levels: int = 0
) -> str | None:
    """Check valid JSON like `json_problem`, given its values at depth `levels`; check each value separately.

    This is cheaper for many small values: a value of few bytes cannot be deep.
    """
    if text.count(b"{") + text.count(b"[") > depth_max:
        room = depth_max - levels
        for part in parts:
            if len(part) > 2 * room and _is_deep(bytes(part), room):
                return f"is nested more than {depth_max} levels deep; send JSON of at most {depth_max} levels"
    return _number_problem(text)


def json_depth(text: bytes) -> int:
    """Return the number of nested lists and objects in JSON text; 0 for a plain value."""
    places, deltas = _brackets(text)
    return int(np.cumsum(deltas).max(initial=0)) if len(places) else 0


class Shallow(NamedTuple):
    """JSON text with `null` in place of each deeper value, and the removed texts in order."""

    text: bytes
    cut: list[bytes]


def shallow(text: bytes, levels: int) -> Shallow:
    """Replace lists and objects below `levels` by `null`, so that every decoder accepts the text."""
    places, deltas = _brackets(text)
    depth = np.cumsum(deltas)
    starts = places[(deltas > 0) & (depth == levels + 1)].tolist()
    stops = places[(deltas < 0) & (depth == levels)].tolist()
    parts, cut, at = [], [], 0
    for start, stop in zip(starts, stops, strict=False):
        parts.append(text[at:start])
        cut.append(text[start : stop + 1])
        at = stop + 1
    parts.append(text[at:])
    return Shallow(b"null".join(parts), cut)


def decode_list(decoder: msgspec.json.Decoder[T], text: bytes) -> tuple[T, list[bytes] | None]:
    """Decode an object that contains a list of objects.

    The second part is None if the decoder accepts the text as it is. If an object is nested too deep for the
    decoder, each list entry is `null` and the second part holds the text of every object.
    """
    try:
        return decoder.decode(text), None
    except RecursionError:
        plain, cut = shallow(text, 2)
        return decoder.decode(plain), cut


def members(text: bytes) -> dict[str, bytes]:
    """Return the members of a JSON object of any depth; each value is its JSON text."""
    places, deltas = _brackets(text)
    depth = np.cumsum(deltas)
    chars = np.frombuffer(text, np.uint8)
    commas = np.flatnonzero(chars == ord(","))
    commas = commas[np.searchsorted(_quotes(text, chars), commas) % 2 == 0]
    commas = commas[depth[np.searchsorted(places, commas) - 1] == 1]
    edges = [int(places[0]), *commas.tolist(), int(places[-1])]
    found: dict[str, bytes] = {}
    for start, stop in itertools.pairwise(edges):
        member = text[start + 1 : stop].strip()
        if member:
            end = _KEY.match(member)
            assert end is not None, "not a JSON object"
            found[json.loads(end[1])] = member[end.end() :]
    return found


def _is_deep(text: bytes, depth_max: int) -> bool:
    return text.count(b"{") + text.count(b"[") > depth_max and json_depth(text) > depth_max


def _brackets(text: bytes) -> tuple[_Places, _Places]:
    """Return the positions of brackets outside strings, and the depth change of each."""
    chars = np.frombuffer(text, np.uint8)
    folded = chars | _FOLD
    places = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
    quotes = _quotes(text, chars)
    places = places[np.searchsorted(quotes, places) % 2 == 0]
    return places, np.where(folded[places] == _OPEN, 1, -1)


def _quotes(text: bytes, chars: npt.NDArray[np.uint8]) -> _Places:
    """Return the quotes that delimit strings. A quote after an odd number of backslashes is escaped."""
    quotes = np.flatnonzero(chars == _QUOTE)
    if b'\\"' not in text:
        return quotes
    slashes = np.flatnonzero(chars == _BACKSLASH)
    rows = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(rows, append=len(slashes))
    escaped = (slashes[rows] + lengths)[lengths % 2 == 1]
    kept: _Places = quotes[~np.isin(quotes, escaped)]
    return kept


def _number_problem(text: bytes, *, ranges: bool = True) -> str | None:
    for at in _candidates(text):
        start, stop = _token(text, at)
        if (
            _is_outside(text, start, stop)
            and (problem := _wrong_number(text[start:stop], ranges=ranges)) is not None
            and np.searchsorted(_quotes(text, np.frombuffer(text, np.uint8)), start) % 2 == 0
        ):
            return problem
    return None


def _candidates(text: bytes) -> Iterator[int]:
    """Yield positions inside possible numbers with many digits or an exponent of at least three digits."""
    # Every run of more than `_SHORT` digits contains this many sampled bytes in a row.
    if _SAMPLES in text[::_STRIDE].translate(_KINDS):
        yield from _found(text.translate(_KINDS), _LONG_RUN)
    if len(text) > _ARRAY_BYTES_MIN:
        yield from _exponents(text)
        return
    kinds = text.translate(_KINDS)
    for exponent in _EXPONENTS:
        yield from _found(kinds, exponent)


def _found(kinds: bytes, needle: bytes) -> Iterator[int]:
    at = kinds.find(needle)
    while at >= 0:
        yield at
        after = len(needle)
        while after + at < len(kinds) and kinds[at + after] == _DIGIT:
            after += 1
        at = kinds.find(needle, at + after)


def _exponents(text: bytes) -> Iterator[int]:
    chars = np.frombuffer(text, np.uint8)
    places = np.flatnonzero((chars | _FOLD) == ord("e"))
    places = places[(places > 0) & (places < len(text) - 3)]
    places = places[_is_digit(chars[places - 1])]
    following = chars[places + 1]
    signed = (following == ord("+")) | (following == ord("-"))
    places = places[
        (signed | _is_digit(following)) & _is_digit(chars[places + 2]) & _is_digit(chars[places + 3])
    ]
    for place in places.tolist():
        if _EXPONENT_END.match(text, place):
            yield place


def _is_digit(chars: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    digits: npt.NDArray[np.bool_] = chars - np.uint8(ord("0")) <= 9
    return digits


def _token(text: bytes, at: int) -> tuple[int, int]:
    start = stop = at
    while start > 0 and text[start - 1] in _IN_NUMBER:
        start -= 1
    while stop < len(text) and text[stop] in _IN_NUMBER:
        stop += 1
    return start, stop


def _is_outside(text: bytes, start: int, stop: int) -> bool:
    """Return whether the characters around a number are possible outside a string."""
    return (start == 0 or text[start - 1] in _AROUND) and (stop == len(text) or text[stop] in _AROUND)


def _wrong_number(token: bytes, *, ranges: bool = True) -> str | None:
    if not _NUMBER.fullmatch(token):
        return None
    mantissa, _, exponent = token.lower().partition(b"e")
    digits = len(mantissa) - mantissa.count(b"-") - mantissa.count(b".")
    if digits > JSON_NUMBER_DIGITS_MAX:
        return (
            f"has a number of {digits} digits; at most {JSON_NUMBER_DIGITS_MAX} are allowed, send it as text"
        )
    if not ranges:
        return None
    if len(exponent.lstrip(b"+-").lstrip(b"0")) > _EXPONENT_DIGITS_MAX or (
        mantissa.count(b".") < 2 and (exponent or b"." in mantissa) and not math.isfinite(float(token))
    ):
        return f"has a number outside the range of a 64-bit float: {token[:40].decode()}; send it as text"
    return None
