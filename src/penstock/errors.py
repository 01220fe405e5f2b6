"""Every error Penstock raises, grouped by how the caller should react.

    PenstockError
    ├── Rejected            do not retry: the request itself is wrong
    │   ├── InvalidInput        a value breaks a rule of the format or the API
    │   ├── LimitExceeded       a value is well formed but larger than a configured cap
    │   ├── ConfigError         a setting is unknown or has a wrong value
    │   ├── NotFound            the object, file or bucket does not exist
    │   ├── PermissionDenied    the credentials are missing, wrong or too weak
    │   └── Unsupported         the store or the runtime lacks a required feature
    ├── Unavailable         retry later: nothing was applied, or applying again is harmless
    │   └── StorageFull         the device has no room; retry after space is made
    ├── Conflict            re-read, then retry: another write came first
    ├── OutcomeUnknown      the write may or may not have been applied: verify, never clean up
    ├── Fenced              stop: a newer owner has taken over
    └── Corrupt             stop and keep the evidence: stored bytes break their own format
        └── MediaError          the device cannot read a part of a file

A package that needs more specific errors derives them from one of these, so that `except Unavailable`
has the same meaning everywhere.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "ConfigError",
    "Conflict",
    "Corrupt",
    "Fenced",
    "InvalidInput",
    "LimitExceeded",
    "MediaError",
    "NotFound",
    "OutcomeUnknown",
    "PenstockError",
    "PermissionDenied",
    "Rejected",
    "StorageFull",
    "Unavailable",
    "Unsupported",
    "public_text",
]


class PenstockError(Exception):
    """The base class of every error that Penstock raises deliberately."""

    path: str | None = None
    """The local file or directory in the message, set if the file system raised the error."""


class Rejected(PenstockError):
    """The request is wrong; sending it again will fail again."""


class InvalidInput(Rejected):
    """A value breaks a rule of the format or of the API."""


class LimitExceeded(Rejected):
    """A value is well formed but larger than the cap that protects memory or storage."""


class ConfigError(Rejected):
    """A setting is unknown or has a wrong value; the message suggests the closest valid one."""


class NotFound(Rejected):
    """The named object, file or bucket does not exist."""


class PermissionDenied(Rejected):
    """The store refused the credentials."""


class Unsupported(Rejected):
    """The store or the runtime lacks a required feature, such as conditional writes."""


class Unavailable(PenstockError):
    """A temporary fault: nothing was applied, or applying it again is harmless."""


class StorageFull(Unavailable):
    """The device has no room left; nothing was half-written."""


class Conflict(PenstockError):
    """A conditional write lost: the object is not in the expected state. Re-read and retry.

    `definite` is True if the store answered the only request that was sent, so this write was not applied.
    It is False if a retry may have conflicted with its own first attempt, or if the answer does not decide
    the outcome.
    """

    def __init__(self, *args: object, definite: bool = False) -> None:
        super().__init__(*args)
        self.definite = definite


class OutcomeUnknown(PenstockError):
    """A write may have been applied. Verify before acting, and never delete data that it may reference."""


class Fenced(PenstockError):
    """A newer owner holds the epoch. Stop; retrying cannot succeed."""


class Corrupt(PenstockError):
    """Stored bytes break their own format. Stop, and keep the bytes as evidence."""


class MediaError(Corrupt):
    """The device cannot read part of a file: `length` bytes of `path` starting at `offset`."""

    def __init__(self, path: str, offset: int, length: int, reason: str) -> None:
        super().__init__(
            f"cannot read {path}, bytes {offset} to {offset + length}: {reason}; "
            "keep the file, and check the device"
        )
        self.path = path
        self.offset = offset
        self.length = length


_CAUSES_MAX: Final = 16
_PLACE: Final = "a file of the server"
_ROUTE: Final = (
    r"(?:v0/(?:topics|watch|ws|routers|health|ready|metrics)|v1/(?:traces|metrics|logs))(?![\w.-])"
)
_PATH: Final = re.compile(
    r"file:/{2,3}[^\s'\"`,;:()]+"
    rf"|(?:(?<![\w./:>~-])|(?<=:)(?!//))/(?!{_ROUTE})[^\s'\"`,;:()]+"
)
"""A path after a space, a quote or a colon, but no URL and no route of a server's own."""


def public_text(error: BaseException) -> str:
    """Return the message of an error without absolute paths of the server, safe to send to a client.

    Paths reported by the file system are always replaced. Other text that looks like a path is replaced too,
    except in a `Rejected` error, where it is the client's own text. The log keeps the full message.
    """
    text = str(error)
    seen: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if seen is None:
            break
        path = getattr(seen, "path", None)
        if isinstance(path, str) and path.startswith("/"):
            text = text.replace(path, _PLACE)
        seen = seen.__cause__ or seen.__context__
    return text if isinstance(error, Rejected) else _PATH.sub(_PLACE, text)
