"""Conversion of a parsed request to columns, message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
from tests.unit.otlp.oracle.builders import Attributes, Lists, Values, columns_of

from penstock.otlp.columns import duration_of, text_of
from penstock.otlp.messages import ITEM_NAMES, SPAN_ID_BYTES, TRACE_ID_BYTES, Refusals, id_fault
from penstock.otlp.schema import (
    ENTITY_REFS,
    EVENTS,
    EXEMPLARS,
    LINKS,
    LOGS,
    METRICS,
    POINT_COLUMNS,
    SPANS,
    Signal,
    schema_of,
)
from penstock.otlp.to_arrow import Context

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from penstock.otlp.messages import Request

_LOG_FIELDS = (
    "time",
    "observed_time",
    "severity_number",
    "severity_text",
    "event_name",
    "trace_id",
    "span_id",
    "flags",
    "dropped_attributes_count",
)


class LogRows:
    """The columns of log records that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes = Attributes()
        self._bodies = Values()

    def add(self, record: LogRecord) -> int:
        """Add a record. Return the number of rows it became, which is 0 if it is refused."""
        faults = (
            id_fault("trace_id", record.trace_id, TRACE_ID_BYTES),
            id_fault("span_id", record.span_id, SPAN_ID_BYTES),
        )
        if self._refusals.refuse(faults):
            return 0
        self._cells.append(
            (
                record.time_unix_nano,
                record.observed_time_unix_nano,
                record.severity_number,
                record.severity_text,
                record.event_name,
                record.trace_id or None,
                record.span_id or None,
                record.flags,
                record.dropped_attributes_count,
            )
        )
        self._attributes.add(record.attributes)
        self._bodies.add(record.body if record.HasField("body") else None)
        return 1

    def finish(self) -> dict[str, pa.Array]:
        """Return the columns by name."""
        bodies = self._bodies.finish()
        return columns_of(LOGS, _LOG_FIELDS, self._cells) | {
            "body": text_of(bodies),
            "body_any": bodies,
            "attributes": self._attributes.finish(),
        }


_SPAN_FIELDS = (
    "trace_id",
    "span_id",
    "parent_span_id",
    "trace_state",
    "flags",
    "name",
    "kind",
    "start_time",
    "end_time",
    "status_code",
    "status_message",
    "dropped_events_count",
    "dropped_links_count",
    "dropped_attributes_count",
)


