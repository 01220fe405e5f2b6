"""Remote write 1.0, a snappy block with a protobuf message of series, and OTLP metrics.

The declared size of a block is checked before it is unpacked, so that a small body cannot exhaust memory.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, Protocol, TypeAlias, cast

import cramjam
import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from penstock.errors import InvalidInput, LimitExceeded
from penstock.timeseries.model import (
    METRIC_NAME,
    STALE_MARKER,
    Labels,
    Metadata,
    MetricType,
    Samples,
    Series,
    Temporality,
    plain_text,
)

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Limit of a body. Senders pack a few thousand samples, about a megabyte; the rest is for long labels."""

_CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit of cached label messages, in encoded bytes. With the decoded labels they take about three times
that."""
_CACHE_ENTRY_COST: Final = 200
"""Memory overhead of a cache entry."""
_STRING: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_DOUBLE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
_INT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_INT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
# Message: (field, number, type or message, whether it is a list). Histograms are not decoded. Labels stay
# encoded at first, because most of them are in the cache.
_MESSAGES: Final[dict[str, tuple[tuple[str, int, int | str, bool], ...]]] = {
    "Label": (("name", 1, _STRING, False), ("value", 2, _STRING, False)),
    "Sample": (("value", 1, _DOUBLE, False), ("timestamp", 2, _INT64, False)),
    "TimeSeries": (
        ("labels", 1, _BYTES, True),
        ("samples", 2, "Sample", True),
        ("histograms", 4, _BYTES, True),
    ),
    "MetricMetadata": (
        ("type", 1, _INT32, False),
        ("metric_family_name", 2, _STRING, False),
        ("help", 4, _STRING, False),
        ("unit", 5, _STRING, False),
    ),
    "WriteRequest": (("timeseries", 1, "TimeSeries", True), ("metadata", 3, "MetricMetadata", True)),
}
_COUNTER: Final = 1
_METRIC_TYPES: Final = {
    _COUNTER: MetricType.SUM,
    2: MetricType.GAUGE,
    3: MetricType.HISTOGRAM,
    4: MetricType.HISTOGRAM,
    5: MetricType.SUMMARY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWrite:
    """The content of a request. Native histograms are counted but not kept."""

    series: list[Series]
    metadata: dict[str, Metadata]
    histograms_skipped: int


class _Label(Protocol):
    name: str
    value: str


class _Sample(Protocol):
    value: float
    timestamp: int


class _TimeSeries(Protocol):
    labels: list[bytes]
    samples: list[_Sample]
    histograms: list[bytes]


class _Metadata(Protocol):
    type: int
    metric_family_name: str
    help: str
    unit: str


class _WriteRequest(Protocol):
    timeseries: list[_TimeSeries]
    metadata: list[_Metadata]


def decode_remote_write(body: bytes, *, bytes_max: int = BODY_BYTES_MAX) -> RemoteWrite:
    """Decode the series of a request body, in order.

    Raises `InvalidInput` if it is malformed, and `LimitExceeded` if it unpacks to more than `bytes_max`.
    """
    request = _message(_unpacked(body, bytes_max))
    metadata = {one.metric_family_name: _metadata(one) for one in request.metadata}
    filled = [one for one in request.timeseries if len(one.samples)]
    return RemoteWrite(
        series=_series(filled, metadata),
        metadata=metadata,
        histograms_skipped=sum(len(one.histograms) for one in request.timeseries),
    )


def unpacked_size(body: bytes, *, bytes_max: int = BODY_BYTES_MAX) -> int:
    """Return the declared unpacked size of a body. Raises `InvalidInput`, `LimitExceeded`."""
    try:
        claimed: int = cramjam.snappy.decompress_raw_len(body)
    except cramjam.DecompressionError as error:
        raise InvalidInput(f"the body is not a snappy block: {error}") from None
    if claimed > bytes_max:
        raise LimitExceeded(f"the body unpacks to {claimed:,} bytes, more than {bytes_max:,}")
    return claimed


def _unpacked(body: bytes, bytes_max: int) -> bytes:
    unpacked_size(body, bytes_max=bytes_max)
    try:
        return bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as error:
        raise InvalidInput(f"the body is not a snappy block: {error}") from None


def _message(data: bytes) -> _WriteRequest:
    request = _message_class("WriteRequest")()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise InvalidInput(f"the body is not a remote-write request: {error}") from None
    return cast(_WriteRequest, request)


def _series(members: list[_TimeSeries], metadata: dict[str, Metadata]) -> list[Series]:
    """Decode all samples into two arrays with a slice for each series. Most series have one sample."""
    labels = [_labels_of_message(tuple(one.labels)) for one in members]
    timestamps = np.array([sample.timestamp for one in members for sample in one.samples], np.int64)
    values = np.array([sample.value for one in members for sample in one.samples], np.float64)
    bounds = [0, *accumulate(len(one.samples) for one in members)]
    return [
        Series(
            labels=own,
            samples=Samples(timestamps[low:high], values[low:high]),
            metadata=metadata.get(own.metric, _NO_METADATA) if metadata else _NO_METADATA,
        )
        for own, (low, high) in zip(labels, pairwise(bounds), strict=True)
    ]


class _LabelCache:
    """Cache of labels by their encoded messages, because senders repeat the same series. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._known: dict[tuple[bytes, ...], Labels] = {}
        self._bytes = 0

    def __call__(self, raw: tuple[bytes, ...]) -> Labels:
        """Decode a label message. Raises `InvalidInput`."""
        known = self._known.get(raw)
        if known is None:
            known = _read_labels(raw)
            self._keep(raw, known)
        return known

    def _keep(self, raw: tuple[bytes, ...], labels: Labels) -> None:
        size = _CACHE_ENTRY_COST + sum(map(len, raw))
        if self._bytes + size > self._bytes_max:
            # Clear the whole cache. Series that are still sent are decoded once more.
            self._known, self._bytes = {}, 0
        if size <= self._bytes_max:
            self._known[raw] = labels
            self._bytes += size


