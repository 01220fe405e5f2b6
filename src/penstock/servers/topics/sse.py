"""The format of server-sent events: frames of text, and the ids that clients resume from."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.http import NotAcceptable
from penstock.servers.topics.subscription import quoted

HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
RETRY: Final = b"retry: 2000\n\n"
EVENTS: Final = b"text/event-stream"
_CURSORS: Final = msgspec.json.Decoder(dict[str, int])


def event(name: bytes, data: bytes, ident: bytes | None = None) -> bytes:
    """One frame. JSON has no line breaks, so its data is one line."""
    if ident is None:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (ident, name, data)


def write_id(cursors: Mapping[str, int]) -> bytes:
    """Encode the position of a client in every topic as the id of an event."""
    text = b"{%b}" % b",".join(b"%b:%d" % (quoted(name), seq) for name, seq in sorted(cursors.items()))
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def read_id(ident: bytes) -> dict[str, int]:
    """Decode what `write_id` wrote; empty for an id from elsewhere."""
    try:
        text = base64.b64decode(ident + b"=" * (-len(ident) % 4), b"-_", validate=True)
        return {name: seq for name, seq in _CURSORS.decode(text).items() if seq >= 0}
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return {}


def check_accepts_events(accept: bytes | None) -> None:
    """Raises `NotAcceptable` for a client that does not take events."""
    if accept is not None and EVENTS not in accept and b"*/*" not in accept:
        raise NotAcceptable("this is a stream of events: accept text/event-stream")
