"""Conversion of a batch of rows to serialized requests.

Columns are nested first, then converted in one native call. Consecutive rows of one resource and scope share
them in the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.otlp.columns import Flags, changes, offsets_of
from penstock.otlp.messages import handler_of
from penstock.otlp.schema import (
    BOOL,
    BYTES,
    DOUBLE,
    EMPTY,
    INT,
    METRIC_COLUMNS,
    POINT_COLUMNS,
    POINT_TYPES,
    RESOURCE_COLUMNS,
    SCOPE_COLUMNS,
    STR,
    Signal,
    schema_of,
)


def encode(batch: pa.RecordBatch, signal: Signal) -> bytes:
    """Convert rows to a request. Raise `InvalidInput` for columns of another schema.

    Raise `Unsupported` if the extra `collector` is not installed.
    """
    _check_schema(batch, signal)
    return arrow_to_proto(batch, signal)


def _check_schema(batch: pa.RecordBatch, signal: Signal) -> None:
    for field in schema_of(signal):
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            raise InvalidInput(f"the batch has no column {field.name}, which {signal} need")
        if batch.schema.field(place).type != field.type and not pa.types.is_dictionary(field.type):
            raise InvalidInput(
                f"column {field.name} is {batch.schema.field(place).type}, expected {field.type}"
            )


def split(batch: pa.RecordBatch, signal: Signal, limit_bytes: int) -> list[bytes]:
    """Convert rows to requests of at most `limit_bytes`, in order.

    A larger single item gets a separate request that exceeds the limit; the caller decides about it.
    """
    data = encode(batch, signal)
    if len(data) <= limit_bytes or batch.num_rows < 2:
        return [data]
    parts = max(2, min(batch.num_rows, -(-len(data) // max(1, limit_bytes))))
    rows = -(-batch.num_rows // parts)
    found: list[bytes] = []
    for start in range(0, batch.num_rows, rows):
        found += split(batch.slice(start, rows), signal, limit_bytes)
    return found


_LEAVES: Final = (
    ("str", "string_value", STR),
    ("int", "int_value", INT),
    ("double", "double_value", DOUBLE),
    ("bool", "bool_value", BOOL),
    ("bytes", "bytes_value", BYTES),
)


def struct_column(
    kind: pa.StructType, fields: dict[str, pa.Array], length: int, missing: pa.BooleanArray | None = None
) -> pa.StructArray:
    """Build structs of `kind`. Missing fields are null, or zero if they are not nullable."""
    arrays = []
    for field in kind:
        column = fields.get(field.name)
        if column is None:
            column = pa.nulls(length, field.type)
        if column.type != field.type:
            column = column.cast(field.type)
        if not field.nullable and column.null_count:
            column = _filled(column)
        arrays.append(column)
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=missing)


def _filled(column: pa.Array) -> pa.Array:
    """Replace nulls with the default of the protocol: zero or empty."""
    kind = column.type
    if pa.types.is_list(kind):
        return list_column(kind, _offsets(column), column.flatten())
    if pa.types.is_string(kind):
        return column.fill_null("")
    return column.fill_null(b"" if pa.types.is_binary(kind) else False if pa.types.is_boolean(kind) else 0)


def list_column(kind: pa.ListType, offsets: npt.NDArray[np.integer], values: pa.Array) -> pa.ListArray:
    """Build lists of `kind` from their offsets."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def grouped(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Return the offsets of lists that begin at `starts`."""
    return np.append(starts, length)


def nanoseconds(column: pa.TimestampArray) -> pa.UInt64Array:
    """Convert times to unsigned numbers, and null to 0."""
    return column.cast(pa.int64()).fill_null(0).view(pa.uint64())


def pairs_of(kind: pa.ListType, column: pa.MapArray) -> pa.ListArray:
    """Convert attributes to lists of keys and values."""
    start, offsets = offsets_of(column)
    if column.null_count and np.diff(offsets)[np.asarray(column.is_null())].any():
        column = column.take(pa.array(np.arange(len(column))))  # drops the values of null rows
        start, offsets = offsets_of(column)
    length = int(offsets[-1])
    entry = kind.value_type
    values = any_of(entry.field("value").type, column.items.slice(start, length))
    entries = struct_column(entry, {"key": column.keys.slice(start, length), "value": values}, length)
    return list_column(kind, offsets, entries)


def any_of(kind: pa.StructType, column: pa.StructArray) -> pa.StructArray:
    """Convert values of any kind. Raise `InvalidInput` if the column that `type` refers to is null."""
    kinds = np.asarray(column.field("type").fill_null(0), np.int8)
    if column.null_count:
        kinds = np.where(np.asarray(column.is_valid()), kinds, np.int8(EMPTY))
    fields = {}
    for ours, theirs, number in _LEAVES:
        leaf = column.field(ours)
        is_type = kinds == number
        if leaf.null_count == len(leaf):
            is_complete = not is_type.any()
        else:
            valid = np.asarray(leaf.is_valid())
            is_complete = bool(valid[is_type].all())
            fields[theirs] = leaf if (valid == is_type).all() else pc.if_else(pa.array(is_type), leaf, None)
        if not is_complete:
            raise InvalidInput(f"a value has the type {number}, but its column {ours} is null")
    fields |= _opaque(column, kinds)
    return struct_column(kind, fields, len(column), column.is_null() if column.null_count else None)


