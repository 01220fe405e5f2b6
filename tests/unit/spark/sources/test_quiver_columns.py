"""Arrow's types in Spark, and the conversion of batches to the schema of a query."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.errors import InvalidInput, Unsupported
from penstock.quiver.tools.dataset import known_schema, text_view
from penstock.spark.sources.quiver_columns import (
    arrow_target,
    spark_arrow_type,
    spark_struct,
    to_target,
)

pytestmark = pytest.mark.unit


def through_spark(array: pa.Array) -> pa.Array:
    """Return the array in the form that Spark receives."""
    batch = pa.record_batch({"c": array})
    target = arrow_target(spark_struct([batch.schema], 63, view=False))
    return to_target(batch, target).column(0)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array([b"0123456789abcdef"], pa.binary(16)), [b"0123456789abcdef"]),
        (pa.array([2**64 - 1, None], pa.uint64()), [Decimal(2**64 - 1), None]),
        (pa.array([2**32 - 1], pa.uint32()), [2**32 - 1]),
        (pa.array([255], pa.uint8()), [255]),
        (pa.array([[1, 2**63]], pa.list_(pa.uint64())), [[Decimal(1), Decimal(2**63)]]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array(["x"], pa.string_view()), ["x"]),
        (pa.array([[1]], pa.large_list(pa.int8())), [[1]]),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [[1, 2]]),
        (pa.array([None], pa.null()), [None]),
        (pa.RunEndEncodedArray.from_arrays([2], ["x"]), ["x", "x"]),
        (pa.array([1500], pa.time32("ms")), [1500]),
        (pa.array([True, None]), [True, None]),
    ],
)
def test_values_of_every_type_are_preserved(array: pa.Array, expected: list[object]) -> None:
    assert through_spark(array).to_pylist() == expected


def test_times_are_cut_to_microseconds_at_any_depth() -> None:
    times = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC"))
    moment = dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=dt.UTC)
    assert through_spark(times).to_pylist() == [moment]
    inside = pa.ListArray.from_arrays(
        pa.array([0, 1], pa.int32()), pa.StructArray.from_arrays([times], ["t"])
    )
    assert through_spark(inside).to_pylist() == [[{"t": moment}]]


def test_attributes_become_a_map_of_structs() -> None:
    kind = pa.map_(pa.string(), pa.struct([("type", pa.int8()), ("int", pa.int64())]))
    array = pa.array([[("k", {"type": 3, "int": 7})], None, []], kind)
    assert through_spark(array).to_pylist() == array.to_pylist()


def test_a_union_is_refused_by_name() -> None:
    kind = pa.union([pa.field("a", pa.int8())], "sparse")
    with pytest.raises(Unsupported, match="'mixed'"):
        spark_arrow_type(kind, "mixed")


def test_columns_are_found_by_name_and_missing_ones_are_null() -> None:
    target = pa.schema([("b", pa.int64()), ("z", pa.string())])
    got = to_target(pa.record_batch({"a": [1], "b": [2]}), target)
    assert got.to_pydict() == {"b": [2], "z": [None]}


def test_values_that_do_not_fit_are_an_error_and_not_changed() -> None:
    with pytest.raises(InvalidInput, match="'n'"):
        to_target(pa.record_batch({"n": [300]}), pa.schema([("n", pa.int8())]))


def test_the_schema_has_the_columns_of_all_segments() -> None:
    one, two = pa.schema([("a", pa.int64())]), pa.schema([("a", pa.int64()), ("b", pa.string())])
    assert spark_struct([one, two], 63, view=False).names == ["a", "b"]


def test_unknown_columns_are_an_error_before_the_first_segment() -> None:
    with pytest.raises(InvalidInput, match=r"\.schema"):
        spark_struct([], 63, view=False)


@pytest.mark.parametrize("slot", [50, 51, 52])
def test_signals_have_their_columns_before_the_first_segment(slot: int) -> None:
    schema = known_schema(slot)
    assert schema is not None
    for view in (False, True):
        struct = spark_struct([schema], slot, view=view)
        assert "service_name" in struct.names
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        to_target(text_view(empty, slot) if view else empty, arrow_target(struct))


def test_raw_requests_are_bytes_and_others_have_no_view() -> None:
    schema = known_schema(60)
    assert schema is not None
    assert schema.names == ["data"]
    assert known_schema(63) is None
    with pytest.raises(Unsupported, match="view"):
        text_view(pa.record_batch({"a": [1]}), 63)
