"""Requests and errors of the vector API, in the kind of JSON that the client speaks."""

from __future__ import annotations

import logging
from typing import Final

from penstock.coordinator import FlushError, Shutdown
from penstock.errors import Corrupt, Fenced, NotFound, Rejected, Unavailable
from penstock.http import Call as HttpCall
from penstock.http import Fault, HeaderList, Refusal, Request, Response, TransportFault
from penstock.servers.database_app import RETRY
from penstock.servers.errors import STATUS, told
from penstock.vector import error_answer

_LOG = logging.getLogger(__name__)

PROTOBUF_JSON: Final = b"application/protobuf+json"
JSON: Final = b"application/json"
_FAULTS: Final = {Fault.MALFORMED: 400, Fault.TOO_LARGE: 413, Fault.FORBIDDEN: 403}


class Call(HttpCall):
    """One admitted request."""

    __slots__ = ()

    def answer(self, status: int, body: bytes, headers: HeaderList = ()) -> Response:
        """An answer of the type that the client speaks: plain JSON to whoever sends or asks for that."""
        return Response(status, body, content_type=_spoken(self.request), headers=headers)


def _spoken(request: Request) -> bytes:
    told = request.headers.get(b"content-type", b"") + b"," + request.headers.get(b"accept", b"")
    return JSON if JSON in told.lower() else PROTOBUF_JSON


def response_to(error: Exception, request: Request | None) -> Response:
    """What a client is told about an error."""
    spoken = PROTOBUF_JSON if request is None else _spoken(request)
    if isinstance(error, TransportFault):
        return _error(_FAULTS.get(error.fault, 503), str(error), spoken)
    if isinstance(error, Refusal):
        return _error(STATUS[error.code], str(error), spoken, error.headers)
    if isinstance(error, Unavailable | Shutdown | Fenced):
        # Not the sender's fault, and whoever serves next will take it: senders come again on 503.
        return _error(503, told(error), spoken)
    if isinstance(error, NotFound):
        return _error(404, told(error), spoken)
    if isinstance(error, Rejected):
        return _error(400, told(error), spoken)
    _LOG.error("a request failed", exc_info=error)
    message = (
        told(error) if isinstance(error, FlushError | Corrupt) else "the server failed; its log says why"
    )
    return _error(500, message, spoken)


def _error(status: int, message: str, spoken: bytes, headers: HeaderList = ()) -> Response:
    told = [*headers, RETRY] if status in (429, 503) else headers
    return Response(status, error_answer(message), content_type=spoken, headers=told)
