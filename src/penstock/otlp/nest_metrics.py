"""Rows of data points back into metrics: rows of one metric that follow each other share it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.errors import Unflattenable
from penstock.otlp.nesting import list_column, nanoseconds, pairs_of, refuse_negative_zero, struct_column
from penstock.otlp.runs import Flags, changes
from penstock.otlp.schema import METRIC_COLUMNS, POINT_COLUMNS, POINT_TYPES

__all__ = ["metrics_of"]

_POINT: Final = (*POINT_COLUMNS, "exemplars", "attributes")


def metrics_of(
    batch: pa.RecordBatch, kind: pa.StructType, new_scope: Flags
) -> tuple[pa.StructArray, npt.NDArray[np.int64]]:
    """The metrics of all rows, and which metric each row belongs to."""
    new = new_scope | changes([batch.column(name) for name in METRIC_COLUMNS])
    starts = np.flatnonzero(new)
    lengths = np.diff(np.append(starts, batch.num_rows))
    heads = batch.select(METRIC_COLUMNS).take(pa.array(starts))
    points = batch.select(_POINT)
    fields = {name: heads.column(name) for name in ("name", "description", "unit")}
    fields["metadata"] = pairs_of(kind.field("metadata").type, heads.column("metadata"))
    known = 0
    for name in POINT_TYPES:
        mine = np.asarray(pc.fill_null(pc.equal(heads.column("type"), name), False))
        if mine.any():
            known += int(mine.sum())
            rows = points.filter(pc.equal(batch.column("type"), name))
            fields[name] = _data(kind.field(name).type, heads, rows, np.where(mine, lengths, 0), mine)
    if known != len(starts):
        raise Unflattenable("a row is of no type that metrics have")
    return struct_column(kind, fields, len(starts)), np.cumsum(new) - 1


def _data(
    kind: pa.StructType,
    heads: pa.RecordBatch,
    rows: pa.RecordBatch,
    lengths: npt.NDArray[np.int64],
    mine: Flags,
) -> pa.StructArray:
    """The part of metrics that holds the points of one type; null for metrics of others."""
    points = kind.field("data_points").type
    fields = {
        "data_points": list_column(
            points, np.append(0, np.cumsum(lengths)), _points(points.value_type, rows)
        ),
        "aggregation_temporality": heads.column("temporality"),
        "is_monotonic": heads.column("is_monotonic"),
    }
    return struct_column(kind, fields, len(mine), pa.array(~mine))


def _points(kind: pa.StructType, rows: pa.RecordBatch) -> pa.StructArray:
    names = {field.name for field in kind}
    fields = {name: rows.column(name) for name in rows.schema.names if name in names}
    fields |= {
        "start_time_unix_nano": nanoseconds(rows.column("start_time")),
        "time_unix_nano": nanoseconds(rows.column("time")),
        "attributes": pairs_of(kind.field("attributes").type, rows.column("attributes")),
    }
    if "as_int" in names:
        fields |= _number(rows.column("value_int"), rows.column("value_double"))
    if "exemplars" in names:
        fields["exemplars"] = _exemplars(kind.field("exemplars").type, rows.column("exemplars"))
    for name in ("positive", "negative"):
        if name in names:
            fields[name] = _buckets(kind.field(name).type, rows.column(name))
    if "quantile_values" in names:
        fields["quantile_values"] = _quantiles(kind.field("quantile_values").type, rows.column("quantiles"))
        refuse_negative_zero(rows.column("sum"))
    if "zero_threshold" in names:
        refuse_negative_zero(rows.column("zero_threshold"))
    return struct_column(kind, fields, rows.num_rows)


def _number(whole: pa.Int64Array, real: pa.DoubleArray) -> dict[str, pa.Array]:
    both = np.asarray(whole.is_valid()) & np.asarray(real.is_valid())
    if both.any():
        raise Unflattenable("a number is both whole and real")
    return {"as_int": whole, "as_double": real}


def _buckets(kind: pa.StructType, column: pa.StructArray) -> pa.StructArray:
    fields = {"offset": column.field("offset"), "bucket_counts": column.field("counts")}
    return struct_column(kind, fields, len(column), column.is_null())


def _offsets(column: pa.ListArray) -> npt.NDArray[np.int64]:
    return np.append(0, np.cumsum(np.asarray(column.value_lengths().fill_null(0), np.int64)))


def _quantiles(kind: pa.ListType, column: pa.ListArray) -> pa.ListArray:
    values = column.flatten()
    fields = {name: values.field(name) for name in ("quantile", "value")}
    for field in fields.values():
        refuse_negative_zero(field)
    return list_column(kind, _offsets(column), struct_column(kind.value_type, fields, len(values)))


def _exemplars(kind: pa.ListType, column: pa.ListArray) -> pa.ListArray:
    values, inner = column.flatten(), kind.value_type
    fields = {
        "time_unix_nano": nanoseconds(values.field("time")),
        "trace_id": values.field("trace_id"),
        "span_id": values.field("span_id"),
        "filtered_attributes": pairs_of(inner.field("filtered_attributes").type, values.field("attributes")),
    }
    fields |= _number(values.field("value_int"), values.field("value_double"))
    return list_column(kind, _offsets(column), struct_column(inner, fields, len(values)))