class SpanRows:
    """The columns of spans that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes = Attributes()
        self._events, self._event_attributes = Lists(EVENTS), Attributes()
        self._links, self._link_attributes = Lists(LINKS), Attributes()

    def add(self, span: Span) -> int:
        """Add a span. Return the number of rows it became, which is 0 if it is refused."""
        if self._refusals.refuse(_faults_of_span(span)):
            return 0
        has_status = span.HasField("status")
        self._cells.append(
            (
                span.trace_id or None,
                span.span_id or None,
                span.parent_span_id or None,
                span.trace_state,
                span.flags,
                span.name,
                span.kind,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code if has_status else None,
                span.status.message if has_status else None,
                span.dropped_events_count,
                span.dropped_links_count,
                span.dropped_attributes_count,
            )
        )
        self._attributes.add(span.attributes)
        self._add_events(span)
        self._add_links(span)
        return 1

    def _add_events(self, span: Span) -> None:
        for event in span.events:
            self._events.cells.append((event.time_unix_nano, event.name, event.dropped_attributes_count))
            self._event_attributes.add(event.attributes)
        self._events.end_row()

    def _add_links(self, span: Span) -> None:
        for link in span.links:
            self._links.cells.append(
                (
                    link.trace_id or None,
                    link.span_id or None,
                    link.trace_state,
                    link.flags,
                    link.dropped_attributes_count,
                )
            )
            self._link_attributes.add(link.attributes)
        self._links.end_row()

    def finish(self) -> dict[str, pa.Array]:
        """Return the columns by name."""
        columns = columns_of(SPANS, _SPAN_FIELDS, self._cells)
        return columns | {
            "duration_ns": duration_of(columns["start_time"], columns["end_time"]),
            "attributes": self._attributes.finish(),
            "events": self._events.finish(attributes=self._event_attributes.finish()),
            "links": self._links.finish(attributes=self._link_attributes.finish()),
        }


def _faults_of_span(span: Span) -> Iterator[str | None]:
    yield id_fault("trace_id", span.trace_id, TRACE_ID_BYTES)
    yield id_fault("span_id", span.span_id, SPAN_ID_BYTES)
    yield id_fault("parent_span_id", span.parent_span_id, SPAN_ID_BYTES)
    for link in span.links:
        yield id_fault("trace_id of a link", link.trace_id, TRACE_ID_BYTES)
        yield id_fault("span_id of a link", link.span_id, SPAN_ID_BYTES)


_POINT_FIELDS: Final = ("name", "description", "unit", "type", "temporality", "is_monotonic", *POINT_COLUMNS)
_OWN: Final = _POINT_FIELDS.index("value_int")
_NO_VALUES: Final[dict[str, object]] = dict.fromkeys(_POINT_FIELDS[_OWN:])


class PointRows:
    """The columns of data points that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes, self._metadata = Attributes(), Attributes()
        self._exemplars, self._exemplar_attributes = Lists(EXEMPLARS), Attributes()

    def add(self, metric: pb.Metric) -> int:
        """Add the points of a metric. Return the number of rows they became."""
        kind = metric.WhichOneof("data")
        if kind is None:
            return 0
        data = getattr(metric, kind)
        temporality = data.aggregation_temporality if kind in _WITH_TEMPORALITY else None
        is_monotonic = data.is_monotonic if kind == "sum" else None
        head = (metric.name, metric.description, metric.unit, kind, temporality, is_monotonic)
        return sum(self._add_point(metric, kind, head, point) for point in data.data_points)

    def _add_point(
        self, metric: pb.Metric, kind: str, head: tuple[object, ...], point: pb.NumberDataPoint
    ) -> bool:
        exemplars: Iterable[pb.Exemplar] | None = None if kind == "summary" else point.exemplars
        if self._refusals.refuse(_faults_of_point(exemplars or ())):
            return False
        own = _NO_VALUES | _OWN_VALUES[kind](point)
        timing = (point.start_time_unix_nano, point.time_unix_nano, point.flags)
        self._cells.append((*head, *timing, *own.values()))
        self._attributes.add(point.attributes)
        self._metadata.add(metric.metadata)
        self._add_exemplars(exemplars)
        return True

    def _add_exemplars(self, exemplars: Iterable[pb.Exemplar] | None) -> None:
        for exemplar in exemplars or ():
            cells = (*_number(exemplar).values(), exemplar.trace_id or None, exemplar.span_id or None)
            self._exemplars.cells.append((exemplar.time_unix_nano, *cells))
            self._exemplar_attributes.add(exemplar.filtered_attributes)
        self._exemplars.end_row(missing=exemplars is None)

    def finish(self) -> dict[str, pa.Array]:
        """Return the columns by name."""
        return columns_of(METRICS, _POINT_FIELDS, self._cells) | {
            "attributes": self._attributes.finish(),
            "dropped_attributes_count": pa.nulls(len(self._cells), pa.uint32()),
            "metadata": self._metadata.finish(),
            "exemplars": self._exemplars.finish(attributes=self._exemplar_attributes.finish()),
        }


def _faults_of_point(exemplars: Iterable[pb.Exemplar]) -> Iterator[str | None]:
    for exemplar in exemplars:
        yield id_fault("trace_id of an exemplar", exemplar.trace_id, TRACE_ID_BYTES)
        yield id_fault("span_id of an exemplar", exemplar.span_id, SPAN_ID_BYTES)


def _number(point: pb.NumberDataPoint | pb.Exemplar) -> dict[str, object]:
    kind = point.WhichOneof("value")
    return {
        "value_int": point.as_int if kind == "as_int" else None,
        "value_double": point.as_double if kind == "as_double" else None,
    }


def _histogram(point: pb.HistogramDataPoint) -> dict[str, object]:
    return {
        "count": point.count,
        "bucket_counts": list(point.bucket_counts),
        "explicit_bounds": list(point.explicit_bounds),
        **_optional(point),
    }


def _exponential(point: pb.ExponentialHistogramDataPoint) -> dict[str, object]:
    return {
        "count": point.count,
        "scale": point.scale,
        "zero_count": point.zero_count,
        "zero_threshold": point.zero_threshold,
        "positive": _buckets(point.positive) if point.HasField("positive") else None,
        "negative": _buckets(point.negative) if point.HasField("negative") else None,
        **_optional(point),
    }


def _optional(point: pb.HistogramDataPoint | pb.ExponentialHistogramDataPoint) -> dict[str, object]:
    return {
        "sum": point.sum if point.HasField("sum") else None,
        "min": point.min if point.HasField("min") else None,
        "max": point.max if point.HasField("max") else None,
    }


def _buckets(buckets: pb.ExponentialHistogramDataPoint.Buckets) -> dict[str, object]:
    return {"offset": buckets.offset, "counts": list(buckets.bucket_counts)}


def _summary(point: pb.SummaryDataPoint) -> dict[str, object]:
    quantiles = [{"quantile": each.quantile, "value": each.value} for each in point.quantile_values]
    return {"count": point.count, "sum": point.sum, "quantiles": quantiles}


