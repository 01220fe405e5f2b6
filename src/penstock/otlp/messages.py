"""The protobuf messages of the three OTLP services: parsing, counting, refusing items, and responses.

`handler_of` converts a request to nested Arrow in one native call, through ptars. It uses modified
descriptors, because Arrow cannot represent those of OTLP:

- `AnyValue` contains itself. Arrays and maps are declared as bytes, which matches their wire format.
- ptars does not write -0.0 in a field whose default is 0.0. These fields are declared `optional`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from penstock.errors import InvalidInput, Unsupported
from penstock.otlp.limits import check_density, check_item_count
from penstock.otlp.schema import Signal

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto
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
    """The request and response messages of one service."""

    request: type[Request]
    response: type[Response]


@cache
def messages_of(signal: Signal) -> Messages:
    """Return the messages of `signal`, imported on first use. Raise `Unsupported` without the extra."""
    try:
        return _import_messages(signal)
    except ModuleNotFoundError as error:
        raise _missing(error) from error


def _missing(error: ModuleNotFoundError) -> Unsupported:
    return Unsupported(f"OTLP needs the package {error.name}: pip install 'penstock[collector]'")


def _import_messages(signal: Signal) -> Messages:
    if signal is Signal.TRACES:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace

        return Messages(trace.ExportTraceServiceRequest, trace.ExportTraceServiceResponse)
    if signal is Signal.METRICS:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics

        return Messages(metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse)
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs

    return Messages(logs.ExportLogsServiceRequest, logs.ExportLogsServiceResponse)


def parse(data: bytes, signal: Signal) -> Request:
    """Parse a request.

    Raise `InvalidInput` for bytes that are not a request, and `LimitExceeded` for too many items or small
    parts.
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
            f"the body is not an {kind.DESCRIPTOR.name}: {error or 'it does not parse as protobuf'}"
        ) from error


def count_items(data: bytes, signal: Signal) -> int:
    """Count the spans, data points or log records of a request. Raise as `parse` does."""
    return items_in(parse(data, signal), signal)


def items_in(request: Request, signal: Signal) -> int:
    """Count the items of a parsed request."""
    return sum(map(len, _item_lists(request, signal)))


TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8


class Refusals:
    """The number of refused items in one request, and the reason for the first one."""

    def __init__(self, items: str) -> None:
        self.count = 0
        self._items = items
        self._first = ""

    def refuse(self, faults: Iterable[str | None]) -> bool:
        """Return whether `faults` contains a fault. If so, count the item as refused."""
        for fault in faults:
            if fault is not None:
                self.count += 1
                self._first = self._first or fault
                return True
        return False

    @property
    def message(self) -> str:
        """The reason to report to the sender, or an empty string if nothing was refused."""
        return f"{self.count} {self._items} refused: {self._first}" if self.count else ""


def remove_refused(request: Request, signal: Signal) -> Refusals:
    """Remove the items of a parsed request that have an id of a wrong length, and report them."""
    refusals = Refusals(ITEM_NAMES[signal])
    faults_of = _FAULTS[signal]
    for items in _item_lists(request, signal):
        refused = [place for place, item in enumerate(items) if refusals.refuse(faults_of(item))]
        for place in reversed(refused):
            del items[place]
    return refusals


def _item_lists(request: Any, signal: Signal) -> Iterator[Any]:
    if signal is Signal.TRACES:
        yield from (scope.spans for resource in request.resource_spans for scope in resource.scope_spans)
    elif signal is Signal.LOGS:
        yield from (scope.log_records for resource in request.resource_logs for scope in resource.scope_logs)
    else:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if (kind := metric.WhichOneof("data")) is not None:
                        yield getattr(metric, kind).data_points


def id_fault(name: str, value: bytes, length: int) -> str | None:
    """Return the fault of an id, or None. An empty id counts as absent and is valid."""
    if not value or len(value) == length:
        return None
    return f"{name} has {len(value)} bytes, expected {length}"


