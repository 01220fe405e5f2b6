"""The errors of Quiver, grouped by how the caller should respond.

Unavailable
  AtCapacity         the buffer is full: retry after `retry_after_s`
  Locked             another process has the directory open
Rejected
  Closed             the buffer is closed
  UnknownSubscriber  no subscriber is registered under that name
Conflict
  StaleClaim         the claim had ended; another consumer may have claimed the bundle
"""

from __future__ import annotations

from penstock.errors import Conflict, NotFound, Rejected, Unavailable
from penstock.storage import LockHeld


class AtCapacity(Unavailable):
    """Nothing was accepted: a cap is reached, and freeing space would drop unprocessed data."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Locked(LockHeld):
    """Another process has the directory open. A directory has one writer at a time."""


class Closed(Rejected):
    """The buffer is closed. Open it again to continue."""


class UnknownSubscriber(NotFound):
    """No subscriber is registered under that name."""


class StaleClaim(Conflict):
    """The claim had already ended, for example because its lease expired. Nothing was recorded."""
