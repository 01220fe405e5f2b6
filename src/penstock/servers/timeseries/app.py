"""Requests as Prometheus' clients make them, and errors in Prometheus' envelope; OTLP's in a `Status`."""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import parse_qs

import msgspec

from penstock.coordinator import Shutdown
from penstock.errors import Corrupt, InvalidInput, PenstockError
from penstock.http import Call as HttpCall
from penstock.http import Fault, HeaderList, Refusal, Request, Response, TransportFault
from penstock.servers.database_app import RETRY
from penstock.servers.errors import STATUS, told
from penstock.servers.timeseries.status import OTLP_PATH, REMOTE_WRITE_PATH, status_response
from penstock.timeseries import Answer, Parameters, error_answer

_LOG = logging.getLogger(__name__)
_FORM: Final = b"application/x-www-form-urlencoded"
_FAILED: Final = "the server failed; its log says why"
_SENDERS: Final = (REMOTE_WRITE_PATH, OTLP_PATH)
_FAULTS: Final = {
    Fault.MALFORMED: (400, "bad_data"),
    Fault.TOO_LARGE: (413, "bad_data"),
    Fault.FORBIDDEN: (403, "forbidden"),
}


class Call(HttpCall):
    """One admitted request."""

    __slots__ = ()

    def parameters(self) -> Parameters:
        """Of the query and, if the body is a form, of that too. Raises `InvalidInput`."""
        parts = [self.request.query_text]
        if self.request.headers.get(b"content-type", b"").partition(b";")[0].strip() == _FORM:
            parts.insert(0, self.request.body)
        try:
            text = b"&".join(part for part in parts if part).decode("ascii")
            return parse_qs(text, keep_blank_values=True, max_num_fields=10_000, errors="strict")
        except ValueError as error:
            raise InvalidInput(f"the parameters cannot be read: {error}") from None


def response_to(error: Exception, request: Request | None) -> Response:
    """What a client is told about an error."""
    if isinstance(error, Corrupt) and request is not None and request.path in _SENDERS:
        # Senders drop what is answered with 500, and the damage is in the storage, not in what they send.
        _LOG.error("a write failed", exc_info=error)
        return _spoken(_error(503, "unavailable", told(error)), told(error), request)
    return _spoken(_refusal(error), _message(error), request)


def response_of(answer: Answer) -> Response:
    """An answer of the API as a response; 503 says when to come back."""
    headers = [RETRY] if answer.status == 503 else []
    return Response(answer.status, answer.body, content_type=answer.content_type.encode(), headers=headers)


def _spoken(response: Response, message: str, request: Request | None) -> Response:
    """The same in what the client reads."""
    if request is None or request.path != OTLP_PATH:
        return response
    return status_response(response.status, message, request, response.headers)


def _message(error: Exception) -> str:
    return told(error) if isinstance(error, PenstockError) else _FAILED


def _refusal(error: Exception) -> Response:
    if isinstance(error, TransportFault):
        status, kind = _FAULTS.get(error.fault, (503, "unavailable"))
        return _error(status, kind, str(error))
    if isinstance(error, Refusal):
        status = STATUS[error.code]
        return _error(status, error.code if status != 400 else "bad_data", str(error), error.headers)
    if isinstance(error, Shutdown):
        # Not the sender's fault, and whoever serves next will take it: senders come again on 503.
        return _error(503, "unavailable", told(error))
    if isinstance(error, PenstockError):
        answer = error_answer(error)
        if answer.status == 500:
            _LOG.error("a request failed", exc_info=error)
        return response_of(answer)
    _LOG.error("a request failed", exc_info=error)
    return _error(500, "internal", _FAILED)


def _error(status: int, kind: str, message: str, headers: HeaderList = ()) -> Response:
    body = msgspec.json.encode({"status": "error", "errorType": kind, "error": message})
    return Response(status, body, headers=[*headers, RETRY] if status in (429, 503) else headers)
