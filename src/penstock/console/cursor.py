"""Where a client of a stream stands: the header of a reconnect, or `?after=` in the address."""

from __future__ import annotations

from penstock.console.app import Call

__all__ = ["last_id"]


def last_id(call: Call) -> int | None:
    """The last id that the client has; None if it begins, or says something else."""
    header = call.request.headers.get(b"last-event-id", b"").decode("ascii", "replace")
    for text in (header, call.query.get("after", "")):
        if text.isascii() and text.isdigit() and len(text) <= 19:
            return int(text)
    return None
