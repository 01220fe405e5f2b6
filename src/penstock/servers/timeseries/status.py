"""Errors as OTLP clients read them: a `google.rpc.Status`, in protobuf or in JSON, as the request was."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.http import JSON, HeaderList, Request, Response
from penstock.servers.timeseries.bodies import PROTOBUF, is_json

__all__ = ["OTLP_PATH", "REMOTE_WRITE_PATH", "status_response"]

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
"""The codes of `google.rpc` by the status that they are sent with."""


def status_response(status: int, message: str, request: Request, headers: HeaderList) -> Response:
    """The answer to an OTLP request that failed."""
    code = _CODES.get(status, _UNKNOWN)
    if is_json(request):
        body = msgspec.json.encode({"code": code, "message": message})
        return Response(status, body, content_type=JSON, headers=headers)
    return Response(status, _status(code, message.encode()), content_type=PROTOBUF, headers=headers)


def _status(code: int, message: bytes) -> bytes:
    """Field 1 is the code, field 2 the message: not worth a package of messages."""
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(message)) + message


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
