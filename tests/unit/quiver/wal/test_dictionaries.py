"""Unifying dictionaries: one per field for any batches, with unchanged values and boundaries."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from penstock.quiver.segments.file import has_dictionary, plain_type, unify

pytestmark = pytest.mark.unit


INT8 = pa.int8()


def encoded(values: list[str | None], index: pa.DataType = INT8) -> pa.DictionaryArray:
    """Return an array with its own dictionary, in the order of its values."""
    return pa.array(values, pa.string()).dictionary_encode().cast(pa.dictionary(index, pa.string()))


def in_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 1, None, len(values)], pa.int32()), values)


def in_large_list(values: pa.Array) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array([0, 1, len(values)], pa.int64()), values)


def in_fixed_list(values: pa.Array) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(values, 1)


def in_struct(values: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([values, values], ["x", "y"])


def in_map(values: pa.Array) -> pa.Array:
    keys = pa.array([f"k{place}" for place in range(len(values))])
    return pa.MapArray.from_arrays(pa.array([0, 1, len(values)], pa.int32()), keys, values)


def in_runs(values: pa.Array) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(2, len(values) + 2), pa.int32()), values)


def deep(values: pa.Array) -> pa.Array:
    return in_struct(in_map(in_struct(values)))


NESTINGS = [lambda values: values, in_list, in_large_list, in_fixed_list, in_struct, in_map, in_runs, deep]


def check(arrays: list[pa.Array]) -> pa.Schema:
    batches = [pa.record_batch({"column": array}) for array in arrays]
    unified = unify(batches)
    assert [each.to_pylist() for each in unified] == [each.to_pylist() for each in batches]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, unified[0].schema) as writer:
        for each in unified:
            writer.write_batch(each)
    reader = pa.ipc.open_file(sink.getvalue())
    assert [reader.get_batch(place).to_pylist() for place in range(len(batches))] == [
        each.to_pylist() for each in batches
    ]
    return unified[0].schema


@pytest.mark.parametrize("nest", NESTINGS)
def test_different_dictionaries_are_unified_at_any_depth(
    nest: Callable[[pa.Array], pa.Array],
) -> None:
    arrays = [nest(encoded(["a", "b", None])), nest(encoded(["b", "c", "a"]))]
    assert check(arrays).field(0).type == arrays[0].type


@pytest.mark.parametrize("nest", [nest for nest in NESTINGS if nest is not in_runs])
def test_indices_are_widened_when_the_unified_dictionary_is_too_large(
    nest: Callable[[pa.Array], pa.Array],
) -> None:
    arrays = [nest(encoded([f"{batch}-{place}" for place in range(100)])) for batch in range(3)]
    kind = check(arrays).field(0).type
    assert has_dictionary(kind)
    assert "indices=int16" in str(kind)


def test_columns_that_cannot_be_widened_are_decoded() -> None:
    arrays = [in_runs(encoded([f"{batch}-{place}" for place in range(100)])) for batch in range(3)]
    assert not has_dictionary(check(arrays).field(0).type)


def test_unsigned_indices_are_widened_too() -> None:
    arrays = [encoded([f"{batch}-{place}" for place in range(200)], pa.uint8()) for batch in range(3)]
    assert check(arrays).field(0).type.index_type == pa.int16()


def test_values_that_arrow_cannot_unify_are_decoded() -> None:
    lists = [pa.array([[1], [2, 3]]), pa.array([[7], [2, 3]])]
    arrays = [pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), values) for values in lists]
    assert check(arrays).field(0).type == pa.list_(pa.int64())


def test_a_dictionary_of_dictionaries_is_written() -> None:
    arrays = [
        pa.DictionaryArray.from_arrays(
            pa.array([0, 1], pa.int8()), pa.StructArray.from_arrays([encoded(values)], ["x"])
        )
        for values in (["a", "b"], ["c", "a"])
    ]
    check(arrays)


def test_a_dictionary_in_a_union_is_written() -> None:
    arrays = [
        pa.UnionArray.from_dense(
            pa.array([0, 1, 0], pa.int8()),
            pa.array([0, 0, 1], pa.int32()),
            [encoded(values), pa.array([5], pa.int64())],
        )
        for values in (["a", "b"], ["c", "a"])
    ]
    check(arrays)


def test_slices_keep_their_rows() -> None:
    whole = in_map(encoded(["a", "b", "c", "d"]))
    check([whole[1:], in_map(encoded(["d", "e"]))[:1]])


def test_an_empty_batch_stays_a_batch() -> None:
    check([encoded([]), encoded(["a"]), encoded([])])


def test_a_single_batch_is_unchanged() -> None:
    array = encoded(["a", "b"])
    assert unify([pa.record_batch({"column": array})])[0].column(0).dictionary.equals(array.dictionary)


def test_the_first_schema_applies_to_all_batches() -> None:
    one = pa.record_batch({"n": [1]}).replace_schema_metadata({"from": "one"})
    two = pa.record_batch({"n": [2]}).replace_schema_metadata({"from": "two"})
    assert [each.schema.metadata for each in unify([one, two])] == [{b"from": b"one"}] * 2


def test_batches_without_columns_are_accepted() -> None:
    empty = pa.record_batch([], schema=pa.schema([]))
    assert [each.num_columns for each in unify([empty, empty])] == [0, 0]


def test_the_plain_type_has_no_dictionary_at_any_depth() -> None:
    kind = deep(encoded(["a", "b"])).type
    assert has_dictionary(kind)
    assert not has_dictionary(plain_type(kind))
