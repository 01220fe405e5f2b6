"""The five kinds of data points, each in columns of its own, into one table in the order of the message."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from penstock.otlp.context import Places
from penstock.otlp.nested import attributes, ids, list_of, times
from penstock.otlp.schema import (
    BUCKETS,
    EXEMPLARS,
    METRICS,
    NUMBER_COLUMNS,
    POINT_TYPES,
    QUANTILES,
    SPAN_ID,
    TRACE_ID,
)

__all__ = ["points"]

_OF_METRIC: Final = ("name", "description", "unit")
_OF_POINT: Final = (
    "start_time",
    "time",
    "flags",
    "value_int",
    "value_double",
    *NUMBER_COLUMNS,
    "positive",
    "negative",
    "quantiles",
    "exemplars",
    "attributes",
    "temporality",
    "is_monotonic",
    "type",
)


def points(metrics: pa.StructArray) -> tuple[dict[str, pa.Array], Places]:
    """The columns of all points, and which metric each is of."""
    parts: list[dict[str, pa.Array]] = []
    owners: list[Places] = []
    for kind in POINT_TYPES:
        data = metrics.field(kind)
        if data.null_count == len(data):
            continue
        lists = data.flatten()[data.type.get_field_index("data_points")]
        owner = _owners(lists)
        parts.append(_columns(kind, data, lists, owner))
        owners.append(owner)
    metric_of_row = np.concatenate(owners) if owners else np.zeros(0, np.int64)
    order = np.argsort(metric_of_row, kind="stable")
    columns = {name: _join(name, parts, order) for name in _OF_POINT}
    metric_of_row = metric_of_row[order]
    by_metric = pa.array(metric_of_row)
    columns |= {name: metrics.field(name).take(by_metric) for name in _OF_METRIC}
    columns["metadata"] = attributes(metrics.field("metadata")).take(by_metric)
    columns["dropped_attributes_count"] = pa.nulls(len(metric_of_row), pa.uint32())
    return columns, metric_of_row


def _owners(lists: pa.ListArray) -> Places:
    """The metric of every point; a metric of another kind has no list at all."""
    lengths = np.asarray(lists.value_lengths().fill_null(0), np.int64)
    return np.repeat(np.arange(len(lists), dtype=np.int64), lengths)


def _join(name: str, parts: list[dict[str, pa.Array]], order: Places) -> pa.Array:
    kind = METRICS.field(name).type
    if not any(name in part for part in parts):
        return pa.nulls(len(order), kind)
    if len(parts) == 1:
        return parts[0][name]
    pieces = [part[name] if name in part else pa.nulls(len(part["type"]), kind) for part in parts]
    return pa.concat_arrays(pieces).take(pa.array(order))


def _columns(kind: str, data: pa.StructArray, lists: pa.ListArray, owner: Places) -> dict[str, pa.Array]:
    """The columns that points of `kind` have."""
    rows = lists.flatten()
    by_metric = pa.array(owner)
    names = {field.name for field in rows.type}
    found = {
        "type": pa.array([kind], pa.string()).take(pa.array(np.zeros(len(rows), np.int64))),
        "start_time": times(rows.field("start_time_unix_nano")),
        "time": times(rows.field("time_unix_nano")),
        "flags": rows.field("flags"),
        "attributes": attributes(rows.field("attributes")),
    }
    found |= {
        name: rows.field(name).cast(METRICS.field(name).type) for name in NUMBER_COLUMNS if name in names
    }
    for ours, theirs in (("temporality", "aggregation_temporality"), ("is_monotonic", "is_monotonic")):
        if data.type.get_field_index(theirs) >= 0:
            found[ours] = data.field(theirs).take(by_metric)
    if "as_int" in names:
        found |= {"value_int": rows.field("as_int"), "value_double": rows.field("as_double")}
    if "exemplars" in names:
        found["exemplars"] = _exemplars(rows.field("exemplars"))
    if "positive" in names:
        found |= {name: _buckets(rows.field(name)) for name in ("positive", "negative")}
    if "quantile_values" in names:
        found["quantiles"] = _quantiles(rows.field("quantile_values"))
    return found


def _buckets(buckets: pa.StructArray) -> pa.StructArray:
    counts = buckets.field("bucket_counts").cast(BUCKETS.field("counts").type)
    return pa.StructArray.from_arrays(
        [buckets.field("offset"), counts], fields=list(BUCKETS), mask=buckets.is_null()
    )


def _quantiles(lists: pa.ListArray) -> pa.ListArray:
    values = lists.flatten()
    return list_of(lists, QUANTILES, {"quantile": values.field("quantile"), "value": values.field("value")})


def _exemplars(lists: pa.ListArray) -> pa.ListArray:
    values = lists.flatten()
    fields = {
        "time": times(values.field("time_unix_nano")),
        "value_int": values.field("as_int"),
        "value_double": values.field("as_double"),
        "trace_id": ids(values.field("trace_id"), TRACE_ID),
        "span_id": ids(values.field("span_id"), SPAN_ID),
        "attributes": attributes(values.field("filtered_attributes")),
    }
    return list_of(lists, EXEMPLARS, fields)
