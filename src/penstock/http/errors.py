"""Errors of HTTP requests that no handler sees. Each API has its own response body for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.errors import PenstockError
from penstock.http.message import Fault, HeaderList


class Refusal(PenstockError):
    """The request is rejected before it reaches the engine."""

    code: str = "invalid_request"

    def __init__(
        self, message: str, detail: Mapping[str, object] | None = None, headers: HeaderList = ()
    ) -> None:
        super().__init__(message)
        self.detail = detail
        self.headers = headers


class Unauthorized(Refusal):
    """The key is missing or unknown."""

    code = "unauthorized"


class Forbidden(Refusal):
    """The key is known but lacks the permission."""

    code = "forbidden"


class UnknownPath(Refusal):
    """The path does not exist."""

    code = "not_found"


class MethodNotAllowed(Refusal):
    """The path exists but does not support this method."""

    code = "method_not_allowed"


class NotAcceptable(Refusal):
    """The client does not accept the only available content type."""

    code = "not_acceptable"


class PayloadTooLarge(Refusal):
    """The body is larger than its limit."""

    code = "payload_too_large"


class UnsupportedMediaType(Refusal):
    """The body has an unsupported type or encoding."""

    code = "unsupported_media_type"


class TransportFault(Refusal):
    """A request rejected by the transport; `fault` states which limit or rule it breaks."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.code = _CODES[fault]


_CODES: Final = {
    Fault.MALFORMED: "invalid_request",
    Fault.TOO_LARGE: "payload_too_large",
    Fault.OVERLOADED: "throttled",
    Fault.FORBIDDEN: "forbidden",
}
