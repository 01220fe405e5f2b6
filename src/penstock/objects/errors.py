"""The classification of a remote store's failures.

The functions are pure and use only the class and the text of an error. The text may contain signed URLs, so
messages include only the HTTP status and the store's error code from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    Rejected,
    Unavailable,
    Unsupported,
)

_STATUS: Final = re.compile(r"inner: Status \{\s+status: (\d{3})")
_STATUS_TEXT: Final = re.compile(r"status code: (\d{3})")
_KIND: Final = re.compile(r"HttpError \{\s+kind: (\w+)")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_CREDENTIALS: Final = re.compile(r"TokenRequest|https?://169\.254\.|/latest/api/token")
_NO_BUCKET: Final = re.compile(
    r"<Code>(NoSuchBucket|ContainerNotFound)</Code>|specified (bucket|container) does not exist"
)
_BAD_KEYS: Final = frozenset(
    {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch"}
)
_DENIED: Final = frozenset({401, 403, 407})
_NOT_DEFINITE: Final = frozenset({408, 425, 429})


class BucketNotFound(NotFound):
    """The whole bucket is missing, not only the object, so the object cannot be created either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The facts about a failed request that its error shows."""

    kind: str
    status: int | None = None
    code: str | None = None
    transport: str | None = None
    """The kind of connection failure: `Connect` means that the request was never sent."""
    no_bucket: bool = False
    no_credentials: bool = False
    beyond_end: bool = False
    plain_http: bool = False

    def __str__(self) -> str:
        if self.status is not None:
            return f"HTTP {self.status}" + (f" {self.code}" if self.code else "")
        return {"Connect": "no connection", "Timeout": "no reply in time"}.get(
            self.transport or "", "the connection broke" if self.transport else self.kind
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The request that failed, as its error message describes it."""

    doing: str
    url: str
    bucket: str
    key: str | None = None
    conditional: bool = False

    def __str__(self) -> str:
        return (
            f"cannot {self.doing} {self.key} in {self.url}" if self.key else f"cannot {self.doing} {self.url}"
        )


def read_fault(kind: str, text: str) -> Fault:
    """Parse an error. Trust only its own structure, because the reply of a server may imitate it."""
    _, found, structure = text.rpartition("\n\nDebug source:\n")
    status = _STATUS.search(structure) if found else _STATUS_TEXT.search(text)
    transport = _KIND.search(structure)
    code = _CODE.search(text)
    return Fault(
        kind=kind,
        status=int(status[1]) if status else None,
        code=code[1] if code else None,
        transport=transport[1] if transport else None,
        no_bucket=bool(_NO_BUCKET.search(text)),
        beyond_end="source: StartTooLarge" in structure,
        no_credentials=bool(_CREDENTIALS.search(structure)),
        plain_http="source: BadScheme" in structure,
    )


def is_not_modified(fault: Fault) -> bool:
    """Return whether the object still has the given version."""
    return fault.kind == "NotModifiedError" or fault.status == 304


def is_beyond_end(fault: Fault) -> bool:
    """Return whether the range starts at or after the end of the object."""
    return fault.status == 416 or fault.beyond_end


def is_not_partial(text: str) -> bool:
    """Return whether the server sent the whole object, as some do for a range of an empty one."""
    return "source: NotPartial" in text


def translate(fault: Fault, call: FailedRequest) -> PenstockError:
    """Return the error to raise.

    For a conditional write it is `OutcomeUnknown` unless the failure is known to be definite.
    """
    return (
        _refused(fault, call)
        or _not_sent(fault, call)
        or _missing(fault, call)
        or _lost(fault, call)
        or _rejected(fault, call)
        or _unknown(fault, call)
    )


def _refused(fault: Fault, call: FailedRequest) -> PenstockError | None:
    if fault.no_credentials:
        return PermissionDenied(
            f"{call}: no credentials found; set them in the options or in the environment"
        )
    denied = fault.kind in ("PermissionDeniedError", "UnauthenticatedError") or fault.status in _DENIED
    if not denied and fault.code not in _BAD_KEYS:
        return None
    hint = {
        "ExpiredToken": "renew the session token",
        "RequestTimeTooSkewed": "set this machine's clock",
    }.get(fault.code or "", "check the access key, the secret and their permissions on this bucket")
    return PermissionDenied(f"{call}: the store refused the credentials ({fault}); {hint}")


def _not_sent(fault: Fault, call: FailedRequest) -> PenstockError | None:
    if fault.plain_http:
        return Rejected(f"{call}: the endpoint is plain HTTP; use https or set the option allow_http")
    if fault.transport == "Connect":
        return Unavailable(f"{call}: nothing listens at its endpoint; check the address and the network")
    if fault.kind == "InvalidPathError":
        return InvalidInput(
            f"{call}: the store does not accept this key; use letters, digits, '-', '_', '.' and '/'"
        )
    return None


def _missing(fault: Fault, call: FailedRequest) -> PenstockError | None:
    if fault.no_bucket:
        return BucketNotFound(f"{call}: bucket {call.bucket!r} does not exist; create it or correct the url")
    absent = fault.kind in ("FileNotFoundError", "NotFoundError") or fault.status == 404
    if not absent or (call.conditional and call.key):
        return None
    if call.key is None:
        return BucketNotFound(f"{call}: bucket {call.bucket!r} was not found; create it or correct the url")
    return NotFound(f"{call.key} does not exist in {call.url}")


def _lost(fault: Fault, call: FailedRequest) -> PenstockError | None:
    if not call.conditional:
        return None
    known = ("AlreadyExistsError", "PreconditionError", "FileNotFoundError", "NotFoundError")
    if fault.kind not in known and fault.status not in (404, 409, 412):
        return None
    # Conditional writes are sent once. A 409 means that two writes arrived at the same moment, so it is not
    # definite, unless Azure reports with it that the blob already existed.
    return Conflict(
        f"{call}: it is not in the expected state ({fault}); read it again",
        definite=fault.status in (404, 412) or fault.code == "BlobAlreadyExists",
    )


def _rejected(fault: Fault, call: FailedRequest) -> PenstockError | None:
    if fault.kind in ("NotSupportedError", "NotImplementedError") or fault.status == 501:
        return Unsupported(f"{call}: the store cannot do this ({fault}); use one with conditional writes")
    if fault.status in (301, 307, 308):
        return Rejected(f"{call}: the bucket is elsewhere ({fault}); set the option region or endpoint")
    if fault.code == "RequestTimeout":
        return Unavailable(f"{call}: the upload stalled ({fault}); check the network, then try again")
    if fault.status is None or not 400 <= fault.status < 500 or fault.status in _NOT_DEFINITE:
        return None
    if fault.status in (409, 412):
        return None
    return Rejected(f"{call}: the store rejected the request ({fault}); check the url and the options")


def _unknown(fault: Fault, call: FailedRequest) -> PenstockError:
    if call.conditional:
        return OutcomeUnknown(
            f"{call}: it may or may not have been stored ({fault}); read it again to find out"
        )
    return Unavailable(f"{call}: {fault}; check the store and the network, then try again")
