"""Conversion of columns to one request, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.otlp.columns import changes
from penstock.otlp.messages import messages_of
from penstock.otlp.schema import (
    BOOL,
    BYTES,
    DOUBLE,
    EMPTY,
    INT,
    METRIC_COLUMNS,
    POINT_TYPES,
    RESOURCE_COLUMNS,
    SCOPE_COLUMNS,
    STR,
    Signal,
)

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
    from google.protobuf.message import Message
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

    from penstock.otlp.messages import Request

_LEAVES: Final = {STR: "str", INT: "int", DOUBLE: "double", BOOL: "bool", BYTES: "bytes"}
_FIELDS: Final = {
    STR: "string_value",
    INT: "int_value",
    DOUBLE: "double_value",
    BOOL: "bool_value",
    BYTES: "bytes_value",
}


class ValueReader:
    """A reader of values of any kind that writes them into messages."""

    def __init__(self, column: pa.StructArray) -> None:
        valid = column.is_valid().to_pylist()
        self._kinds = [
            kind if there else None
            for kind, there in zip(column.field("type").to_pylist(), valid, strict=True)
        ]
        self._leaves: dict[int, list[object]] = {}
        for kind, name in _LEAVES.items():
            if kind in self._kinds:
                self._leaves[kind] = column.field(name).to_pylist()
        self._serialized: list[bytes] = column.field("ser").to_pylist()

    def has(self, place: int) -> bool:
        """Return whether there is a value."""
        return self._kinds[place] is not None

    def fill(self, place: int, value: AnyValue) -> None:
        """Write the value at `place` into its own message."""
        kind = self._kinds[place]
        if kind in self._leaves:
            setattr(value, _FIELDS[kind], self._leaves[kind][place])
        elif kind == EMPTY or self._serialized[place] is None:
            value.SetInParent()
        else:
            value.MergeFromString(self._serialized[place])


class AttributeReader:
    """A reader of attributes, row by row."""

    def __init__(self, column: pa.MapArray) -> None:
        offsets = np.asarray(column.offsets, np.int64)
        start, length = int(offsets[0]), int(offsets[-1] - offsets[0])
        self._offsets: list[int] = (offsets - start).tolist()
        self._keys: list[str] = column.keys.slice(start, length).to_pylist()
        self._values = ValueReader(column.items.slice(start, length))

    def fill(self, row: int, pairs: RepeatedCompositeFieldContainer[KeyValue]) -> None:
        """Write the attributes of `row` into a message."""
        for place in range(self._offsets[row], self._offsets[row + 1]):
            pair = pairs.add()
            pair.key = self._keys[place]
            if self._values.has(place):
                self._values.fill(place, pair.value)


class ListReader:
    """A reader of lists of structs, row by row: the places of a row, and the fields' cells by place."""

    def __init__(self, column: pa.ListArray) -> None:
        offsets = np.asarray(column.offsets, np.int64)
        start, length = int(offsets[0]), int(offsets[-1] - offsets[0])
        self._offsets: list[int] = (offsets - start).tolist()
        self.structs: pa.StructArray = column.values.slice(start, length)

    def places(self, row: int) -> range:
        """Return the places of the list of `row`."""
        return range(self._offsets[row], self._offsets[row + 1])


def nanoseconds(column: pa.TimestampArray) -> list[int]:
    """Return times as the protocol represents them: unsigned, with 0 for an unknown time."""
    found: list[int] = np.asarray(column.cast(pa.int64()).fill_null(0), np.int64).view(np.uint64).tolist()
    return found


_LOG_FIELDS = (
    "severity_number",
    "severity_text",
    "event_name",
    "trace_id",
    "span_id",
    "flags",
    "dropped_attributes_count",
)


class LogFiller:
    """Writes rows of log records into the message of their scope."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._cells = {name: batch.column(name).to_pylist() for name in _LOG_FIELDS}
        self._times = nanoseconds(batch.column("time"))
        self._observed = nanoseconds(batch.column("observed_time"))
        self._bodies = ValueReader(batch.column("body_any"))
        self._attributes = AttributeReader(batch.column("attributes"))

    def add(self, row: int, scope: ScopeLogs, *, is_first: bool) -> None:
        """Add a log record."""
        record = scope.log_records.add()
        for name, cells in self._cells.items():
            if cells[row]:
                setattr(record, name, cells[row])
        record.time_unix_nano, record.observed_time_unix_nano = self._times[row], self._observed[row]
        if self._bodies.has(row):
            self._bodies.fill(row, record.body)
        self._attributes.fill(row, record.attributes)


_SPAN_FIELDS = ("trace_id", "span_id", "parent_span_id", "trace_state", "flags", "name", "kind")
_COUNTS = ("dropped_events_count", "dropped_links_count", "dropped_attributes_count")


class SpanFiller:
    """Writes rows of spans into the message of their scope."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._cells = {name: batch.column(name).to_pylist() for name in (*_SPAN_FIELDS, *_COUNTS)}
        self._starts = nanoseconds(batch.column("start_time"))
        self._ends = nanoseconds(batch.column("end_time"))
        self._codes = batch.column("status_code").to_pylist()
        self._messages = batch.column("status_message").to_pylist()
        self._attributes = AttributeReader(batch.column("attributes"))
        self._events, self._links = _Events(batch.column("events")), _Links(batch.column("links"))

    def add(self, row: int, scope: ScopeSpans, *, is_first: bool) -> None:
        """Add a span."""
        span = scope.spans.add()
        for name, cells in self._cells.items():
            if cells[row]:
                setattr(span, name, cells[row])
        span.start_time_unix_nano, span.end_time_unix_nano = self._starts[row], self._ends[row]
        if self._codes[row] is not None or self._messages[row] is not None:
            span.status.SetInParent()
            span.status.code, span.status.message = self._codes[row] or 0, self._messages[row] or ""
        self._attributes.fill(row, span.attributes)
        self._events.fill(row, span)
        self._links.fill(row, span)


