"""The JSON text of records: made compact, measured, and wrapped for storage.

What a record is accounted with is the length of its `data` and `meta` as a compact serialiser writes them:
no blanks between tokens, and in strings no escape where a character can stand for itself. The text is stored
with the escapes it came with, so the two lengths differ when there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.jsontext import json_problem, members
from penstock.topics.errors import InvalidRequest

__all__ = [
    "DATA_WRAP_BYTES",
    "META_WRAP_BYTES",
    "Text",
    "checked",
    "compact",
    "compact_all",
    "escape_savings",
    "has_savings",
    "saved_by_record",
    "split_payload",
]

Text: TypeAlias = bytes | msgspec.Raw
Counts: TypeAlias = npt.NDArray[np.int64]

DATA_WRAP_BYTES: Final = len(b'{"d":}')
"""What a stored payload has around `data`."""
META_WRAP_BYTES: Final = len(b',"m":')

_SPACE, _LINE_FEED, _RETURN, _TAB, _BACKSLASH = b" \n\r\t\\"
_SCANNED_BYTES_MIN: Final = 64 * 1024
_META = b',"m":'
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class _Payload(msgspec.Struct, gc=False):
    d: msgspec.Raw
    m: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_PAYLOAD = msgspec.json.Decoder(_Payload)


def checked(text: Text, what: str) -> bytes:
    """The same JSON, compact. Raises `InvalidRequest` naming `what` unless it is one JSON value in UTF-8."""
    plain = bytes(text)
    problem = json_problem(plain)
    if problem is not None:
        raise InvalidRequest(f"{what} {problem}")
    try:
        str(plain, "utf-8")
        return msgspec.json.format(plain, indent=-1)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from None


def compact(text: Text) -> bytes:
    """Valid JSON without blanks between its tokens."""
    plain = bytes(text)
    # Numbers, because a text is searched for a text with four times the effort.
    if _SPACE in plain or _LINE_FEED in plain or _RETURN in plain or _TAB in plain:
        try:
            return msgspec.json.format(plain, indent=-1)
        except RecursionError:  # stored before there was a limit, and made compact then
            return plain
    return plain


def compact_all(texts: Sequence[Text]) -> tuple[Sequence[Text], bytes]:
    """Many at once: each as by `compact`, and all of them joined by commas."""
    blob = b",".join(texts)
    if not (_LINE_FEED in blob or _RETURN in blob or _TAB in blob):
        if _SPACE not in blob:
            return texts, blob
        # Up to here it is quicker to let the formatter find out that there is nothing to do.
        if len(blob) > _SCANNED_BYTES_MIN and not _blank_at_a_token(blob):
            return texts, blob
    formatted = msgspec.json.format(b"[%b]" % blob, indent=-1)
    if len(formatted) == len(blob) + 2:
        return texts, blob
    return _LIST.decode(formatted), formatted[1:-1]


def _blank_at_a_token(blob: bytes) -> bool:
    """Whether a space stands beside one of `{}[],:`, as every space between two tokens does.

    Some texts without are taken for one with: a bar or a backslash counts as a token.
    """
    chars = np.frombuffer(blob, np.uint8)
    # Setting bit 5 maps the brackets onto the braces and leaves the comma and the colon as they are.
    folded = chars | np.uint8(0x20)
    token = folded - np.uint8(0x7B) <= 2
    found = np.equal(folded, np.uint8(0x2C))
    token |= found
    token |= np.equal(folded, np.uint8(0x3A), out=found)
    space = np.equal(chars, np.uint8(0x20), out=found)
    beside = token[:-2] | token[2:]
    beside &= space[1:-1]
    return bool(space[0] or space[-1] or beside.any())


def has_savings(text: bytes) -> bool:
    """Whether there may be an escape that a compact serialiser would write shorter."""
    return _BACKSLASH in text and (b"\\u" in text or b"\\/" in text)


def escape_savings(text: bytes) -> tuple[Counts, Counts]:
    """Where in valid JSON an escape stands that a compact serialiser would write shorter, and by how much."""
    if not has_savings(text):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    chars = np.frombuffer(text, np.uint8)
    starts = _escape_starts(chars)
    kind = chars[starts + 1]
    slashes, coded = starts[kind == ord("/")], starts[kind == ord("u")]
    saved = 6 - _written_bytes(_code_units(chars, coded))
    places = np.concatenate([slashes, coded[saved > 0]])
    return places, np.concatenate([np.ones(len(slashes), np.int64), saved[saved > 0]])


def _escape_starts(chars: npt.NDArray[np.uint8]) -> Counts:
    """The backslashes that begin an escape: in a row of them, every second one is itself escaped."""
    places = np.flatnonzero(chars == ord("\\"))
    row_starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    within = np.arange(len(places)) - np.repeat(row_starts, np.diff(row_starts, append=len(places)))
    starts: Counts = places[within % 2 == 0]
    return starts


def _code_units(chars: npt.NDArray[np.uint8], starts: Counts) -> Counts:
    units = np.zeros(len(starts), np.int64)
    for digit in range(2, 6):
        char = chars[starts + digit].astype(np.int64)
        units = units * 16 + (char & 0xF) + 9 * (char >= ord("A"))
    return units


def _written_bytes(units: Counts) -> Counts:
    """The bytes that a compact serialiser writes for each UTF-16 unit; a pair of halves makes four."""
    size = np.where(units < 0x80, 1, np.where(units < 0x800, 2, 3))
    size = np.where((units >= 0xD800) & (units < 0xE000), 2, size)
    size = np.where(np.isin(units, (0x08, 0x09, 0x0A, 0x0C, 0x0D, 0x22, 0x5C)), 2, size)
    return np.where((units < 0x20) & (size == 1), 6, size)


def saved_by_record(blob: bytes, lengths: Counts) -> Counts | None:
    """The savings per text of a blob joined by commas; None when there are none."""
    places, saved = escape_savings(blob)
    if not len(places):
        return None
    owner = np.searchsorted(np.cumsum(lengths + 1), places, side="right")
    return np.bincount(owner, saved, len(lengths)).astype(np.int64)


def split_payload(payload: bytes) -> tuple[bytes, bytes | None]:
    """`data` and `meta` of a stored payload that was written with meta."""
    # Outside a string `,"m":` can only begin a member, inside one it cannot stand at all. If there is
    # a single one, it is ours; else `data` or `meta` have a member of that name and must be parsed.
    if payload.count(_META) == 1:
        data, _, meta = payload.partition(_META)
        return data[5:], meta[:-1]
    try:
        parsed = _PAYLOAD.decode(payload)
    except RecursionError:
        return _split_deep(payload)
    return bytes(parsed.d), None if parsed.m is msgspec.UNSET else bytes(parsed.m)


def _split_deep(payload: bytes) -> tuple[bytes, bytes | None]:
    """`split_payload` for one nested deeper than a decoder goes; there are versions that stored such."""
    found = members(payload)
    return found["d"], found.get("m")
