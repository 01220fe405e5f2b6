"""The quick way from columns to the bytes of a request: nest them, then one native call.

Flat columns back into the nested ones that the native encoder takes: what `nested` does, taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.otlp.columns import Unflattenable, field_content, offsets_of
from penstock.otlp.messages import handler_of
from penstock.otlp.schema import (
    ARRAY,
    BOOL,
    BYTES,
    DOUBLE,
    INT,
    MAP,
    METRIC_COLUMNS,
    OTHER,
    POINT_COLUMNS,
    POINT_TYPES,
    RESOURCE_COLUMNS,
    SCOPE_COLUMNS,
    STR,
    Signal,
)

Flags = npt.NDArray[np.bool_]


def changes(columns: Sequence[pa.Array]) -> Flags:
    """For every row whether one of `columns` differs from the row before; the first row always does."""
    rows = len(columns[0])
    found = np.zeros(rows, np.bool_)
    if rows:
        found[0] = True
        for column in columns:
            found[1:] |= ~same(column.slice(1), column.slice(0, rows - 1))
    return found


def same(left: pa.Array, right: pa.Array) -> Flags:
    """Row by row, whether two arrays of one type hold the same; null is like null, and NaN like itself."""
    kind = left.type
    if pa.types.is_dictionary(kind):
        return same(left.dictionary_decode(), right.dictionary_decode())
    valid, other_valid = _flags(left.is_valid()), _flags(right.is_valid())
    if pa.types.is_struct(kind):
        equal = np.ones(len(left), np.bool_)
        for one, other in zip(left.flatten(), right.flatten(), strict=True):
            equal &= same(one, other)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        equal = _same_lists(left, right)
    else:
        equal = _same_leaves(left, right)
    found: Flags = (valid == other_valid) & (equal | ~valid)
    return found


def _same_leaves(left: pa.Array, right: pa.Array) -> Flags:
    if pa.types.is_floating(left.type):
        left, right = left.view(pa.int64()), right.view(pa.int64())
    return _flags(pc.fill_null(pc.equal(left, right), False))


def _same_lists(left: pa.Array, right: pa.Array) -> Flags:
    left_offsets, right_offsets = np.asarray(left.offsets, np.int64), np.asarray(right.offsets, np.int64)
    lengths = np.diff(left_offsets)
    equal: Flags = lengths == np.diff(right_offsets)
    lengths = np.where(equal, lengths, 0)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    left_places = np.repeat(left_offsets[:-1], lengths) + within
    right_places = np.repeat(right_offsets[:-1], lengths) + within
    children = [(left.values, right.values)]
    if pa.types.is_map(left.type):
        children = [(left.keys, right.keys), (left.items, right.items)]
    row_of = np.repeat(np.arange(len(left)), lengths)
    for one, other in children:
        alike = same(one.take(pa.array(left_places)), other.take(pa.array(right_places)))
        equal[row_of[~alike]] = False
    return equal


def _flags(column: pa.BooleanArray) -> Flags:
    found: Flags = np.asarray(column, np.bool_)
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
    """Structs of `kind`; fields that are not given are zero, or null where they may be."""
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
    """Nulls as what the protocol leaves out: zero, or nothing."""
    kind = column.type
    if pa.types.is_list(kind):
        _, offsets = offsets_of(column)
        return pa.ListArray.from_arrays(pa.array(offsets), _within(column), type=kind)
    if pa.types.is_string(kind):
        return column.fill_null("")
    return column.fill_null(b"" if pa.types.is_binary(kind) else False if pa.types.is_boolean(kind) else 0)


def _within(lists: pa.ListArray) -> pa.Array:
    start, offsets = offsets_of(lists)
    if lists.null_count and len(lists.flatten()) != int(offsets[-1]):
        raise Unflattenable("a list that is null holds values")
    return lists.values.slice(start, int(offsets[-1]))


def list_column(kind: pa.ListType, offsets: npt.NDArray[np.integer], values: pa.Array) -> pa.ListArray:
    """Lists of `kind` from the offsets of their ends."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def grouped(starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """The offsets of lists that begin at `starts`."""
    return np.append(starts, length)


def nanoseconds(column: pa.TimestampArray) -> pa.UInt64Array:
    """Times as the protocol has them: unsigned, 0 for an unknown one."""
    return column.cast(pa.int64()).fill_null(0).view(pa.uint64())


def pairs_of(kind: pa.ListType, column: pa.MapArray) -> pa.ListArray:
    """Attributes as lists of keys and values."""
    start, offsets = offsets_of(column)
    length = int(offsets[-1])
    if column.null_count:
        lengths = np.diff(offsets)
        if lengths[np.asarray(column.is_null())].any():
            raise Unflattenable("attributes that are null hold some")
    entry = kind.value_type
    values = any_of(entry.field("value").type, column.items.slice(start, length))
    entries = struct_column(entry, {"key": column.keys.slice(start, length), "value": values}, length)
    return list_column(kind, offsets, entries)


def any_of(kind: pa.StructType, column: pa.StructArray) -> pa.StructArray:
    """Values of any kind. Raises `Unflattenable` where their cells do not agree with their `type`."""
    kinds = np.asarray(column.field("type").fill_null(0), np.int8)
    if column.null_count:
        kinds = np.where(np.asarray(column.is_valid()), kinds, np.int8(0))
    fields = {}
    for ours, theirs, number in _LEAVES:
        leaf = column.field(ours)
        wanted = kinds == number
        if leaf.null_count == len(leaf):
            agrees = not wanted.any()
        else:
            agrees = bool((np.asarray(leaf.is_valid()) == wanted).all())
            fields[theirs] = leaf
        if not agrees:
            raise Unflattenable(f"some values have a type that is not that of their cell {ours}")
    fields |= _opaque(column, kinds)
    return struct_column(kind, fields, len(column), column.is_null() if column.null_count else None)


def _opaque(column: pa.StructArray, kinds: npt.NDArray[np.int8]) -> dict[str, pa.Array]:
    """Arrays and maps without the tag and the length in front of them. There are few."""
    if (kinds >= OTHER).any() or (kinds < 0).any():
        raise Unflattenable("a value of a kind that has no column")
    fields: dict[str, pa.Array] = {}
    serialized = column.field("ser")
    for name, number in (("array_value", ARRAY), ("kvlist_value", MAP)):
        places = np.flatnonzero(kinds == number)
        if len(places):
            cells: list[bytes | None] = [None] * len(column)
            for place in places.tolist():
                cells[place] = field_content(serialized[place].as_py(), number)
            fields[name] = pa.array(cells, pa.binary())
    return fields


def refuse_negative_zero(column: pa.DoubleArray) -> None:
    """The native encoder leaves -0.0 out where 0.0 is the default. Raises `Unflattenable` if there is one."""
    values = np.asarray(column.fill_null(1.0))
    if (np.signbit(values) & (values == 0)).any():
        raise Unflattenable("a number is -0.0")


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