class _Events:
    def __init__(self, column: pa.ListArray) -> None:
        self._lists = ListReader(column)
        structs = self._lists.structs
        self._times = nanoseconds(structs.field("time"))
        self._names = structs.field("name").to_pylist()
        self._dropped = structs.field("dropped").to_pylist()
        self._attributes = AttributeReader(structs.field("attributes"))

    def fill(self, row: int, span: Span) -> None:
        for place in self._lists.places(row):
            event = span.events.add()
            event.time_unix_nano, event.name = self._times[place], self._names[place] or ""
            event.dropped_attributes_count = self._dropped[place] or 0
            self._attributes.fill(place, event.attributes)


class _Links:
    def __init__(self, column: pa.ListArray) -> None:
        self._lists = ListReader(column)
        structs = self._lists.structs
        names = ("trace_id", "span_id", "trace_state", "flags")
        self._cells = {name: structs.field(name).to_pylist() for name in names}
        self._dropped = structs.field("dropped").to_pylist()
        self._attributes = AttributeReader(structs.field("attributes"))

    def fill(self, row: int, span: Span) -> None:
        for place in self._lists.places(row):
            link = span.links.add()
            for name, cells in self._cells.items():
                if cells[place]:
                    setattr(link, name, cells[place])
            link.dropped_attributes_count = self._dropped[place] or 0
            self._attributes.fill(place, link.attributes)


_NUMBERS: Final = (
    "count",
    "sum",
    "min",
    "max",
    "scale",
    "zero_count",
    "zero_threshold",
)
_LISTS: Final = ("bucket_counts", "explicit_bounds")


