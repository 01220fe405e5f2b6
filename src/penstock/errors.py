"""Every error Penstock raises, by what the caller should do about it.

    PenstockError
    ├── Rejected            do not retry: the request itself is wrong
    │   ├── InvalidInput        a value breaks a rule of the format or the API
    │   ├── LimitExceeded       a value is well formed but larger than a configured cap
    │   ├── ConfigError         a setting is unknown or has a wrong value
    │   ├── NotFound            the object, file or bucket does not exist
    │   ├── PermissionDenied    the credentials are missing, wrong or too weak
    │   └── Unsupported         the store or the runtime cannot do what is asked
    ├── Unavailable         retry later: nothing was applied, or applying again is harmless
    │   └── StorageFull         the device has no room; retry after space is made
    ├── Conflict            re-read, then retry: somebody else's write came first
    ├── OutcomeUnknown      the write may or may not have been applied: verify, never clean up
    ├── Fenced              stop: a newer owner has taken over
    └── Corrupt             stop and keep the evidence: stored bytes break their own format
        └── MediaError          the device cannot read a part of a file

A room that needs finer names derives them from one of these, so that `except Unavailable`
means the same everywhere.
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
    """The root: catch it to catch everything that Penstock raises on purpose."""

    path: str | None = None
    """The file or directory of this machine that the message names, where the file system raised it."""


class Rejected(PenstockError):
    """The request is wrong as it stands; sending it again will fail again."""


class InvalidInput(Rejected):
    """A value breaks a rule of the format or of the API."""


class LimitExceeded(Rejected):
    """A value is well formed but larger than the cap that protects memory or storage."""


class ConfigError(Rejected):
    """A setting is unknown or has a wrong value; the message names the nearest right one."""


class NotFound(Rejected):
    """The named object, file or bucket does not exist."""


class PermissionDenied(Rejected):
    """The store refused the credentials."""


class Unsupported(Rejected):
    """The store or the runtime cannot do what is asked (for example, conditional writes)."""


class Unavailable(PenstockError):
    """A passing fault: nothing was applied, or applying it again is harmless."""


class StorageFull(Unavailable):
    """The device has no room left; nothing was half-written."""


class Conflict(PenstockError):
    """A conditional write lost: the object is not in the expected state. Re-read and retry.

    `definite` says that the store answered the one request that was sent, so this write was not applied.
    It is False where a repeated request may have met its own first try, and for an answer that decides
    nothing.
    """

    def __init__(self, *args: object, definite: bool = False) -> None:
        super().__init__(*args)
        self.definite = definite


class OutcomeUnknown(PenstockError):
    """A write may have been applied. Verify before acting, and never delete what it may have published."""


class Fenced(PenstockError):
    """A newer owner holds the epoch. Stop; retrying cannot succeed."""


class Corrupt(PenstockError):
    """Stored bytes break their own format. Stop, and keep the bytes as evidence."""


class MediaError(Corrupt):
    """The device cannot read a part of a file: `length` bytes of `path` from `offset` on."""

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
    """What a client of a server may read of an error: its message without absolute paths of the server.

    A path that the file system named is left out wherever it came from. What else looks like one is left out
    too, unless the request is at fault: then it is the client's own text. The log keeps the whole message.
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
