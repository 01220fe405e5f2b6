"""The protobuf messages of the three services, and the one error that bytes which are none end in.

The request as nested Arrow in one native call, through ptars and a descriptor of our own.

OTLP's `AnyValue` contains itself, which no Arrow type can. The descriptor here says that arrays and maps are
bytes, which is what they look like on the wire, so they arrive serialized and everything else in columns.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.otlp.limits import check_density, check_item_count
from penstock.otlp.schema import Signal

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


_OPAQUE: Final = ("array_value", "kvlist_value")


class Handler(Protocol):
    """What of ptars is used."""

    def list_to_record_batch(self, payloads: list[bytes], /) -> pa.RecordBatch:
        """Messages as rows. Raises `ValueError` for bytes that are none."""

    def record_batch_to_array(self, batch: pa.RecordBatch, /) -> pa.Array:
        """Rows as messages."""

    def schema(self) -> pa.Schema:
        """The columns of a message."""


@cache
def available() -> bool:
    """Whether the quick way is installed."""
    return importlib.util.find_spec("ptars") is not None


@cache
def handler_of(signal: Signal) -> Handler:
    """The converter of requests of `signal`."""
    from google.protobuf.descriptor_pool import DescriptorPool
    from ptars import HandlerPool

    pool = DescriptorPool()
    _copy_file(messages_of(signal).request.DESCRIPTOR.file, pool, set())
    slim = pool.FindMessageTypeByName(messages_of(signal).request.DESCRIPTOR.full_name)
    handler: Handler = HandlerPool([slim.file]).get_for_message(slim)
    return handler


def _copy_file(file: object, pool: object, done: set[str]) -> None:
    """Add `file` and what it imports to `pool`, with the fields that make values recursive as bytes."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

    name: str = file.name  # type: ignore[attr-defined]
    if name in done:
        return
    done.add(name)
    for dependency in file.dependencies:  # type: ignore[attr-defined]
        _copy_file(dependency, pool, done)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)  # type: ignore[attr-defined]
    for message in copy.message_type:
        for field in message.field:
            if message.name == "AnyValue" and field.name in _OPAQUE:
                field.type = FieldDescriptorProto.TYPE_BYTES
                field.ClearField("type_name")
    pool.Add(copy)  # type: ignore[attr-defined]
