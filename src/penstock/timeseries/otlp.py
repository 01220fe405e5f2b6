"""OTLP metrics as series.

| metric | series |
|---|---|
| gauge | the name |
| sum | the name; `_total` behind it if it is monotonic and cumulative |
| histogram | `_bucket` with `le`, `_count`, and `_sum` where there is one |
| summary | the name with `quantile`, `_count`, `_sum` |
| exponential histogram | rejected: there is no series for it |

Names keep letters, digits and `_` (metrics `:` too); anything else becomes `_`. Labels are the point's
attributes, the resource's attributes, the scope's name and version, and `job` and `instance` from the
`service.` attributes. A point that says that it has no value becomes a stale marker.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, TypeAlias

import msgspec
import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from penstock.timeseries.float_text import plain_text
from penstock.timeseries.model import (
    METRIC_NAME,
    STALE_MARKER,
    Labels,
    Metadata,
    MetricType,
    Samples,
    Series,
    Temporality,
)

__all__ = ["OtlpSeries", "series_of_metrics"]

_NOT_IN_A_METRIC: Final = re.compile(r"[^A-Za-z0-9_:]")
_NOT_IN_A_LABEL: Final = re.compile(r"[^A-Za-z0-9_]")
_NO_VALUE: Final = metrics_pb2.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_EXPORTED: Final = "exported_"
_NANOSECONDS_PER_MS: Final = 1_000_000
_TEMPORALITIES: Final[dict[int, Temporality]] = {
    metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE: Temporality.CUMULATIVE,
    metrics_pb2.AGGREGATION_TEMPORALITY_DELTA: Temporality.DELTA,
}
_REASONS_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSeries:
    """The series of a request, how many of its points have none, and why."""

    series: list[Series]
    rejected_points: int = 0
    reasons: tuple[str, ...] = ()


def series_of_metrics(
    request: ExportMetricsServiceRequest, *, resource_labels: Sequence[str] | None = None
) -> OtlpSeries:
    """Every point of a request as a sample, those of one series together.

    `resource_labels` names the resource attributes to keep; without it all are, so that no two
    resources share a series. Points that cannot be mapped are counted; the others are kept.
    """
    found = _Collected()
    for resource in request.resource_metrics:
        base = _resource_labels(resource.resource, resource_labels)
        for scope in resource.scope_metrics:
            shared = _beside(_scope_labels(scope.scope), base)
            for metric in scope.metrics:
                _Mapping(metric, shared, found).add()
    return found.finished()


@dataclass(slots=True)
class _Collected:
    """Samples by their labels, while a request is read."""

    samples: dict[Labels, tuple[list[int], list[float]]] = field(default_factory=dict)
    metadata: dict[Labels, Metadata] = field(default_factory=dict)
    rejected_points: int = 0
    reasons: dict[str, None] = field(default_factory=dict)

    def add(self, labels: Labels, metadata: Metadata, at_ms: int, value: float) -> None:
        times, values = self.samples.setdefault(labels, ([], []))
        times.append(at_ms)
        values.append(value)
        self.metadata.setdefault(labels, metadata)

    def reject(self, count: int, reason: str) -> None:
        self.rejected_points += count
        if len(self.reasons) < _REASONS_MAX:
            self.reasons[reason] = None

    def finished(self) -> OtlpSeries:
        series = [
            Series(
                labels=labels,
                samples=Samples(np.array(times, np.int64), np.array(values, np.float64)),
                metadata=self.metadata[labels],
            )
            for labels, (times, values) in self.samples.items()
        ]
        return OtlpSeries(series=series, rejected_points=self.rejected_points, reasons=tuple(self.reasons))


_DataPoint: TypeAlias = (
    metrics_pb2.NumberDataPoint | metrics_pb2.HistogramDataPoint | metrics_pb2.SummaryDataPoint
)


class _Mapping:
    """One metric on its way into series."""

    def __init__(self, metric: metrics_pb2.Metric, shared: dict[str, str], found: _Collected) -> None:
        self._metric = metric
        self._name = _metric_name(metric.name)
        self._shared = shared
        self._found = found

    def add(self) -> None:
        """Every point of it; a metric without a name or of an unknown kind is rejected whole."""
        metric = self._metric
        kind = metric.WhichOneof("data")
        if not metric.name:
            self._found.reject(max(1, _point_count(metric, kind)), "a metric has no name")
        elif kind == "gauge":
            self._numbers(metric.gauge.data_points, self._name, self._about(MetricType.GAUGE))
        elif kind == "sum":
            self._sum(metric.sum)
        elif kind == "histogram":
            self._histogram(metric.histogram)
        elif kind == "summary":
            self._summary(metric.summary)
        elif kind is not None:
            reason = f"metric {metric.name!r}: {kind.replace('_', ' ')} is not supported"
            self._found.reject(_point_count(metric, kind), reason)

    def _about(self, metric_type: MetricType, temporality: int = 0, monotonic: bool = False) -> Metadata:
        return Metadata(
            metric_type=metric_type,
            temporality=_TEMPORALITIES.get(temporality, Temporality.UNSPECIFIED),
            monotonic=monotonic,
            unit=self._metric.unit,
            description=self._metric.description,
        )

    def _sum(self, data: metrics_pb2.Sum) -> None:
        about = self._about(MetricType.SUM, data.aggregation_temporality, data.is_monotonic)
        counter = about.monotonic and about.temporality is Temporality.CUMULATIVE
        suffix = "_total" if counter and not self._name.endswith("_total") else ""
        self._numbers(data.data_points, self._name + suffix, about)

    def _numbers(self, points: Iterable[metrics_pb2.NumberDataPoint], name: str, about: Metadata) -> None:
        for point in points:
            value = float(point.as_int) if point.WhichOneof("value") == "as_int" else point.as_double
            if (series := self._point(point, about)) is not None:
                series.add(name, value)

    def _histogram(self, data: metrics_pb2.Histogram) -> None:
        about = self._about(MetricType.HISTOGRAM, data.aggregation_temporality, monotonic=True)
        for point in data.data_points:
            bounds = [*map(plain_text, point.explicit_bounds), "+Inf"]
            counts = point.bucket_counts or [point.count]
            if len(counts) != len(bounds):
                self._found.reject(1, f"metric {self._metric.name!r}: buckets and bounds do not agree")
            elif (series := self._point(point, about)) is not None:
                for bound, count in zip(bounds, accumulate(counts), strict=True):
                    series.add(f"{self._name}_bucket", float(count), le=bound)
                series.add(f"{self._name}_count", float(point.count))
                if point.HasField("sum"):
                    series.add(f"{self._name}_sum", point.sum)

    def _summary(self, data: metrics_pb2.Summary) -> None:
        about = self._about(MetricType.SUMMARY)
        for point in data.data_points:
            if (series := self._point(point, about)) is not None:
                for one in point.quantile_values:
                    series.add(self._name, one.value, quantile=plain_text(one.quantile))
                series.add(f"{self._name}_count", float(point.count))
                series.add(f"{self._name}_sum", point.sum)

    def _point(self, point: _DataPoint, about: Metadata) -> _Point | None:
        if not point.time_unix_nano:
            self._found.reject(1, f"metric {self._metric.name!r}: a point has no time")
            return None
        return _Point(
            labels=_beside(_labels(point.attributes), self._shared),
            about=about,
            at_ms=point.time_unix_nano // _NANOSECONDS_PER_MS,
            stale=bool(point.flags & _NO_VALUE),
            found=self._found,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One point, which may give a sample to several series."""

    labels: dict[str, str]
    about: Metadata
    at_ms: int
    stale: bool
    found: _Collected

    def add(self, name: str, value: float, **more: str) -> None:
        labels = Labels.of(_beside(more | {METRIC_NAME: name}, self.labels))
        self.found.add(labels, self.about, self.at_ms, float(STALE_MARKER) if self.stale else value)