def _read_labels(raw: tuple[bytes, ...]) -> Labels:
    pairs = [_label(one) for one in raw]
    labels = Labels.of((one.name, one.value) for one in pairs)
    if not labels.metric:
        raise InvalidInput(f"series {labels} has no {METRIC_NAME}")
    return labels


def _label(data: bytes) -> _Label:
    label = _message_class("Label")()
    try:
        label.ParseFromString(data)
    except DecodeError as error:
        raise InvalidInput(f"the body is not a remote-write request: {error}") from None
    return cast(_Label, label)


def _metadata(one: _Metadata) -> Metadata:
    counter = one.type == _COUNTER
    return Metadata(
        metric_type=_METRIC_TYPES.get(one.type, MetricType.UNKNOWN),
        temporality=Temporality.CUMULATIVE if counter else Temporality.UNSPECIFIED,
        monotonic=counter,
        unit=one.unit,
        description=one.help,
    )


_NO_METADATA: Final = Metadata()
_labels_of_message: Final = _LabelCache(_CACHE_BYTES_MAX)


@cache
def _message_class(name: str) -> type[Message]:
    described = message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"penstock.remote.{name}"))
    return cast(type[Message], described)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """Build the message classes from `_MESSAGES`, without generated code and `protoc`."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock/remote_write.proto", package="penstock.remote")
    file.syntax = "proto3"
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for label, number, kind, repeated in fields:
            described = message.field.add(name=label, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                described.type, described.type_name = 11, f".penstock.remote.{kind}"
            else:
                described.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


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
    """The series of a request, the number of rejected points, and the reasons."""

    series: list[Series]
    rejected_points: int = 0
    reasons: tuple[str, ...] = ()


def series_of_metrics(
    request: ExportMetricsServiceRequest, *, resource_labels: Sequence[str] | None = None
) -> OtlpSeries:
    """Convert every point of a request to a sample, grouped by series.

    `resource_labels` names the resource attributes to keep. Without it, all are kept, so that no two
    resources share a series. Points that cannot be mapped are counted and skipped.
    """
    found = _Collected()
    for resource in request.resource_metrics:
        base = _resource_labels(resource.resource, resource_labels)
        for scope in resource.scope_metrics:
            shared = _merged_labels(_scope_labels(scope.scope), base)
            for metric in scope.metrics:
                _Mapping(metric, shared, found).add()
    return found.finished()


@dataclass(slots=True)
class _Collected:
    """Samples by labels, collected while a request is read."""

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
    """Converter of one metric to series."""

    def __init__(self, metric: metrics_pb2.Metric, shared: dict[str, str], found: _Collected) -> None:
        self._metric = metric
        self._name = _metric_name(metric.name)
        self._shared = shared
        self._found = found

    def add(self) -> None:
        """Convert every point. Reject a metric without a name or of an unknown kind as a whole."""
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
                self._found.reject(1, f"metric {self._metric.name!r}: buckets and bounds do not match")
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
            labels=_merged_labels(_labels_of_point(point.attributes), self._shared),
            about=about,
            at_ms=point.time_unix_nano // _NANOSECONDS_PER_MS,
            stale=bool(point.flags & _NO_VALUE),
            found=self._found,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Converter of one point, which may add a sample to several series."""

    labels: dict[str, str]
    about: Metadata
    at_ms: int
    stale: bool
    found: _Collected

    def add(self, name: str, value: float, **more: str) -> None:
        labels = Labels.of(_merged_labels(more | {METRIC_NAME: name}, self.labels))
        self.found.add(labels, self.about, self.at_ms, float(STALE_MARKER) if self.stale else value)


def _point_count(metric: metrics_pb2.Metric, kind: str | None) -> int:
    return len(getattr(metric, kind).data_points) if kind else 0


def _metric_name(name: str) -> str:
    cleaned = _NOT_IN_A_METRIC.sub("_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def _labels_of_point(attributes: Iterable[KeyValue]) -> dict[str, str]:
    """Convert attributes to labels. If two names become equal, their values are joined."""
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
    labels = _labels_of_point(one for one in resource.attributes if wanted is None or one.key in wanted)
    job = "/".join(filter(None, (texts.get("service.namespace"), texts.get("service.name"))))
    return _merged_labels({"job": job, "instance": texts.get("service.instance.id", "")}, labels)


def _merged_labels(labels: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """Merge `labels` and `others`. A name in both gets the prefix `exported_` in `others`.

    A label with an empty value counts as absent and never causes a rename.
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
    """Return a string unchanged, a number as printed, bytes in base64, and nested values as JSON."""
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
