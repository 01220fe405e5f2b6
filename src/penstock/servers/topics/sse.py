"""The format of server-sent events: text frames, and the ids from which clients resume."""

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
    """Encode one event. JSON has no line breaks, so its data is a single line."""
    if ident is None:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (ident, name, data)


def write_id(cursors: Mapping[str, int]) -> bytes:
    """Encode a client's position in every topic as the id of an event."""
    text = b"{%b}" % b",".join(b"%b:%d" % (quoted(name), seq) for name, seq in sorted(cursors.items()))
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def read_id(ident: bytes) -> dict[str, int]:
    """Decode an id from `write_id`; return an empty dict for any other id."""
    try:
        text = base64.b64decode(ident + b"=" * (-len(ident) % 4), b"-_", validate=True)
        return {name: seq for name, seq in _CURSORS.decode(text).items() if seq >= 0}
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return {}


def check_accepts_events(accept: bytes | None) -> None:
    """Raise `NotAcceptable` for a client that does not accept events."""
    if accept is not None and EVENTS not in accept and b"*/*" not in accept:
        raise NotAcceptable("the response is an event stream: accept text/event-stream")
