"""Object keys: their normal form, and a check for characters that not every client reads back unchanged."""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidInput, LimitExceeded
from penstock.limits import KEY_BYTES_MAX

FORBIDDEN_CHARACTERS: Final = frozenset('\\{^}%`]">[~<#|*?')
"""Other clients encode these once when writing and again when reading, and then do not find the key."""


def normalise_key(text: str) -> str:
    """Return the normal form of a key: `/`-joined, without a leading slash or empty segments.

    Raise `InvalidInput` for a forbidden character, a `.` or `..` segment or an empty key, and `LimitExceeded`
    for a key longer than `KEY_BYTES_MAX` bytes.
    """
    key = check_prefix(text)
    if not key:
        raise InvalidInput(
            f"object key {text!r} is empty; give it at least one segment, such as 'ingest/manifest'"
        )
    return key


def check_prefix(text: str) -> str:
    """Return the normal form of a folder, without outer slashes. "" is the whole store.

    Raise the same errors as `normalise_key`, except for an empty folder.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"an object key is a str, not {type(text).__name__}")
    segments = [segment for segment in text.split("/") if segment]
    _check_segments(text, segments)
    key = "/".join(segments)
    _check_length(key)
    return key


def join_key(*parts: str) -> str:
    """Join parts, each a key or a folder, into a key."""
    return normalise_key("/".join(parts))


def _check_segments(text: str, segments: list[str]) -> None:
    for character in text:
        if character in FORBIDDEN_CHARACTERS:
            raise InvalidInput(
                f"object key {text!r} contains {character!r}, which some clients cannot read back; "
                f"use letters, digits, '-', '_', '.', '=' and '/'"
            )
        if ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0:
            raise InvalidInput(f"object key {text!r} contains the control character {character!r}; remove it")
        if 0xD800 <= ord(character) < 0xE000:
            raise InvalidInput(
                f"object key {text!r} contains {character!r}, half of a character; keys are valid UTF-8"
            )
    for segment in segments:
        if segment in (".", ".."):
            raise InvalidInput(
                f"object key {text!r} contains the segment {segment!r}; keys are not relative paths"
            )


def _check_length(key: str) -> None:
    size = len(key.encode())
    if size > KEY_BYTES_MAX:
        raise LimitExceeded(
            f"object key {key[:40]!r}... has {size} bytes; every store accepts {KEY_BYTES_MAX}, and no more"
        )
