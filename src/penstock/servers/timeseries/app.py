"""Requests and errors in Prometheus' format; OTLP errors as a `Status` message."""

from __future__ import annotations

import logging
import zlib
from typing import Final
from urllib.parse import parse_qs

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock import otlp
from penstock.coordinator import Shutdown
from penstock.errors import Corrupt, InvalidInput, LimitExceeded, PenstockError
from penstock.http import (
    JSON,
    Fault,
    HeaderList,
    Refusal,
    Request,
    Response,
    TransportFault,
    UnsupportedMediaType,
)
from penstock.http import Call as HttpCall
from penstock.protowire import varint
from penstock.servers.database import RETRY
from penstock.servers.errors import STATUS, told
from penstock.timeseries import Answer, OtlpSeries, Parameters, error_answer, series_of_metrics

PROTOBUF: Final = b"application/x-protobuf"
_MEMBERS_MAX: Final = 100
"""Each member of a gzip body costs a copy of the rest."""


def is_json(request: Request) -> bool:
    """Return whether the client sends JSON."""
    return _content_type(request) == JSON


def is_packed(request: Request) -> bool:
    """Return whether the body is gzip. Raise `UnsupportedMediaType` for an unknown type or encoding."""
    if _content_type(request) not in (JSON, PROTOBUF, b""):
        raise UnsupportedMediaType("send OTLP as application/x-protobuf or application/json")
    encoding = request.headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity", b"gzip"):
        raise UnsupportedMediaType(f"content-encoding {encoding.decode('ascii', 'replace')!r}: send gzip")
    return encoding == b"gzip"


def claimed_size(packed: bytes, bytes_max: int) -> int:
    """Return the size that the last member of a gzip body declares: an untrusted first estimate."""
    return max(len(packed), min(int.from_bytes(packed[-4:], "little"), bytes_max))


def unpacked(packed: bytes, bytes_max: int) -> bytes:
    """Decompress all members of a gzip body. Raise `InvalidInput` or `LimitExceeded`."""
    body = b""
    for _ in range(_MEMBERS_MAX):
        unpacking = zlib.decompressobj(wbits=31)
        try:
            body += unpacking.decompress(packed, bytes_max - len(body) + 1)
        except zlib.error as error:
            raise InvalidInput(f"the body is not gzip: {error}") from None
        if len(body) > bytes_max:
            raise LimitExceeded(f"the body unpacks to more than {bytes_max:,} bytes")
        if not unpacking.eof:
            raise InvalidInput("the gzip body is truncated")
        packed = unpacking.unused_data
        if not packed:
            return body
    raise InvalidInput(f"the gzip body has more than {_MEMBERS_MAX} members")


def otlp_series(body: bytes, *, json: bool) -> OtlpSeries:
    """Return the series of a request. Raise `InvalidInput` or `LimitExceeded`."""
    message = ExportMetricsServiceRequest()
    try:
        message.ParseFromString(otlp.from_json(body, otlp.Signal.METRICS) if json else body)
    except DecodeError as error:
        raise InvalidInput(f"the body is not an OTLP metrics request: {error}") from None
    return series_of_metrics(message)


def _content_type(request: Request) -> bytes:
    return request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


OTLP_PATH: Final = b"/v1/metrics"
REMOTE_WRITE_PATH: Final = b"/api/v1/write"
_UNKNOWN: Final = 2
_CODES: Final = {
    400: 3,
    401: 16,
    403: 7,
    404: 5,
    405: 12,
    413: 8,
    415: 3,
    422: 9,
    429: 8,
    500: 13,
    503: 14,
}
"""The `google.rpc` codes by HTTP status."""


def status_response(status: int, message: str, request: Request, headers: HeaderList) -> Response:
    """Return the response to a failed OTLP request."""
    code = _CODES.get(status, _UNKNOWN)
    if is_json(request):
        body = msgspec.json.encode({"code": code, "message": message})
        return Response(status, body, content_type=JSON, headers=headers)
    return Response(status, _status(code, message.encode()), content_type=PROTOBUF, headers=headers)


def _status(code: int, message: bytes) -> bytes:
    """Encode a `Status`: field 1 is the code, field 2 the message. This avoids a dependency."""
    return b"\x08" + varint(code) + b"\x12" + varint(len(message)) + message


_LOG = logging.getLogger(__name__)
_FORM: Final = b"application/x-www-form-urlencoded"
_FAILED: Final = "the server failed; see its log"
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
        """Return the parameters of the query and of a form body. Raise `InvalidInput`."""
        parts = [self.request.query_text]
        if self.request.headers.get(b"content-type", b"").partition(b";")[0].strip() == _FORM:
            parts.insert(0, self.request.body)
        try:
            text = b"&".join(part for part in parts if part).decode("ascii")
            return parse_qs(text, keep_blank_values=True, max_num_fields=10_000, errors="strict")
        except ValueError as error:
            raise InvalidInput(f"the parameters cannot be read: {error}") from None


def response_to(error: Exception, request: Request | None) -> Response:
    """Return the response for an error."""
    if isinstance(error, Corrupt) and request is not None and request.path in _SENDERS:
        # Senders drop a write that gets 500, but the damage is in the storage, not in the write.
        _LOG.error("a write failed", exc_info=error)
        return _in_client_format(_error(503, "unavailable", told(error)), told(error), request)
    return _in_client_format(_refusal(error), _message(error), request)


def response_of(answer: Answer) -> Response:
    """Convert an answer of the API to a response; add Retry-After to 503."""
    headers = [RETRY] if answer.status == 503 else []
    return Response(answer.status, answer.body, content_type=answer.content_type.encode(), headers=headers)


def _in_client_format(response: Response, message: str, request: Request | None) -> Response:
    """Convert an error to the format that the client reads."""
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
        # Not the sender's fault, and the next server will accept it: senders retry after a 503.
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
