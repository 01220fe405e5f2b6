"""The quick way from columns to the bytes of a request: nest them, then one native call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.otlp.errors import Unflattenable
from penstock.otlp.nest_metrics import metrics_of
from penstock.otlp.nesting import any_of, grouped, list_column, nanoseconds, pairs_of, struct_column
from penstock.otlp.runs import Flags, changes
from penstock.otlp.schema import RESOURCE_COLUMNS, SCOPE_COLUMNS
from penstock.otlp.signal import Signal
from penstock.otlp.slim import handler_of

__all__ = ["nest"]


def nest(batch: pa.RecordBatch, signal: Signal) -> bytes:
    """The request that `batch` is the rows of. Raises `Unflattenable` when it must be filled row by row."""
    handler = handler_of(signal)
    root = handler.schema()
    resources = root.field(0).type
    scopes = resources.value_type.field(1).type
    items = scopes.value_type.field(1).type
    new_resource = changes([batch.column(name) for name in RESOURCE_COLUMNS])
    new_scope = new_resource | changes([batch.column(name) for name in SCOPE_COLUMNS])
    rows, item_of_row = _ROWS[signal](batch, items.value_type, new_scope)
    scope_rows = np.flatnonzero(new_scope)
    resource_rows = np.flatnonzero(new_resource)
    under_scope = list_column(items, grouped(item_of_row[scope_rows], len(rows)), rows)
    inner = _scopes(batch.select(SCOPE_COLUMNS).take(pa.array(scope_rows)), scopes.value_type, under_scope)
    under_resource = grouped(np.searchsorted(scope_rows, resource_rows), len(inner))
    outer = _resources(
        batch.select(RESOURCE_COLUMNS).take(pa.array(resource_rows)),
        resources.value_type,
        list_column(scopes, under_resource, inner),
    )
    request = list_column(resources, np.array([0, len(outer)]), outer)
    whole = pa.RecordBatch.from_arrays([request], schema=root)
    try:
        encoded: bytes = handler.record_batch_to_array(whole)[0].as_py()
    except ValueError as error:
        raise Unflattenable(str(error)) from error
    return encoded


def _resources(heads: pa.RecordBatch, kind: pa.StructType, scopes: pa.ListArray) -> pa.StructArray:
    inner = kind.field("resource").type
    attributes = heads.column("resource_attributes")
    fields = {
        "attributes": pairs_of(inner.field("attributes").type, attributes),
        "dropped_attributes_count": heads.column("resource_dropped_attributes_count"),
        "entity_refs": heads.column("resource_entity_refs"),
    }
    resource = struct_column(inner, fields, len(scopes), attributes.is_null())
    columns = {
        "resource": resource,
        kind.field(1).name: scopes,
        "schema_url": heads.column("resource_schema_url"),
    }
    return struct_column(kind, columns, len(scopes))


def _scopes(heads: pa.RecordBatch, kind: pa.StructType, items: pa.ListArray) -> pa.StructArray:
    inner = kind.field("scope").type
    attributes = heads.column("scope_attributes")
    fields = {
        "name": heads.column("scope_name"),
        "version": heads.column("scope_version"),
        "attributes": pairs_of(inner.field("attributes").type, attributes),
        "dropped_attributes_count": heads.column("scope_dropped_attributes_count"),
    }
    scope = struct_column(inner, fields, len(items), attributes.is_null())
    columns = {"scope": scope, kind.field(1).name: items, "schema_url": heads.column("scope_schema_url")}
    return struct_column(kind, columns, len(items))


_Rows = tuple[pa.StructArray, npt.NDArray[np.int64]]
"""Items, and which item each row belongs to."""


def _spans(batch: pa.RecordBatch, kind: pa.StructType, new_scope: Flags) -> _Rows:
    rows = batch.num_rows
    fields = {name: batch.column(name) for name in batch.schema.names if kind.get_field_index(name) >= 0}
    status = kind.field("status").type
    code, message = batch.column("status_code"), batch.column("status_message")
    no_status = pa.array(np.asarray(code.is_null()) & np.asarray(message.is_null()))
    fields |= {
        "start_time_unix_nano": nanoseconds(batch.column("start_time")),
        "end_time_unix_nano": nanoseconds(batch.column("end_time")),
        "attributes": pairs_of(kind.field("attributes").type, batch.column("attributes")),
        "status": struct_column(status, {"code": code, "message": message}, rows, no_status),
    }
    for name in ("events", "links"):
        fields[name] = _children(batch.column(name), kind.field(name).type)
    return struct_column(kind, fields, rows), np.arange(rows)


def _children(column: pa.ListArray, kind: pa.ListType) -> pa.ListArray:
    """Events or links."""
    inner, values = kind.value_type, column.flatten()
    fields = {field.name: values.field(field.name) for field in values.type}
    if "time" in fields:
        fields["time_unix_nano"] = nanoseconds(fields["time"])
    fields["attributes"] = pairs_of(inner.field("attributes").type, fields["attributes"])
    fields["dropped_attributes_count"] = fields["dropped"]
    lengths = np.asarray(column.value_lengths().fill_null(0), np.int64)
    return list_column(kind, np.append(0, np.cumsum(lengths)), struct_column(inner, fields, len(values)))


def _logs(batch: pa.RecordBatch, kind: pa.StructType, new_scope: Flags) -> _Rows:
    rows = batch.num_rows
    fields = {name: batch.column(name) for name in batch.schema.names if kind.get_field_index(name) >= 0}
    fields |= {
        "time_unix_nano": nanoseconds(batch.column("time")),
        "observed_time_unix_nano": nanoseconds(batch.column("observed_time")),
        "attributes": pairs_of(kind.field("attributes").type, batch.column("attributes")),
        "body": any_of(kind.field("body").type, batch.column("body_any")),
    }
    return struct_column(kind, fields, rows), np.arange(rows)


_ROWS: Final[dict[Signal, Callable[[pa.RecordBatch, pa.StructType, Flags], _Rows]]] = {
    Signal.TRACES: _spans,
    Signal.LOGS: _logs,
    Signal.METRICS: metrics_of,
}
