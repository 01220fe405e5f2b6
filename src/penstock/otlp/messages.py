"""The protobuf messages of the three services, and the one error that bytes which are none end in."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from penstock.errors import InvalidInput
from penstock.otlp.density import check_density
from penstock.otlp.item_cap import check_item_count
from penstock.otlp.signal import Signal

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
        ExportLogsServiceRequest,
        ExportLogsServiceResponse,
    )
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    Request: TypeAlias = ExportTraceServiceRequest | ExportMetricsServiceRequest | ExportLogsServiceRequest
    Response: TypeAlias = (
        ExportTraceServiceResponse | ExportMetricsServiceResponse | ExportLogsServiceResponse
    )

__all__ = ["ITEM_NAMES", "Messages", "count_items", "items_in", "messages_of", "parse", "response"]

ITEM_NAMES: Final = {Signal.TRACES: "spans", Signal.METRICS: "data points", Signal.LOGS: "log records"}


class Messages(NamedTuple):
    """The request and the response of one service."""

    request: type[Request]
    response: type[Response]


@cache
def messages_of(signal: Signal) -> Messages:
    """The messages of `signal`; they are imported when they are first asked for."""
    if signal is Signal.TRACES:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace

        return Messages(trace.ExportTraceServiceRequest, trace.ExportTraceServiceResponse)
    if signal is Signal.METRICS:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics

        return Messages(metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse)
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs

    return Messages(logs.ExportLogsServiceRequest, logs.ExportLogsServiceResponse)


def parse(data: bytes, signal: Signal) -> Request:
    """The request in `data`.

    Raises `InvalidInput` for bytes that are none, and `LimitExceeded` for one with too many items or parts.
    """
    from google.protobuf.message import DecodeError

    check_density(data)
    check_item_count(data, signal)
    kind = messages_of(signal).request
    try:
        request: Request = kind.FromString(data)
        return request
    except (DecodeError, RecursionError) as error:
        raise InvalidInput(
            f"the body is no {kind.DESCRIPTOR.name}: {error or 'it does not parse as protobuf'}"
        ) from error


def count_items(data: bytes, signal: Signal) -> int:
    """How many spans, data points or log records a request holds. Raises `InvalidInput`."""
    return items_in(parse(data, signal), signal)


def items_in(request: Request, signal: Signal) -> int:
    """How many items a parsed request holds."""
    message: Any = request
    if signal is Signal.TRACES:
        return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)
    if signal is Signal.LOGS:
        return sum(
            len(scope.log_records) for resource in message.resource_logs for scope in resource.scope_logs
        )
    return sum(
        len(getattr(metric, kind).data_points)
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if (kind := metric.WhichOneof("data")) is not None
    )


_REJECTED: Final = {
    Signal.TRACES: "rejected_spans",
    Signal.METRICS: "rejected_data_points",
    Signal.LOGS: "rejected_log_records",
}


def response(signal: Signal, rejected: int = 0, message: str = "", *, json: bool = False) -> bytes:
    """The answer to a request: `partial_success` is set only when something was refused or is to be told.

    In protobuf, or in the protocol's JSON when `json` is true.
    """
    answer = messages_of(signal).response()
    if rejected or message:
        setattr(answer.partial_success, _REJECTED[signal], rejected)
        answer.partial_success.error_message = message
    if not json:
        return bytes(answer.SerializeToString())
    from google.protobuf.json_format import MessageToJson

    return str(MessageToJson(answer, indent=None)).encode()
