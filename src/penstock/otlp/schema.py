"""One wide table per signal: the columns of spans, log records and data points.

Every field of a message has a column, so a batch converts back to the same request. A column is null if the
message omits a field with presence: an optional number, a status, a resource, a scope. An empty id and a time
of 0 mean "unknown" in the protocol, and are also null.
"""

from __future__ import annotations

import enum
from typing import Final

import pyarrow as pa


class Signal(enum.StrEnum):
    """A kind of telemetry, which determines the request, the schema and the path `/v1/…`."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


TIME: Final = pa.timestamp("ns", tz="UTC")
TRACE_ID: Final = pa.binary(16)
SPAN_ID: Final = pa.binary(8)

EMPTY: Final = 0
STR: Final = 1
BOOL: Final = 2
INT: Final = 3
DOUBLE: Final = 4
ARRAY: Final = 5
MAP: Final = 6
BYTES: Final = 7
OTHER: Final = 8
"""The kinds of a value in `type`: the number of the field that the message sets, or 0 if it sets none."""

ANY_VALUE: Final = pa.struct(
    [
        pa.field("type", pa.int8()),
        pa.field("str", pa.string()),
        pa.field("int", pa.int64()),
        pa.field("double", pa.float64()),
        pa.field("bool", pa.bool_()),
        pa.field("bytes", pa.binary()),
        pa.field("ser", pa.binary()),
    ]
)
"""A value of any kind. `ser` is the serialized `AnyValue` for kinds without a separate column."""

ATTRIBUTES: Final = pa.map_(pa.string(), ANY_VALUE)
"""Attributes in the order of the message, with duplicate keys. A value is null if the message has only the
key.
"""

ENTITY_REFS: Final = pa.list_(
    pa.struct(
        [
            pa.field("schema_url", pa.string()),
            pa.field("type", pa.string()),
            pa.field("id_keys", pa.list_(pa.string())),
            pa.field("description_keys", pa.list_(pa.string())),
        ]
    )
)
EVENTS: Final = pa.list_(
    pa.struct(
        [
            pa.field("time", TIME),
            pa.field("name", pa.string()),
            pa.field("attributes", ATTRIBUTES),
            pa.field("dropped", pa.uint32()),
        ]
    )
)
LINKS: Final = pa.list_(
    pa.struct(
        [
            pa.field("trace_id", TRACE_ID),
            pa.field("span_id", SPAN_ID),
            pa.field("trace_state", pa.string()),
            pa.field("flags", pa.uint32()),
            pa.field("attributes", ATTRIBUTES),
            pa.field("dropped", pa.uint32()),
        ]
    )
)
BUCKETS: Final = pa.struct([pa.field("offset", pa.int32()), pa.field("counts", pa.list_(pa.uint64()))])
QUANTILES: Final = pa.list_(
    pa.struct([pa.field("quantile", pa.float64()), pa.field("value", pa.float64())]),
)
EXEMPLARS: Final = pa.list_(
    pa.struct(
        [
            pa.field("time", TIME),
            pa.field("value_int", pa.int64()),
            pa.field("value_double", pa.float64()),
            pa.field("trace_id", TRACE_ID),
            pa.field("span_id", SPAN_ID),
            pa.field("attributes", ATTRIBUTES),
        ]
    )
)

POINT_TYPES: Final = ("gauge", "sum", "histogram", "exponential_histogram", "summary")
"""The values of `type` of a metric: the name of the field that the message sets."""

_COMMON: Final = (
    pa.field("attributes", ATTRIBUTES),
    pa.field("dropped_attributes_count", pa.uint32()),
    pa.field("service_name", pa.dictionary(pa.int32(), pa.string())),
    pa.field("scope_name", pa.string()),
    pa.field("scope_version", pa.string()),
    pa.field("scope_attributes", ATTRIBUTES),
    pa.field("scope_dropped_attributes_count", pa.uint32()),
    pa.field("scope_schema_url", pa.string()),
    pa.field("resource_attributes", ATTRIBUTES),
    pa.field("resource_dropped_attributes_count", pa.uint32()),
    pa.field("resource_entity_refs", ENTITY_REFS),
    pa.field("resource_schema_url", pa.string()),
)

RESOURCE_COLUMNS: Final = (
    "resource_attributes",
    "resource_dropped_attributes_count",
    "resource_entity_refs",
    "resource_schema_url",
)
SCOPE_COLUMNS: Final = (
    "scope_name",
    "scope_version",
    "scope_attributes",
    "scope_dropped_attributes_count",
    "scope_schema_url",
)
NUMBER_COLUMNS: Final = (
    "count",
    "sum",
    "min",
    "max",
    "bucket_counts",
    "explicit_bounds",
    "scale",
    "zero_count",
    "zero_threshold",
)
"""The fields of histograms and summaries that are numbers or lists of numbers."""
POINT_COLUMNS: Final = (
    "start_time",
    "time",
    "flags",
    "value_int",
    "value_double",
    *NUMBER_COLUMNS,
    "positive",
    "negative",
    "quantiles",
)
"""The fields of a data point without its exemplars and attributes."""
METRIC_COLUMNS: Final = ("name", "description", "unit", "metadata", "type", "temporality", "is_monotonic")
"""The columns that the points of one metric have in common."""

SPANS: Final = pa.schema(
    [
        pa.field("trace_id", TRACE_ID),
        pa.field("span_id", SPAN_ID),
        pa.field("parent_span_id", SPAN_ID),
        pa.field("trace_state", pa.string()),
        pa.field("flags", pa.uint32()),
        pa.field("name", pa.string()),
        pa.field("kind", pa.int32()),
        pa.field("start_time", TIME),
        pa.field("end_time", TIME),
        pa.field("duration_ns", pa.int64()),
        pa.field("status_code", pa.int32()),
        pa.field("status_message", pa.string()),
        pa.field("events", EVENTS),
        pa.field("dropped_events_count", pa.uint32()),
        pa.field("links", LINKS),
        pa.field("dropped_links_count", pa.uint32()),
        *_COMMON,
    ]
)
LOGS: Final = pa.schema(
    [
        pa.field("time", TIME),
        pa.field("observed_time", TIME),
        pa.field("severity_number", pa.int32()),
        pa.field("severity_text", pa.string()),
        pa.field("body", pa.string()),
        pa.field("body_any", ANY_VALUE),
        pa.field("event_name", pa.string()),
        pa.field("trace_id", TRACE_ID),
        pa.field("span_id", SPAN_ID),
        pa.field("flags", pa.uint32()),
        *_COMMON,
    ]
)
METRICS: Final = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("description", pa.string()),
        pa.field("unit", pa.string()),
        pa.field("metadata", ATTRIBUTES),
        pa.field("type", pa.string()),
        pa.field("temporality", pa.int32()),
        pa.field("is_monotonic", pa.bool_()),
        pa.field("start_time", TIME),
        pa.field("time", TIME),
        pa.field("flags", pa.uint32()),
        pa.field("value_int", pa.int64()),
        pa.field("value_double", pa.float64()),
        pa.field("count", pa.uint64()),
        pa.field("sum", pa.float64()),
        pa.field("min", pa.float64()),
        pa.field("max", pa.float64()),
        pa.field("bucket_counts", pa.list_(pa.uint64())),
        pa.field("explicit_bounds", pa.list_(pa.float64())),
        pa.field("scale", pa.int32()),
        pa.field("zero_count", pa.uint64()),
        pa.field("zero_threshold", pa.float64()),
        pa.field("positive", BUCKETS),
        pa.field("negative", BUCKETS),
        pa.field("quantiles", QUANTILES),
        pa.field("exemplars", EXEMPLARS),
        *_COMMON,
    ]
)

_SCHEMAS: Final = {Signal.TRACES: SPANS, Signal.LOGS: LOGS, Signal.METRICS: METRICS}


def schema_of(signal: Signal) -> pa.Schema:
    """Return the columns of `signal`."""
    return _SCHEMAS[signal]
