"""Checks that rows fit a table, and the messages if they do not."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.errors import SchemaMismatch
from penstock.spark.tables.schema import arrow_schema, check_partitioning, check_rows_fit, retype

ROWS = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("at", TimestampType()),
        StructField("tags", ArrayType(StringType(), containsNull=False)),
        StructField("meta", MapType(StringType(), BinaryType())),
    ]
)


def test_every_column_of_a_file_may_be_null_and_times_are_utc() -> None:
    schema = arrow_schema(ROWS)
    assert all(field.nullable for field in schema)
    assert schema.field("at").type == pa.timestamp("us", "UTC")
    assert schema.field("tags").type == pa.list_(pa.field("element", pa.string()))


@pytest.mark.parametrize(
    ("field", "says"),
    [
        pytest.param(StructField("d", DayTimeIntervalType()), "cast it", id="type"),
        pytest.param(StructField("l", ArrayType(DayTimeIntervalType())), "l.element", id="nested-type"),
        pytest.param(StructField("a b", LongType()), "rename it", id="name"),
        pytest.param(StructField("ID", LongType()), "the same", id="case"),
    ],
)
def test_a_column_that_no_table_can_store_is_refused(field: StructField, says: str) -> None:
    with pytest.raises(SchemaMismatch, match=says):
        arrow_schema(StructType([*ROWS.fields, field]))


def test_large_types_of_a_library_are_the_same_columns() -> None:
    table = pa.schema([("a", pa.large_string()), ("b", pa.large_list(pa.large_binary()))])
    rows = pa.schema([("a", pa.string()), ("b", pa.list_(pa.binary()))])
    check_rows_fit(rows, table, "t", may_omit=False)
    assert retype(pa.large_string()) == pa.string()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        pytest.param([("id", pa.int32()), ("k", pa.string())], r"CAST\(id AS bigint\)", id="type"),
        pytest.param(
            [("id", pa.int64()), ("k", pa.string()), ("x", pa.int8())], "'x' is not in", id="surplus"
        ),
        pytest.param([("idd", pa.int64()), ("k", pa.string())], "did you mean 'id'", id="misspelt"),
        pytest.param([("id", pa.int64())], r"CAST\(NULL AS string\) AS k", id="missing"),
    ],
)
def test_a_mismatch_names_the_column_and_the_remedy(rows: list[tuple[str, pa.DataType]], says: str) -> None:
    table = pa.schema([("id", pa.int64()), ("k", pa.string())])
    with pytest.raises(SchemaMismatch, match=says):
        check_rows_fit(pa.schema(rows), table, "table t", may_omit=False)


def test_a_nullable_column_may_be_omitted_where_the_format_fills_it() -> None:
    table = pa.schema([("id", pa.int64()), ("k", pa.string())])
    check_rows_fit(pa.schema([("id", pa.int64())]), table, "t", may_omit=True)


def test_a_column_that_must_not_be_null_is_refused() -> None:
    table = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    with pytest.raises(SchemaMismatch, match="NOT NULL"):
        check_rows_fit(pa.schema([("id", pa.int64())]), table, "t", may_omit=True)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        pytest.param(["dya"], "did you mean 'day'", id="misspelt"),
        pytest.param(["at"], "CAST", id="type"),
        pytest.param(["day", "n", "at"], "CAST", id="second"),
    ],
)
def test_a_table_is_partitioned_by_columns_of_plain_values(columns: list[str], says: str) -> None:
    rows = arrow_schema(
        StructType(
            [
                StructField("day", DateType()),
                StructField("n", IntegerType()),
                StructField("at", TimestampType()),
            ]
        )
    )
    check_partitioning(rows, ["day", "n"], "t")
    with pytest.raises(SchemaMismatch, match=says):
        check_partitioning(rows, columns, "t")


def test_a_column_must_remain_in_the_files() -> None:
    with pytest.raises(SchemaMismatch, match="needs a column"):
        check_partitioning(pa.schema([("k", pa.string())]), ["k"], "t")
