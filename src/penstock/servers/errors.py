"""Errors as the `/v0` contract tells them: a status, a code, a sentence and sometimes a detail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from penstock.errors import (
    InvalidInput,
    LimitExceeded,
    PenstockError,
    PermissionDenied,
    Unavailable,
    public_text,
)
from penstock.http import HeaderList, Response
from penstock.topics import TopicError

__all__ = [
    "Forbidden",
    "MethodNotAllowed",
    "NotAcceptable",
    "PayloadTooLarge",
    "Refusal",
    "Unauthorized",
    "UnknownPath",
    "UnsupportedMediaType",
    "error_response",
    "response_to",
    "told",
]

_LOG = logging.getLogger(__name__)

STATUS: Final = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "topic_not_found": 404,
    "router_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "router_cycle": 409,
    "topic_exists_incompatible": 409,
    "topic_not_empty": 409,
    "not_a_queue": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "topic_full": 422,
    "throttled": 429,
    "internal": 500,
    "not_ready": 503,
    "shutting_down": 503,
}
_RETRY_AFTER: Final = (b"retry-after", b"1")
_ENCODE: Final = msgspec.json.Encoder().encode


class Refusal(PenstockError):
    """The edge refuses a request before it reaches the engine."""

    code: ClassVar[str] = "invalid_request"

    def __init__(
        self, message: str, detail: Mapping[str, object] | None = None, headers: HeaderList = ()
    ) -> None:
        super().__init__(message)
        self.detail = detail
        self.headers = headers


class Unauthorized(Refusal):
    """No key, or one that is not known."""

    code = "unauthorized"


class Forbidden(Refusal):
    """The key is known and may not do this."""

    code = "forbidden"


class UnknownPath(Refusal):
    """Nothing is at this path."""

    code = "not_found"


class MethodNotAllowed(Refusal):
    """The path takes other methods."""

    code = "method_not_allowed"


class NotAcceptable(Refusal):
    """The client does not take the only form there is."""

    code = "not_acceptable"


class PayloadTooLarge(Refusal):
    """The body is above its cap."""

    code = "payload_too_large"


class UnsupportedMediaType(Refusal):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"


def error_response(
    code: str, message: str, detail: Mapping[str, object] | None = None, headers: HeaderList = ()
) -> Response:
    """The error body of the contract under the code's status."""
    error: dict[str, object] = {"code": code, "message": message}
    if detail is not None:
        error["detail"] = detail
    status = STATUS[code]
    if status in (429, 503):
        headers = [*headers, _RETRY_AFTER]
    return Response(status, _ENCODE({"error": error}), headers=headers)


def told(error: Exception) -> str:
    """What a client reads of an error. What is left out, a path of this machine, is in the log."""
    text = public_text(error)
    if text != str(error):
        _LOG.warning("%s: %s", type(error).__name__, error)
    return text


def response_to(error: Exception) -> Response:
    """What a client is told about an error; what nobody expected is logged and told as `internal`."""
    if isinstance(error, Refusal):
        return error_response(error.code, str(error), error.detail, error.headers)
    if isinstance(error, TopicError):
        if STATUS.get(error.code, 500) == 500:
            _LOG.error("%s: %s", type(error).__name__, error)
        return error_response(
            error.code if error.code in STATUS else "internal", public_text(error), error.detail
        )
    if isinstance(error, Unavailable | PermissionDenied):
        # A full disk, a store that does not answer or has no credentials: nothing was applied, it may pass.
        _LOG.warning("%s: %s", type(error).__name__, error)
        return error_response("not_ready", public_text(error))
    if isinstance(error, InvalidInput | LimitExceeded):
        return error_response("invalid_request", public_text(error))
    _LOG.error("a request failed", exc_info=error)
    return error_response("internal", "the server failed; its log says why")
