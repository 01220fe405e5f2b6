"""Conversion of segments for Spark: their columns to Spark's types, and their rows to a query's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import InvalidInput, Unsupported
from penstock.quiver import slot_name, text_view, unified_schema

_UINTS: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_PLAIN: Final = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.null(): pa.string(),
}


def spark_struct(schemas: Sequence[pa.Schema], slot: int, *, view: bool) -> StructType:
    """Return the union of all schemas in Spark's types. Raise `InvalidInput` if there are no schemas."""
    if not schemas:
        raise InvalidInput(
            f"there is no segment of {slot_name(slot)} yet, so its columns are unknown: wait for the first, "
            "or give the columns with .schema(…)"
        )
    if view:
        schemas = [text_view(_empty(schema), slot).schema for schema in schemas]
    adapted = [_adapted(schema) for schema in schemas]
    struct: StructType = from_arrow_schema(unified_schema(adapted), prefer_timestamp_ntz=True)
    return struct


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _adapted(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, spark_arrow_type(field.type, field.name)) for field in schema])


def arrow_target(struct: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark accepts rows of this schema."""
    schema: pa.Schema = to_arrow_schema(struct, timezone="UTC")
    return schema


def spark_arrow_type(kind: pa.DataType, name: str) -> pa.DataType:
    """Return the nearest type that Spark has. Only digits below the microsecond are lost.

    Raise `Unsupported`, naming the column, for a union.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return spark_arrow_type(kind.storage_type, name)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return spark_arrow_type(kind.value_type, name)
    if pa.types.is_union(kind):
        raise Unsupported(f"column {name!r} is a union, which Spark does not have; export it as Parquet")
    if kind.num_fields:
        return _nested(kind, name)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.int64()
    return _UINTS.get(kind) or _PLAIN.get(kind) or _decimal(kind)


def _decimal(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision, 38), kind.scale)
    return kind


def _nested(kind: pa.DataType, name: str) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(spark_arrow_type(kind.key_type, name), spark_arrow_type(kind.item_type, name))
    if pa.types.is_struct(kind):
        fields = (kind.field(place) for place in range(kind.num_fields))
        return pa.struct([pa.field(each.name, spark_arrow_type(each.type, name)) for each in fields])
    return pa.list_(spark_arrow_type(kind.value_type, name))


def to_target(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the columns of `target`. Missing columns are null; additional ones are omitted.

    Raise `InvalidInput` if a column's values do not fit the type in `target`.
    """
    arrays = [_column(batch, field) for field in target]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    place = batch.schema.get_field_index(field.name)
    if place < 0:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(place)
    if column.type == field.type:
        return column
    try:
        return _cast(column, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidInput(f"column {field.name!r} does not fit into {field.type}: {error}") from error


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        return _cast(column.storage, kind)
    if pa.types.is_run_end_encoded(column.type):
        return _cast(pc.run_end_decode(column), kind)
    if pa.types.is_time(column.type):
        wide = pa.int32() if pa.types.is_time32(column.type) else pa.int64()
        return column.view(wide).cast(kind)
    # Only times may lose precision; a number that does not fit is an error.
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


def columns_left_out(schema: pa.Schema, target: pa.Schema) -> list[str]:
    """Return the columns of a segment that the query does not read."""
    return sorted(set(schema.names) - set(target.names))
