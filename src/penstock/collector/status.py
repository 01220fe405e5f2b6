"""The responses of receivers to errors over gRPC and HTTP: status, message and retry delay. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from penstock import errors
from penstock.quiver import Closed

RETRY_AFTER_S: Final = 1.0
"""The retry delay for an error that specifies none."""


class Draining(errors.Unavailable):
    """The collector is stopping and accepts no requests."""


class Unauthorized(errors.PermissionDenied):
    """A token is missing or invalid. Other missing permissions concern our own disk access."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The response to a refused request: gRPC code, HTTP status, message, and retry delay."""

    code: str
    status: int
    message: str
    retry_after_s: float | None = None


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal for an error raised by a consumer.

    A transient error never becomes a 500, which clients must not retry. A request that is too large is
    refused permanently, so it has no delay. Messages of our own errors are meant for the client; messages of
    bugs are not.
    """
    message = errors.public_text(error)
    if isinstance(error, Closed):
        words = "the collector is stopping"
        return Refusal(code="UNAVAILABLE", status=503, message=words, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, errors.LimitExceeded):
        return Refusal(code="RESOURCE_EXHAUSTED", status=413, message=message)
    if isinstance(error, errors.Unsupported):
        return Refusal(code="UNIMPLEMENTED", status=415, message=message)
    if isinstance(error, Unauthorized):
        return Refusal(code="UNAUTHENTICATED", status=401, message=message)
    if isinstance(error, errors.InvalidInput):
        return Refusal(code="INVALID_ARGUMENT", status=400, message=message)
    if isinstance(error, errors.Unavailable | errors.Conflict | errors.OutcomeUnknown):
        return Refusal(code="UNAVAILABLE", status=503, message=message, retry_after_s=_hint(error))
    if isinstance(error, errors.PenstockError):
        # The disk or the directory has a problem, not the request. Another collector, or this one after a
        # restart, may accept it.
        words = "the collector cannot store at the moment"
        return Refusal(code="UNAVAILABLE", status=503, message=words, retry_after_s=RETRY_AFTER_S)
    return Refusal(code="INTERNAL", status=500, message="an internal error of the collector; see its log")


def _hint(error: BaseException) -> float:
    for name in ("retry_after_s", "retry_after"):
        hint = getattr(error, name, None)
        if isinstance(hint, int | float) and not isinstance(hint, bool) and hint > 0:
            return float(hint)
    return RETRY_AFTER_S


DETAILS_TRAILER: Final = "grpc-status-details-bin"
RETRY_TRAILER: Final = "google.rpc.retryinfo-bin"
"""The trailer that some SDKs read instead of the details."""
_HINT_MAX_S: Final = 3600.0
"""The limit of a delay, so that a mistake of the destination does not stop us for a year."""


def retry_trailers(code: str, message: str, wait_s: float) -> tuple[tuple[str, bytes], ...]:
    """Return the delay in both trailers that clients read."""
    return (
        (DETAILS_TRAILER, status_bytes(code, message, wait_s)),
        (RETRY_TRAILER, _retry_info(wait_s).SerializeToString()),
    )


def status_bytes(code: str, message: str, wait_s: float | None = None) -> bytes:
    """Return a serialized `Status`, with `RetryInfo` or `BadRequest` where they apply."""
    return bytes(_status(code, message, wait_s).SerializeToString())


def status_json(code: str, message: str, wait_s: float | None = None) -> bytes:
    """Return the status as JSON."""
    text = json_format.MessageToJson(_status(code, message, wait_s), indent=None)
    return str(text).encode()


def retry_after_of_trailers(trailers: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Return the delay that the trailers of a call request in either place, or None."""
    found: list[float] = []
    for key, value in trailers:
        data = value.encode() if isinstance(value, str) else value
        try:
            if key == RETRY_TRAILER:
                found += _waits([error_details_pb2.RetryInfo.FromString(data)])
            elif key == DETAILS_TRAILER:
                found += _waits(_retry_infos(status_pb2.Status.FromString(data)))
        except DecodeError:
            continue
    return max(found, default=None)


def retry_after_s(value: str | None, now_ms: int) -> float | None:
    """Return a `Retry-After` header, a number or a date, as seconds from now, or None if it is invalid."""
    text = (value or "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return min(float(text[:12]), _HINT_MAX_S)
    try:
        at = parsedate_to_datetime(text)
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except ValueError:
        return None
    return min(max(0.0, at.timestamp() - now_ms / 1000), _HINT_MAX_S)


def message_of(body: bytes) -> str:
    """Return the message of an error response if its body is a `Status`, otherwise an empty string."""
    try:
        return str(status_pb2.Status.FromString(body).message[:500])
    except DecodeError:
        return ""


def _status(code: str, message: str, wait_s: float | None) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    if code == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if wait_s is not None:
        status.details.add().Pack(_retry_info(wait_s))
    return status


def _retry_info(wait_s: float) -> error_details_pb2.RetryInfo:
    whole = math.floor(wait_s)
    return error_details_pb2.RetryInfo(
        retry_delay=Duration(seconds=whole, nanos=min(int((wait_s - whole) * 1e9), 999_999_999))
    )


def _retry_infos(status: status_pb2.Status) -> Iterable[error_details_pb2.RetryInfo]:
    for detail in status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            yield info


def _waits(infos: Iterable[error_details_pb2.RetryInfo]) -> list[float]:
    return [
        min(max(0.0, info.retry_delay.seconds + info.retry_delay.nanos / 1e9), _HINT_MAX_S) for info in infos
    ]
