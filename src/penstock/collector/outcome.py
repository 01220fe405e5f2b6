"""The outcomes of exports, derived from the destination's response as the protocol defines it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from penstock.otlp import Signal


class Verdict(enum.Enum):
    """The decision about a bundle after an attempt to send it."""

    ACK = "ack"
    RETRY = "retry"
    REJECT = "reject"


class AuthErrors(enum.StrEnum):
    """The treatment of authentication errors: a transient fault of the destination, or a rejection."""

    RETRY = "retry"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one attempt."""

    verdict: Verdict
    reason: str = ""
    retry_after_s: float | None = None
    """The minimum wait that the destination requests."""
    rejected_items: int = 0
    """The number of refused items in a request that the destination accepted."""
    is_down: bool = False
    """Whether the whole destination is unreachable, not only this request."""


_GRPC_RETRY: Final = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
_GRPC_DOWN: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
_GRPC_AUTH: Final = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_HTTP_RETRY: Final = frozenset({429, 502, 503, 504})
_HTTP_AUTH: Final = frozenset({401, 403})


def delivered(*, rejected_items: int = 0, message: str = "") -> Outcome:
    """Return the outcome of an accepted request. A partial success is never sent again."""
    return Outcome(verdict=Verdict.ACK, reason=message, rejected_items=rejected_items)


def refused(reason: str) -> Outcome:
    """Return the outcome of a request that is never sent again, because it would be refused again."""
    return Outcome(verdict=Verdict.REJECT, reason=reason)


def unreachable(reason: str) -> Outcome:
    """Return the outcome of a connection that failed or broke before the response."""
    return Outcome(verdict=Verdict.RETRY, reason=reason, is_down=True)


def after_grpc(code: str, message: str, hint_s: float | None, auth_errors: AuthErrors) -> Outcome:
    """Return the outcome of a call that ended with the status named `code`."""
    reason = f"{code}: {message}" if message else code
    if code in _GRPC_RETRY:
        return Outcome(verdict=Verdict.RETRY, reason=reason, retry_after_s=hint_s, is_down=code in _GRPC_DOWN)
    if code == "RESOURCE_EXHAUSTED" and hint_s is not None:
        return Outcome(verdict=Verdict.RETRY, reason=reason, retry_after_s=hint_s, is_down=True)
    if code in _GRPC_AUTH and auth_errors is AuthErrors.RETRY:
        return Outcome(verdict=Verdict.RETRY, reason=reason, retry_after_s=hint_s, is_down=True)
    return refused(reason)


def after_http(status: int, message: str, hint_s: float | None, auth_errors: AuthErrors) -> Outcome:
    """Return the outcome of a response with a status other than success."""
    reason = f"HTTP {status}: {message}" if message else f"HTTP {status}"
    retried = status in _HTTP_RETRY or (status in _HTTP_AUTH and auth_errors is AuthErrors.RETRY)
    if not retried:
        return refused(reason)
    return Outcome(verdict=Verdict.RETRY, reason=reason, retry_after_s=hint_s, is_down=True)


_TAKEN = delivered()


def outcome_of_response(data: bytes, signal: Signal) -> Outcome:
    """Return the outcome of a successful response. A response that cannot be decoded is still a success."""
    if not data:
        return _TAKEN
    try:
        rejected, message = _partial(data, signal)
    except DecodeError:
        return _TAKEN
    return delivered(rejected_items=rejected, message=message) if rejected or message else _TAKEN


def _partial(data: bytes, signal: Signal) -> tuple[int, str]:
    if signal is Signal.TRACES:
        spans = ExportTraceServiceResponse.FromString(data).partial_success
        return spans.rejected_spans, spans.error_message
    if signal is Signal.METRICS:
        points = ExportMetricsServiceResponse.FromString(data).partial_success
        return points.rejected_data_points, points.error_message
    records = ExportLogsServiceResponse.FromString(data).partial_success
    return records.rejected_log_records, records.error_message