class PointFiller:
    """Writes rows of data points into the message of their scope. Points of one metric in a row share it."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._new = changes([batch.column(name) for name in METRIC_COLUMNS]).tolist()
        names = (*METRIC_COLUMNS, "flags", "value_int", "value_double", *_NUMBERS, *_LISTS)
        self._cells = {name: batch.column(name).to_pylist() for name in names if name != "metadata"}
        self._starts = nanoseconds(batch.column("start_time"))
        self._times = nanoseconds(batch.column("time"))
        self._buckets = {name: batch.column(name).to_pylist() for name in ("positive", "negative")}
        self._quantiles = batch.column("quantiles").to_pylist()
        self._attributes = AttributeReader(batch.column("attributes"))
        self._metadata = AttributeReader(batch.column("metadata"))
        self._exemplars = _Exemplars(batch.column("exemplars"))
        self._data: pb.Histogram

    def add(self, row: int, scope: pb.ScopeMetrics, *, is_first: bool) -> None:
        """Add a data point. Raise `InvalidInput` for a type that no metric has."""
        if is_first or self._new[row]:
            self._data = self._add_metric(row, scope)
        point = self._data.data_points.add()
        point.start_time_unix_nano, point.time_unix_nano = self._starts[row], self._times[row]
        point.flags = self._cells["flags"][row] or 0
        self._attributes.fill(row, point.attributes)
        kind = self._cells["type"][row]
        if kind in ("gauge", "sum"):
            _fill_number(point, self._cells["value_int"][row], self._cells["value_double"][row])
        else:
            self._fill_distribution(row, point)
        if kind != "summary":
            self._exemplars.fill(row, point)

    def _add_metric(self, row: int, scope: pb.ScopeMetrics) -> pb.Histogram:
        cells = self._cells
        metric = scope.metrics.add()
        metric.name, metric.unit = cells["name"][row] or "", cells["unit"][row] or ""
        metric.description = cells["description"][row] or ""
        self._metadata.fill(row, metric.metadata)
        kind = cells["type"][row]
        if kind not in POINT_TYPES:
            raise InvalidInput(
                f"a metric cannot be of type {kind!r}; expected one of {', '.join(POINT_TYPES)}"
            )
        data: pb.Histogram = getattr(metric, kind)
        data.SetInParent()
        if cells["temporality"][row]:
            data.aggregation_temporality = cells["temporality"][row]
        if cells["is_monotonic"][row]:
            metric.sum.is_monotonic = True
        return data

    def _fill_distribution(self, row: int, point: pb.HistogramDataPoint) -> None:
        for name in _NUMBERS:
            if (cell := self._cells[name][row]) is not None:
                setattr(point, name, cell)
        for name in _LISTS:
            if cell := self._cells[name][row]:
                getattr(point, name).extend(cell)
        for name, columns in self._buckets.items():
            if (cell := columns[row]) is not None:
                buckets = getattr(point, name)
                buckets.SetInParent()
                buckets.offset = cell["offset"] or 0
                buckets.bucket_counts.extend(cell["counts"] or ())
        for cell in self._quantiles[row] or ():
            point.quantile_values.add(**cell)


class _Exemplars:
    def __init__(self, column: pa.ListArray) -> None:
        self._lists = ListReader(column)
        structs = self._lists.structs
        self._times = nanoseconds(structs.field("time"))
        names = ("trace_id", "span_id", "value_int", "value_double")
        self._cells = {name: structs.field(name).to_pylist() for name in names}
        self._attributes = AttributeReader(structs.field("attributes"))

    def fill(self, row: int, point: pb.NumberDataPoint) -> None:
        for place in self._lists.places(row):
            exemplar = point.exemplars.add()
            exemplar.time_unix_nano = self._times[place]
            exemplar.trace_id = self._cells["trace_id"][place] or b""
            exemplar.span_id = self._cells["span_id"][place] or b""
            _fill_number(exemplar, self._cells["value_int"][place], self._cells["value_double"][place])
            self._attributes.fill(place, exemplar.filtered_attributes)


def _fill_number(point: pb.NumberDataPoint | pb.Exemplar, whole: int | None, real: float | None) -> None:
    if whole is not None:
        point.as_int = whole
    elif real is not None:
        point.as_double = real


_NAMES: Final = {Signal.TRACES: "spans", Signal.LOGS: "logs", Signal.METRICS: "metrics"}


class Filler(Protocol):
    """Writes the rows of one scope into its message."""

    def add(self, row: int, scope: Message, *, is_first: bool) -> None:
        """Add a row. `is_first` marks the first row of its scope."""


_FILLERS: Final[dict[Signal, Callable[[pa.RecordBatch], Filler]]] = {
    Signal.TRACES: SpanFiller,
    Signal.LOGS: LogFiller,
    Signal.METRICS: PointFiller,
}


def arrow_to_proto_py(batch: pa.RecordBatch, signal: Signal) -> Request:
    """Build the request for the rows of `batch`."""
    request = messages_of(signal).request()
    filler = _FILLERS[signal](batch)
    resources, scopes = _ResourceFiller(batch), _ScopeFiller(batch)
    new_resource = changes([batch.column(name) for name in RESOURCE_COLUMNS]).tolist()
    new_scope = changes([batch.column(name) for name in SCOPE_COLUMNS]).tolist()
    under_request = getattr(request, f"resource_{_NAMES[signal]}")
    group = scope = None
    for row in range(batch.num_rows):
        if new_resource[row]:
            group = under_request.add()
            resources.fill(row, group)
        is_first = new_resource[row] or new_scope[row]
        if is_first:
            scope = getattr(group, f"scope_{_NAMES[signal]}").add()
            scopes.fill(row, scope)
        filler.add(row, scope, is_first=is_first)
    return request


class _ResourceFiller:
    def __init__(self, batch: pa.RecordBatch) -> None:
        column = batch.column("resource_attributes")
        self._there = column.is_valid().to_pylist()
        self._attributes = AttributeReader(column)
        self._dropped = batch.column("resource_dropped_attributes_count")
        self._refs = batch.column("resource_entity_refs")
        self._urls = batch.column("resource_schema_url")

    def fill(self, row: int, group: Message) -> None:
        group.schema_url = self._urls[row].as_py() or ""
        if not self._there[row]:
            return
        resource: Resource = group.resource
        resource.SetInParent()
        self._attributes.fill(row, resource.attributes)
        resource.dropped_attributes_count = self._dropped[row].as_py() or 0
        for ref in self._refs[row].as_py() or ():
            resource.entity_refs.add(**ref)


class _ScopeFiller:
    def __init__(self, batch: pa.RecordBatch) -> None:
        column = batch.column("scope_attributes")
        self._there = column.is_valid().to_pylist()
        self._attributes = AttributeReader(column)
        self._names, self._versions = batch.column("scope_name"), batch.column("scope_version")
        self._dropped = batch.column("scope_dropped_attributes_count")
        self._urls = batch.column("scope_schema_url")

    def fill(self, row: int, group: Message) -> None:
        group.schema_url = self._urls[row].as_py() or ""
        if not self._there[row]:
            return
        scope: InstrumentationScope = group.scope
        scope.SetInParent()
        scope.name, scope.version = self._names[row].as_py() or "", self._versions[row].as_py() or ""
        self._attributes.fill(row, scope.attributes)
        scope.dropped_attributes_count = self._dropped[row].as_py() or 0
