"""What Quiver refuses, by what the caller should do about it.

Unavailable   AtCapacity          the buffer is full: try again after `retry_after_s`
              Locked              another process has the directory open
Rejected      Closed              the buffer was closed
              UnknownSubscriber   nobody registered that name
Conflict      StaleClaim          the claim ended before it was resolved; the bundle is somebody else's now
"""

from __future__ import annotations

from penstock.errors import Conflict, NotFound, Rejected, Unavailable
from penstock.storage import LockHeld


class AtCapacity(Unavailable):
    """Nothing was taken: a cap is reached, and making room would lose data that nobody has processed."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Locked(LockHeld):
    """Another process has the directory open; it has one writer at a time."""


class Closed(Rejected):
    """The buffer was closed; open it again."""


class UnknownSubscriber(NotFound):
    """Nobody registered a subscriber of that name."""


class StaleClaim(Conflict):
    """The claim ended before it was resolved, by its lease or otherwise; nothing was recorded."""
