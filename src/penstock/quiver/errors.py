"""The errors of Quiver, by what the caller should do about them.

Unavailable AtCapacity the buffer is full: try again after `retry_after_s` Locked another process has the
directory open Rejected Closed the buffer was closed UnknownSubscriber no subscriber is registered under that
name Conflict StaleClaim the claim ended before it was resolved; the bundle may be claimed by another consumer
"""

from __future__ import annotations

from penstock.errors import Conflict, NotFound, Rejected, Unavailable
from penstock.storage import LockHeld


class AtCapacity(Unavailable):
    """Nothing was accepted: a cap is reached, and freeing space would drop data that is not processed."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Locked(LockHeld):
    """Another process has the directory open; it has one writer at a time."""


class Closed(Rejected):
    """The buffer was closed; open it again."""


class UnknownSubscriber(NotFound):
    """No subscriber is registered under that name."""


class StaleClaim(Conflict):
    """The claim ended before it was resolved, by its lease or otherwise; nothing was recorded."""
