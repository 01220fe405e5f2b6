"""The coordinator's errors. Each also derives from the class in `penstock.errors` that says how to handle it.

    CoordinatorError
    ├── ApplyError         (Rejected)        this write was refused; its epoch is consumed, others continue
    ├── Backpressure       (Unavailable)     no room: send the write in `.write` again later
    │   └── WriteTimeout                     no room within the caller's timeout
    ├── EpochNotAssigned   (InvalidInput)    no write has this epoch yet
    ├── FlushError         (OutcomeUnknown)  a flush failed, its batch may be stored; the coordinator stops
    │   └── FlushFenced        (Fenced)          because a newer writer owns the database
    ├── Lagged             (Conflict)        a subscriber missed events: rebuild from the snapshot
    └── Shutdown           (Rejected)        the coordinator is closed

Only `FlushError` ends the coordinator.
"""

from __future__ import annotations

from penstock import errors


class CoordinatorError(errors.PenstockError):
    """Base class of the coordinator's errors."""


class ApplyError(CoordinatorError, errors.Rejected):
    """The delta refused this write and holds no part of it. `__cause__` is the reason."""

    def __init__(self, epoch: int, message: str) -> None:
        super().__init__(f"write {epoch} was refused: {message}")
        self.epoch = epoch


class Backpressure(CoordinatorError, errors.Unavailable):
    """There is no room for this write now. It was not queued; send `write` again later."""

    def __init__(self, message: str, write: object) -> None:
        super().__init__(message)
        self.write = write


class WriteTimeout(Backpressure):
    """There was no room before the timeout. The write was not queued."""


class EpochNotAssigned(CoordinatorError, errors.InvalidInput, ValueError):
    """A strict flush named an epoch that no write has yet."""


class FlushError(CoordinatorError, errors.OutcomeUnknown):
    """A flush failed, and the coordinator stopped permanently. The delta being flushed may be stored.

    The coordinator never retries it. Open the database again to read its stored state.
    """


class FlushFenced(FlushError, errors.Fenced):
    """The flush failed because a newer writer has taken over the database. Stop writing."""


class Lagged(CoordinatorError, errors.Conflict):
    """A subscriber was too slow and `missed` events were dropped.

    The next event brings the newest snapshot.
    """

    def __init__(self, missed: int) -> None:
        super().__init__(f"{missed} events were dropped: rebuild from the snapshot of the next one")
        self.missed = missed


class Shutdown(CoordinatorError, errors.Rejected):
    """The coordinator is closed, or it stopped before this call completed."""


def flush_error(doing: str, cause: BaseException) -> FlushError:
    """Return the fatal error for `cause`, which occurred while `doing`."""
    kind = FlushFenced if isinstance(cause, errors.Fenced) else FlushError
    error = kind(f"{doing} failed, and the coordinator has stopped: {str(cause) or type(cause).__name__}")
    error.__cause__ = cause
    return error
