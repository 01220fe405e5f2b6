"""Bodies of OTLP requests: protobuf or JSON, packed or not."""

from __future__ import annotations

import zlib
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock import otlp
from penstock.errors import InvalidInput, LimitExceeded
from penstock.http import JSON, Request, UnsupportedMediaType
from penstock.timeseries import OtlpSeries, series_of_metrics

__all__ = ["PROTOBUF", "claimed_size", "is_json", "is_packed", "otlp_series", "unpacked"]

PROTOBUF: Final = b"application/x-protobuf"
_MEMBERS_MAX: Final = 100
"""Each member of a gzip body costs a copy of what is behind it."""


def is_json(request: Request) -> bool:
    """Whether the client speaks JSON."""
    return _content_type(request) == JSON


def is_packed(request: Request) -> bool:
    """Whether the body is gzip. Raises `UnsupportedMediaType` for a type or a packing that is not known."""
    if _content_type(request) not in (JSON, PROTOBUF, b""):
        raise UnsupportedMediaType("OTLP comes as application/x-protobuf or application/json")
    encoding = request.headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity", b"gzip"):
        raise UnsupportedMediaType(f"content-encoding {encoding.decode('ascii', 'replace')!r}: send gzip")
    return encoding == b"gzip"


def claimed_size(packed: bytes, bytes_max: int) -> int:
    """How much a gzip body says that its last member unpacks to: nothing to rely on, but a start."""
    return max(len(packed), min(int.from_bytes(packed[-4:], "little"), bytes_max))


def unpacked(packed: bytes, bytes_max: int) -> bytes:
    """All members of a gzip body one behind the other. Raises `InvalidInput` and `LimitExceeded`."""
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
            raise InvalidInput("the body is gzip that was cut short")
        packed = unpacking.unused_data
        if not packed:
            return body
    raise InvalidInput(f"the body is gzip of more than {_MEMBERS_MAX} members")


def otlp_series(body: bytes, *, json: bool) -> OtlpSeries:
    """The series of a request. Raises `InvalidInput` and `LimitExceeded`."""
    message = ExportMetricsServiceRequest()
    try:
        message.ParseFromString(otlp.from_json(body, otlp.Signal.METRICS) if json else body)
    except DecodeError as error:
        raise InvalidInput(f"the body is not an OTLP metrics request: {error}") from None
    return series_of_metrics(message)


def _content_type(request: Request) -> bytes:
    return request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
