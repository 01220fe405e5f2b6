"""Metrics out of the rows of their data points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.otlp.readers import AttributeReader, ListReader, nanoseconds
from penstock.otlp.runs import changes
from penstock.otlp.schema import METRIC_COLUMNS, POINT_TYPES

if TYPE_CHECKING:
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb

__all__ = ["PointFiller"]

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
    """Puts rows of data points into the message of their scope; points of one metric in a row share it."""

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

    def add(self, row: int, scope: pb.ScopeMetrics, *, anew: bool) -> None:
        """One more data point. Raises `InvalidInput` for a type that no metric has."""
        if anew or self._new[row]:
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
