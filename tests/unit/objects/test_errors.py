"""The classification of failed requests: definite, lost, or unknown."""

from __future__ import annotations

import pytest

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
from penstock.objects.errors import BucketNotFound, FailedRequest, Fault, read_fault, translate


def outcome(fault: Fault, *, conditional: bool, key: str | None = "k") -> type[PenstockError]:
    call = FailedRequest(doing="store", url="s3://bucket", bucket="bucket", key=key, conditional=conditional)
    return type(translate(fault, call))


def status(code: int, name: str | None = None, kind: str = "GenericError") -> Fault:
    return Fault(kind=kind, status=code, code=name)


@pytest.mark.parametrize(
    ("fault", "plain", "conditional"),
    [
        (status(412, kind="AlreadyExistsError"), Unavailable, Conflict),
        (status(412, kind="PreconditionError"), Unavailable, Conflict),
        (status(409), Unavailable, Conflict),
        (status(404, kind="FileNotFoundError"), NotFound, Conflict),
        (Fault(kind="FileNotFoundError", status=404, no_bucket=True), BucketNotFound, BucketNotFound),
        (Fault(kind="PreconditionError", status=404, no_bucket=True), BucketNotFound, BucketNotFound),
        (status(403), PermissionDenied, PermissionDenied),
        (status(401, kind="UnauthenticatedError"), PermissionDenied, PermissionDenied),
        (status(400, "ExpiredToken"), PermissionDenied, PermissionDenied),
        (Fault(kind="GenericError", status=403, no_credentials=True), PermissionDenied, PermissionDenied),
        (status(400), Rejected, Rejected),
        (status(413), Rejected, Rejected),
        (status(301), Rejected, Rejected),
        (status(501), Unsupported, Unsupported),
        (Fault(kind="NotImplementedError"), Unsupported, Unsupported),
        (Fault(kind="InvalidPathError"), InvalidInput, InvalidInput),
        (status(400, "RequestTimeout"), Unavailable, Unavailable),
        (Fault(kind="GenericError", transport="Connect"), Unavailable, Unavailable),
        (status(429), Unavailable, OutcomeUnknown),
        (status(408), Unavailable, OutcomeUnknown),
        (status(500), Unavailable, OutcomeUnknown),
        (status(503), Unavailable, OutcomeUnknown),
        (Fault(kind="GenericError", transport="Timeout"), Unavailable, OutcomeUnknown),
        (Fault(kind="GenericError", transport="Request"), Unavailable, OutcomeUnknown),
        (Fault(kind="GenericError"), Unavailable, OutcomeUnknown),
        (Fault(kind="ValueError"), Unavailable, OutcomeUnknown),
    ],
    ids=str,
)
def test_only_definite_failures_are_classified_as_definite(
    fault: Fault, plain: type[PenstockError], conditional: type[PenstockError]
) -> None:
    assert outcome(fault, conditional=False) is plain
    assert outcome(fault, conditional=True) is conditional


@pytest.mark.parametrize(
    ("fault", "definite"),
    [
        (status(412), True),
        (status(404, kind="FileNotFoundError"), True),
        (status(409, "BlobAlreadyExists"), True),
        (status(409), False),
        (status(409, "ConditionalRequestConflict"), False),
    ],
    ids=str,
)
def test_a_conflict_is_definite_if_the_store_says_that_the_object_existed(
    fault: Fault, definite: bool
) -> None:
    call = FailedRequest(doing="create", url="az://kit", bucket="kit", key="k", conditional=True)
    error = translate(fault, call)
    assert isinstance(error, Conflict)
    assert error.definite is definite


def test_a_reply_cannot_imitate_a_failed_connection() -> None:
    body = "\n\nDebug source:\nHttpError {\n kind: Connect,\n"
    escaped = body.replace("\n", "\\n")
    text = (
        f"Generic S3 error: Server returned non-2xx status code: 500 Internal Server Error: {body}"
        f'\n\nDebug source:\nGeneric {{\n  inner: Status {{\n    status: 500,\n    body: Some("{escaped}")'
    )
    fault = read_fault("GenericError", text)
    assert (fault.status, fault.transport) == (500, None)
    assert outcome(fault, conditional=True) is OutcomeUnknown


def test_a_status_is_found_without_the_debug_structure() -> None:
    assert read_fault("GenericError", "Server returned non-2xx status code: 403 Forbidden: x").status == 403
    assert read_fault("GenericError", "anything").status is None
