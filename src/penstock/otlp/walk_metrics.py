"""Metrics into columns, a row for every data point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.otlp.builders import Attributes, Lists, columns_of
from penstock.otlp.refusal import SPAN_ID_BYTES, TRACE_ID_BYTES, Refusals, id_fault
from penstock.otlp.schema import EXEMPLARS, METRICS, POINT_COLUMNS

if TYPE_CHECKING:
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb

__all__ = ["PointRows"]

_PLAIN: Final = ("name", "description", "unit", "type", "temporality", "is_monotonic", *POINT_COLUMNS)
_OWN: Final = _PLAIN.index("value_int")
_NO_VALUES: Final[dict[str, object]] = dict.fromkeys(_PLAIN[_OWN:])


class PointRows:
    """The columns of data points that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes, self._metadata = Attributes(), Attributes()
        self._exemplars, self._exemplar_attributes = Lists(EXEMPLARS), Attributes()

    def add(self, metric: pb.Metric) -> int:
        """The points of one more metric; how many rows they became."""
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
        if self._refusals.refuse(_faults(exemplars or ())):
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
        """The columns by name."""
        return columns_of(METRICS, _PLAIN, self._cells) | {
            "attributes": self._attributes.finish(),
            "dropped_attributes_count": pa.nulls(len(self._cells), pa.uint32()),
            "metadata": self._metadata.finish(),
            "exemplars": self._exemplars.finish(attributes=self._exemplar_attributes.finish()),
        }


def _faults(exemplars: Iterable[pb.Exemplar]) -> Iterator[str | None]:
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