def _opaque(column: pa.StructArray, kinds: npt.NDArray[np.int8]) -> dict[str, pa.Array]:
    """Return the values that are stored serialized, without their tag and length. There are few of them."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    cells: dict[str, list[object]] = {}
    serialized = column.field("ser")
    for place in np.flatnonzero(~_IS_LEAF[kinds.view(np.uint8)]).tolist():
        data: bytes | None = serialized[place].as_py()
        if data is None:
            continue
        try:
            value = AnyValue.FromString(data)
        except DecodeError as error:
            raise InvalidInput(f"the column ser of a value is not an AnyValue: {error}") from error
        name = value.WhichOneof("value")
        if name is None:
            continue
        if name not in _OPAQUE_TYPES:
            raise InvalidInput(f"the column ser of a value contains a {name}, which has a separate column")
        inner = getattr(value, name)
        content = inner if name == _REFERENCE else inner.SerializeToString()
        cells.setdefault(name, [None] * len(column))[place] = content
    return {name: pa.array(values, _OPAQUE_TYPES[name]) for name, values in cells.items()}


_REFERENCE: Final = "string_value_strindex"
_OPAQUE_TYPES: Final = {"array_value": pa.binary(), "kvlist_value": pa.binary(), _REFERENCE: pa.int32()}
_IS_LEAF: Final = np.isin(np.arange(256), [EMPTY, *(number for _, _, number in _LEAVES)])
"""For every `type`, whether a separate column holds the value or there is no value."""


def _without_zeros(column: pa.DoubleArray) -> pa.DoubleArray:
    """Replace 0.0 with null, because the protocol omits it. Keep -0.0."""
    return pc.if_else(pc.equal(column.view(pa.int64()), 0), None, column)


_POINT: Final = (*POINT_COLUMNS, "exemplars", "attributes")


def metrics_of(
    batch: pa.RecordBatch, kind: pa.StructType, new_scope: Flags
) -> tuple[pa.StructArray, npt.NDArray[np.int64]]:
    """Return the metrics of all rows, and the metric index of each row. Raise `InvalidInput`."""
    new = new_scope | changes([batch.column(name) for name in METRIC_COLUMNS])
    starts = np.flatnonzero(new)
    lengths = np.diff(np.append(starts, batch.num_rows))
    heads = batch.select(METRIC_COLUMNS).take(pa.array(starts))
    points = batch.select(_POINT)
    fields = {name: heads.column(name) for name in ("name", "description", "unit")}
    fields["metadata"] = pairs_of(kind.field("metadata").type, heads.column("metadata"))
    known = 0
    for name in POINT_TYPES:
        is_kind = np.asarray(pc.fill_null(pc.equal(heads.column("type"), name), False))
        if is_kind.any():
            known += int(is_kind.sum())
            rows = points.filter(pc.equal(batch.column("type"), name))
            fields[name] = _data(kind.field(name).type, heads, rows, np.where(is_kind, lengths, 0), is_kind)
    if known != len(starts):
        found = next(name for name in heads.column("type").to_pylist() if name not in POINT_TYPES)
        raise InvalidInput(f"a metric cannot be of type {found!r}; expected one of {', '.join(POINT_TYPES)}")
    return struct_column(kind, fields, len(starts)), np.cumsum(new) - 1


def _data(
    kind: pa.StructType,
    heads: pa.RecordBatch,
    rows: pa.RecordBatch,
    lengths: npt.NDArray[np.int64],
    is_kind: Flags,
) -> pa.StructArray:
    """Build the part of the metrics with the points of one type. It is null for metrics of other types."""
    points = kind.field("data_points").type
    fields = {
        "data_points": list_column(
            points, np.append(0, np.cumsum(lengths)), _points(points.value_type, rows)
        ),
        "aggregation_temporality": heads.column("temporality"),
        "is_monotonic": heads.column("is_monotonic"),
    }
    return struct_column(kind, fields, len(is_kind), pa.array(~is_kind))


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
        fields["sum"] = _without_zeros(rows.column("sum"))
    if "zero_threshold" in names:
        fields["zero_threshold"] = _without_zeros(rows.column("zero_threshold"))
    return struct_column(kind, fields, rows.num_rows)


def _number(whole: pa.Int64Array, real: pa.DoubleArray) -> dict[str, pa.Array]:
    if whole.null_count < len(whole) and real.null_count < len(real):
        real = pc.if_else(whole.is_valid(), None, real)  # a oneof: a number cannot be both
    return {"as_int": whole, "as_double": real}


def _buckets(kind: pa.StructType, column: pa.StructArray) -> pa.StructArray:
    fields = {"offset": column.field("offset"), "bucket_counts": column.field("counts")}
    return struct_column(kind, fields, len(column), column.is_null())


def _offsets(column: pa.ListArray) -> npt.NDArray[np.int64]:
    return np.append(0, np.cumsum(np.asarray(column.value_lengths().fill_null(0), np.int64)))


def _quantiles(kind: pa.ListType, column: pa.ListArray) -> pa.ListArray:
    values = column.flatten()
    fields = {name: _without_zeros(values.field(name)) for name in ("quantile", "value")}
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


def arrow_to_proto(batch: pa.RecordBatch, signal: Signal) -> bytes:
    """Convert rows with the columns of `signal` to a request. Raise `InvalidInput` for invalid values."""
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
        raise InvalidInput(f"the rows cannot be converted to a request: {error}") from error
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
"""The items, and the item index of each row."""


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
    """Convert events or links."""
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
