"""The coordinator's errors. Each also derives from a class of `penstock.errors`, which says what to do.

    CoordinatorError
    ├── ApplyError         (Rejected)        this write was refused; its epoch is used up, others continue
    ├── Backpressure       (Unavailable)     no room: the write is in `.write`, send it again later
    │   └── WriteTimeout                     no room within the caller's timeout
    ├── EpochNotAssigned   (InvalidInput)    no write has this epoch yet
    ├── FlushError         (OutcomeUnknown)  a flush failed; everything stopped, its batch may be stored
    │   └── FlushFenced        (Fenced)          because a newer writer owns the database
    ├── Lagged             (Conflict)        a subscriber missed events: rebuild from the snapshot
    └── Shutdown           (Rejected)        the coordinator is closed

Only `FlushError` ends the coordinator.
"""

from __future__ import annotations

from penstock import errors


class CoordinatorError(errors.PenstockError):
    """Anything the coordinator raises on purpose."""


class ApplyError(CoordinatorError, errors.Rejected):
    """The delta refused this write and holds nothing of it. `__cause__` is the reason."""

    def __init__(self, epoch: int, message: str) -> None:
        super().__init__(f"write {epoch} was refused: {message}")
        self.epoch = epoch


class Backpressure(CoordinatorError, errors.Unavailable):
    """There is no room for this write now. Nothing of it was taken; `write` holds it, to send it again."""

    def __init__(self, message: str, write: object) -> None:
        super().__init__(message)
        self.write = write


class WriteTimeout(Backpressure):
    """There was no room before the timeout; nothing of the write was taken."""


class EpochNotAssigned(CoordinatorError, errors.InvalidInput, ValueError):
    """A strict flush names an epoch that no write has yet."""


class FlushError(CoordinatorError, errors.OutcomeUnknown):
    """A flush failed, and the coordinator stopped for good. What was being flushed may be stored.

    The coordinator never retries it: open the database again, which reads what is stored.
    """


class FlushFenced(FlushError, errors.Fenced):
    """The flush failed because a newer writer has taken the database over. Stop."""


class Lagged(CoordinatorError, errors.Conflict):
    """A subscriber was too slow and `missed` events were dropped.

    The next event brings the newest snapshot.
    """

    def __init__(self, missed: int) -> None:
        super().__init__(f"{missed} events were dropped: rebuild from the snapshot of the next one")
        self.missed = missed


class Shutdown(CoordinatorError, errors.Rejected):
    """The coordinator is closed, or was stopped before this call could be answered."""


def flush_error(doing: str, cause: BaseException) -> FlushError:
    """Return the fatal error for `cause`, which occurred while `doing`."""
    kind = FlushFenced if isinstance(cause, errors.Fenced) else FlushError
    error = kind(f"{doing} failed, and the coordinator has stopped: {str(cause) or type(cause).__name__}")
    error.__cause__ = cause
    return error