def _point_count(metric: metrics_pb2.Metric, kind: str | None) -> int:
    return len(getattr(metric, kind).data_points) if kind else 0


def _metric_name(name: str) -> str:
    cleaned = _NOT_IN_A_METRIC.sub("_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def _labels(attributes: Iterable[KeyValue]) -> dict[str, str]:
    """Attributes as labels. Where two names become one their values stand one behind the other."""
    labels: dict[str, str] = {}
    for attribute in sorted(attributes, key=lambda one: one.key):
        name = _NOT_IN_A_LABEL.sub("_", attribute.key)
        if not name:
            continue
        name = f"key_{name}" if name[0].isdigit() else name
        text = _text(attribute.value)
        labels[name] = f"{labels[name]};{text}" if name in labels else text
    return labels


def _resource_labels(resource: Resource, wanted: Sequence[str] | None) -> dict[str, str]:
    texts = {one.key: _text(one.value) for one in resource.attributes}
    labels = _labels(one for one in resource.attributes if wanted is None or one.key in wanted)
    job = "/".join(filter(None, (texts.get("service.namespace"), texts.get("service.name"))))
    return _beside({"job": job, "instance": texts.get("service.instance.id", "")}, labels)


def _beside(labels: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """`labels` and `others`; where both have a name, that of the others gets `exported_` before it.

    An empty value is no label, so it takes no name from another.
    """
    kept = {name: value for name, value in labels.items() if value}
    both = others | kept
    for name in sorted(kept.keys() & others.keys()):
        if others[name]:
            free = f"{_EXPORTED}{name}"
            while free in both:
                free = f"{_EXPORTED}{free}"
            both[free] = others[name]
    return both


def _scope_labels(scope: InstrumentationScope) -> dict[str, str]:
    return {"otel_scope_name": scope.name, "otel_scope_version": scope.version}


def _text(value: AnyValue) -> str:
    """A text as it is, a number as it prints, bytes in base64, anything nested as JSON."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value
    if kind == "double_value":
        return plain_text(value.double_value)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind is None:
        return ""
    return msgspec.json.encode(_plain(value)).decode()


def _plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return dict(_pairs(value.kvlist_value.values))
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind) if kind else None


def _pairs(values: Iterable[KeyValue]) -> Iterator[tuple[str, object]]:
    for one in values:
        yield one.key, _plain(one.value)
