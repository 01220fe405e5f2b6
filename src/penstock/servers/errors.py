"""Error responses of the `/v0` API: a status, a code, a message and an optional detail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.errors import (
    InvalidInput,
    LimitExceeded,
    PermissionDenied,
    Unavailable,
    public_text,
)
from penstock.http import HeaderList, Refusal, Request, Response
from penstock.topics import TopicError

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


def error_response(
    code: str, message: str, detail: Mapping[str, object] | None = None, headers: HeaderList = ()
) -> Response:
    """Return the error body of the API with the status of `code`."""
    error: dict[str, object] = {"code": code, "message": message}
    if detail is not None:
        error["detail"] = detail
    status = STATUS[code]
    if status in (429, 503):
        headers = [*headers, _RETRY_AFTER]
    return Response(status, _ENCODE({"error": error}), headers=headers)


def told(error: Exception) -> str:
    """Return the text of an error for clients: without paths of this machine, which are only logged."""
    text = public_text(error)
    if text != str(error):
        _LOG.warning("%s: %s", type(error).__name__, error)
    return text


def response_to(error: Exception, request: Request | None = None) -> Response:
    """Return the response for an error; unexpected errors are logged and reported as `internal`."""
    if isinstance(error, Refusal):
        return error_response(error.code, str(error), error.detail, error.headers)
    if isinstance(error, TopicError):
        if STATUS.get(error.code, 500) == 500:
            _LOG.error("%s: %s", type(error).__name__, error)
        return error_response(
            error.code if error.code in STATUS else "internal", public_text(error), error.detail
        )
    if isinstance(error, Unavailable | PermissionDenied):
        # A full disk, or an unreachable store: nothing was applied, and the fault may pass.
        _LOG.warning("%s: %s", type(error).__name__, error)
        return error_response("not_ready", public_text(error))
    if isinstance(error, InvalidInput | LimitExceeded):
        return error_response("invalid_request", public_text(error))
    _LOG.error("a request failed", exc_info=error)
    return error_response("internal", "the server failed; see its log")