_WITH_TEMPORALITY: Final = ("sum", "histogram", "exponential_histogram")
_OWN_VALUES: Final[dict[str, Callable[..., dict[str, object]]]] = {
    "gauge": _number,
    "sum": _number,
    "histogram": _histogram,
    "exponential_histogram": _exponential,
    "summary": _summary,
}


class Rows(Protocol):
    """The columns of a signal that do not come from resource or scope."""

    def add(self, item: Any, /) -> int:
        """Add a message. Return the number of rows it became."""

    def finish(self) -> dict[str, pa.Array]:
        """Return the columns by name."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The rows of a request, and its refused items."""

    batch: pa.RecordBatch
    refusals: Refusals


def proto_to_arrow_py(request: Request, signal: Signal) -> Converted:
    """Return the rows of `request`. Raise `LimitExceeded` if resources would be repeated too often."""
    refusals = Refusals(ITEM_NAMES[signal])
    rows = _ROWS[signal](refusals)
    resources, scopes = _Resources(), _Scopes()
    scope_of_row: list[int] = []
    for resource in getattr(request, f"resource_{_NAMES[signal][0]}"):
        resources.add(resource.resource if resource.HasField("resource") else None, resource.schema_url)
        for scope in getattr(resource, f"scope_{_NAMES[signal][0]}"):
            scopes.add(
                scope.scope if scope.HasField("scope") else None, scope.schema_url, resources.count - 1
            )
            added = sum(rows.add(item) for item in getattr(scope, _NAMES[signal][1]))
            scope_of_row += [scopes.count - 1] * added
    context = Context(
        resources=resources.finish(),
        scopes=scopes.finish(),
        resource_of_scope=np.array(scopes.resource_of, np.int64),
    )
    columns = context.columns(np.array(scope_of_row, np.int64)) | rows.finish()
    schema = schema_of(signal)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    return Converted(batch, refusals)


_ROWS: Final[dict[Signal, Callable[[Refusals], Rows]]] = {
    Signal.TRACES: SpanRows,
    Signal.LOGS: LogRows,
    Signal.METRICS: PointRows,
}
_NAMES: Final = {
    Signal.TRACES: ("spans", "spans"),
    Signal.LOGS: ("logs", "log_records"),
    Signal.METRICS: ("metrics", "metrics"),
}


class _Resources:
    def __init__(self) -> None:
        self.count = 0
        self._attributes = Attributes()
        self._refs: list[list[dict[str, object]] | None] = []
        self._dropped: list[int | None] = []
        self._schema_urls: list[str] = []

    def add(self, resource: Resource | None, schema_url: str) -> None:
        self.count += 1
        self._schema_urls.append(schema_url)
        self._attributes.add(None if resource is None else resource.attributes)
        self._dropped.append(None if resource is None else resource.dropped_attributes_count)
        self._refs.append(
            None
            if resource is None
            else [
                {
                    "schema_url": ref.schema_url,
                    "type": ref.type,
                    "id_keys": list(ref.id_keys),
                    "description_keys": list(ref.description_keys),
                }
                for ref in resource.entity_refs
            ]
        )

    def finish(self) -> dict[str, pa.Array]:
        return {
            "resource_attributes": self._attributes.finish(),
            "resource_dropped_attributes_count": pa.array(self._dropped, pa.uint32()),
            "resource_entity_refs": pa.array(self._refs, ENTITY_REFS),
            "resource_schema_url": pa.array(self._schema_urls, pa.string()),
        }


class _Scopes:
    def __init__(self) -> None:
        self.resource_of: list[int] = []
        self._attributes = Attributes()
        self._cells: list[tuple[str | None, str | None, int | None, str]] = []

    @property
    def count(self) -> int:
        return len(self.resource_of)

    def add(self, scope: InstrumentationScope | None, schema_url: str, resource: int) -> None:
        self.resource_of.append(resource)
        if scope is None:
            self._attributes.add(None)
            self._cells.append((None, None, None, schema_url))
            return
        self._attributes.add(scope.attributes)
        self._cells.append((scope.name, scope.version, scope.dropped_attributes_count, schema_url))

    def finish(self) -> dict[str, pa.Array]:
        names, versions, dropped, urls = zip(*self._cells, strict=True) if self._cells else ((),) * 4
        return {
            "scope_name": pa.array(names, pa.string()),
            "scope_version": pa.array(versions, pa.string()),
            "scope_attributes": self._attributes.finish(),
            "scope_dropped_attributes_count": pa.array(dropped, pa.uint32()),
            "scope_schema_url": pa.array(urls, pa.string()),
        }
