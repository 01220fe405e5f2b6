"""Refusals of requests by HTTP itself, before any handler. Each API has its own error body for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.errors import PenstockError
from penstock.http.message import Fault, HeaderList


class Refusal(PenstockError):
    """A request is refused before it reaches the engine."""

    code: str = "invalid_request"

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
    """The body is not of a type that is read here."""

    code = "unsupported_media_type"


class TransportFault(Refusal):
    """The transport refuses a request; `fault` says which limit or rule it breaks."""

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
