"""Checks that rows fit a table. Pure: both schemas are compared as Arrow schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.config import closest
from penstock.spark.errors import SchemaMismatch

_LEAVES: Final = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)
_UNFIT: Final = frozenset(" ,;{}()\n\t=")
"""Characters that table formats do not allow in column names."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return Spark's schema as an Arrow schema with every column nullable, as a table's files have it.

    Raise `SchemaMismatch` for a column that no table can store.
    """
    folded: dict[str, str] = {}
    for field in schema.fields:
        _check_type(field.name, field.dataType)
        if not field.name or _UNFIT & set(field.name):
            raise SchemaMismatch(
                f"column {field.name!r}: the name of a table's column cannot be empty or contain whitespace "
                f"or any of ',;{{}}()='; rename it in the query (AS ...)"
            )
        twin = folded.setdefault(field.name.lower(), field.name)
        if twin is not field.name:
            raise SchemaMismatch(
                f"columns {twin!r} and {field.name!r} have the same name to a table, which ignores case; "
                "rename one in the query"
            )
    if not schema.fields:
        raise SchemaMismatch("the query has no columns to write")
    arrow = to_arrow_schema(schema, timezone="UTC")
    return pa.schema([field.with_type(retype(field.type)).with_nullable(True) for field in arrow])


def _check_type(name: str, kind: DataType) -> None:
    if isinstance(kind, ArrayType):
        _check_type(f"{name}.element", kind.elementType)
    elif isinstance(kind, MapType):
        _check_type(f"{name}.key", kind.keyType)
        _check_type(f"{name}.value", kind.valueType)
    elif isinstance(kind, StructType):
        for field in kind.fields:
            _check_type(f"{name}.{field.name}", field.dataType)
    elif not isinstance(kind, _LEAVES):
        raise SchemaMismatch(
            f"column {name!r} is of type {kind.simpleString()}, which a table cannot store; "
            f"cast it in the query, for example CAST({name} AS STRING)"
        )


def retype(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType] = lambda kind: kind) -> pa.DataType:
    """Apply `leaf` to every plain type in `kind`, and return the normalised form used to compare and write.

    Large and view types become plain ones. Children are nullable and have the names that Parquet gives them.
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", retype(kind.value_type, leaf)))
    if pa.types.is_map(kind):
        return pa.map_(retype(kind.key_type, leaf), retype(kind.item_type, leaf))
    if pa.types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return pa.struct([pa.field(field.name, retype(field.type, leaf)) for field in fields])
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return leaf(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return leaf(pa.binary())
    if pa.types.is_timestamp(kind):
        return leaf(pa.timestamp("us", "UTC" if kind.tz else None))
    return leaf(kind)


def type_name(kind: pa.DataType) -> str:
    """Return the SQL name of the type."""
    return from_arrow_type(kind).simpleString()


def check_rows_fit(rows: pa.Schema, table: pa.Schema, where: str, *, may_omit: bool) -> None:
    """Raise `SchemaMismatch` unless rows with the schema `rows` can be appended to `where`.

    `table` is the schema of `where`. With `may_omit`, nullable columns of the table may be missing from the
    rows and are filled with null.
    """
    held = {field.name: field for field in table}
    for field in rows:
        there = held.get(field.name)
        if there is None:
            raise SchemaMismatch(_surplus(field, list(held), where))
        given, wanted = retype(field.type), retype(there.type)
        if given != wanted:
            raise SchemaMismatch(
                f"column {field.name!r} is {type_name(given)} in the rows and {type_name(wanted)} in "
                f"{where}; cast it in the query: CAST({field.name} AS {type_name(wanted)}) AS {field.name}"
            )
    for field in table:
        if field.name not in rows.names and not (may_omit and field.nullable):
            raise SchemaMismatch(
                f"{where} has a column {field.name!r} that the rows do not have; add it to the query, "
                f"for example CAST(NULL AS {type_name(retype(field.type))}) AS {field.name}"
            )
        if field.name in rows.names and not field.nullable:
            raise SchemaMismatch(
                f"column {field.name!r} of {where} is declared NOT NULL, which is not checked while "
                "streaming; drop the constraint from the table, or write to another table"
            )


def _surplus(field: pa.Field, held: list[str], where: str) -> str:
    near = closest(field.name, held)
    hint = f"did you mean {near!r}? Or leave it out" if near else "leave it out"
    return (
        f"column {field.name!r} is not in {where}; {hint} in the query, or add it to the table "
        f"({type_name(retype(field.type))})"
    )


def check_partitioning(rows: pa.Schema, columns: Sequence[str], where: str) -> None:
    """Raise `SchemaMismatch` unless the files can be partitioned by the values of `columns`."""
    for name in columns:
        if name not in rows.names:
            near = closest(name, rows.names)
            hint = f"did you mean {near!r}?" if near else f"they are {', '.join(rows.names)}"
            raise SchemaMismatch(f"partitionBy: the rows for {where} have no column {name!r}; {hint}")
        kind = rows.field(name).type
        if not _can_partition(kind):
            raise SchemaMismatch(
                f"partitionBy: column {name!r} is {type_name(kind)}; partition {where} by strings, whole "
                f"numbers, booleans or dates, for example CAST({name} AS DATE)"
            )
    if columns and set(rows.names) == set(columns):
        raise SchemaMismatch(f"partitionBy: {where} needs a column that it is not partitioned by")


def _can_partition(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
    )