def _faults_of_span(span: Any) -> Iterator[str | None]:
    yield id_fault("trace_id", span.trace_id, TRACE_ID_BYTES)
    yield id_fault("span_id", span.span_id, SPAN_ID_BYTES)
    yield id_fault("parent_span_id", span.parent_span_id, SPAN_ID_BYTES)
    for link in span.links:
        yield id_fault("trace_id of a link", link.trace_id, TRACE_ID_BYTES)
        yield id_fault("span_id of a link", link.span_id, SPAN_ID_BYTES)


def _faults_of_log_record(record: Any) -> Iterator[str | None]:
    yield id_fault("trace_id", record.trace_id, TRACE_ID_BYTES)
    yield id_fault("span_id", record.span_id, SPAN_ID_BYTES)


def _faults_of_point(point: Any) -> Iterator[str | None]:
    for exemplar in getattr(point, "exemplars", ()):  # points of summaries have none
        yield id_fault("trace_id of an exemplar", exemplar.trace_id, TRACE_ID_BYTES)
        yield id_fault("span_id of an exemplar", exemplar.span_id, SPAN_ID_BYTES)


_FAULTS: Final[dict[Signal, Callable[[Any], Iterator[str | None]]]] = {
    Signal.TRACES: _faults_of_span,
    Signal.LOGS: _faults_of_log_record,
    Signal.METRICS: _faults_of_point,
}

_REJECTED: Final = {
    Signal.TRACES: "rejected_spans",
    Signal.METRICS: "rejected_data_points",
    Signal.LOGS: "rejected_log_records",
}


def response(signal: Signal, rejected: int = 0, message: str = "", *, json: bool = False) -> bytes:
    """Build the response to a request, in protobuf, or in OTLP's JSON if `json` is true.

    `partial_success` is set only if items were rejected or there is a message.
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
    """The part of a ptars handler that this package uses."""

    def list_to_record_batch(self, payloads: list[bytes], /) -> pa.RecordBatch:
        """Convert messages to rows. Raise `ValueError` for bytes that do not parse."""

    def record_batch_to_array(self, batch: pa.RecordBatch, /) -> pa.Array:
        """Convert rows to messages."""

    def schema(self) -> pa.Schema:
        """Return the columns of a message."""


def check_installed() -> None:
    """Raise `Unsupported` unless the packages for decoding and encoding are installed."""
    handler_of(Signal.LOGS)


@cache
def handler_of(signal: Signal) -> Handler:
    """Return the native converter for requests of `signal`. Raise `Unsupported` without the extra."""
    messages = messages_of(signal)
    try:
        from google.protobuf.descriptor_pool import DescriptorPool
        from ptars import HandlerPool
    except ModuleNotFoundError as error:
        raise _missing(error) from error

    pool = DescriptorPool()
    _copy_file(messages.request.DESCRIPTOR.file, pool, set())
    descriptor = pool.FindMessageTypeByName(messages.request.DESCRIPTOR.full_name)
    handler: Handler = HandlerPool([descriptor.file]).get_for_message(descriptor)
    return handler


def _copy_file(file: object, pool: object, done: set[str]) -> None:
    """Add `file` and its imports to `pool`, modified as described in the module docstring."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    name: str = file.name  # type: ignore[attr-defined]
    if name in done:
        return
    done.add(name)
    for dependency in file.dependencies:  # type: ignore[attr-defined]
        _copy_file(dependency, pool, done)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)  # type: ignore[attr-defined]
    for message in copy.message_type:
        _adapt_message(message)
    pool.Add(copy)  # type: ignore[attr-defined]


def _adapt_message(message: DescriptorProto) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    for field in message.field:
        if message.name == "AnyValue" and field.name in _OPAQUE:
            field.type = FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")
        is_single_double = (
            field.type == FieldDescriptorProto.TYPE_DOUBLE
            and field.label == FieldDescriptorProto.LABEL_OPTIONAL
        )
        if is_single_double and not field.HasField("oneof_index"):
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")
    for nested in message.nested_type:
        _adapt_message(nested)
