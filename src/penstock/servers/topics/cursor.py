"""The cursor of a list: standard base64 of `{"after":"<last name>"}`."""

from __future__ import annotations

import base64
import binascii

import msgspec

from penstock.topics import InvalidRequest

__all__ = ["read_cursor", "write_cursor"]


class _Cursor(msgspec.Struct):
    after: str


def write_cursor(after: str) -> str:
    return base64.b64encode(msgspec.json.encode(_Cursor(after))).decode()


def read_cursor(text: str) -> str:
    """The name to go on after; an empty cursor is the beginning. Raises `InvalidRequest`."""
    if not text:
        return ""
    try:
        return msgspec.json.decode(base64.b64decode(text, validate=True), type=_Cursor).after
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        raise InvalidRequest("the cursor is not one that this server gave out") from None
