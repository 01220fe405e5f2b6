"""Rows as upserts and deletions, read back by the collection's own reader."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.spark.sinks.schemas import schema_of

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sinks import vectors as vector_rows
from penstock.spark.sinks.options import split_options
from penstock.spark.sinks.vectors import (
    DELETE_PAYLOAD,
    UPSERT_PAYLOAD,
    VECTOR_FORMAT,
    VECTOR_OPTIONS,
    VectorColumns,
    VectorRows,
    repeated_ids,
)
from penstock.vector import Collection, Vector, model, records
from penstock.vector.delta import TOMBSTONE, Entry
from penstock.vector.records import decode_record

Row = dict[str, object]
DIMENSIONS = 3
TYPES = {
    "id": pa.string(),
    "vector": pa.list_(pa.float64()),
    "title": pa.string(),
    "pages": pa.int32(),
    "price": pa.float64(),
    "sold": pa.bool_(),
    "gone": pa.bool_(),
}
ATTRIBUTES = ("title", "pages", "price", "sold")


def batch(rows: list[Row], **types: pa.DataType) -> pa.RecordBatch:
    kinds = TYPES | types
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()]
    return pa.RecordBatch.from_arrays(arrays, list(kinds))


def row(name: str = "a", **more: object) -> Row:
    return {"id": name, "vector": [1.0, 0.0, 0.5]} | more


def written(*batches: pa.RecordBatch, rows: VectorRows | None = None) -> list[tuple[str, Entry]]:
    encoder = rows or VectorRows(VectorColumns(delete="gone"), ATTRIBUTES)
    return [
        entry
        for made in encoder.records(batches)
        for record, payload in zip(*(made.column(n).to_pylist() for n in ("value", "metadata")), strict=True)
        for entry in decode_record(record, payload)
    ]


def test_the_limits_and_the_payloads_are_those_of_the_database() -> None:
    assert (UPSERT_PAYLOAD, DELETE_PAYLOAD) == (records.UPSERT_METADATA, records.DELETE_METADATA)
    assert vector_rows.ID_BYTES_MAX == model.ID_BYTES_MAX
    assert vector_rows.COMPONENT_MAX == model.COMPONENT_MAX
    assert vector_rows.TEXT_BYTES_MAX == model._TEXT_BYTES_MAX


texts = st.text(st.characters(codec="utf-8"), max_size=200)
rows_of_vectors = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.text(st.characters(codec="utf-8"), min_size=1, max_size=15),
            "vector": st.lists(
                st.floats(-(2.0**49), 2.0**49, width=32), min_size=DIMENSIONS, max_size=DIMENSIONS
            ),
            "title": st.one_of(st.none(), texts),
            "pages": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
            "price": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
            "sold": st.one_of(st.none(), st.booleans()),
            "gone": st.one_of(st.none(), st.booleans()),
        }
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda one: one["id"],
)


@given(rows_of_vectors, st.integers(0, 3))
def test_every_row_is_one_upsert_or_one_deletion(rows: list[Row], before: int) -> None:
    found = written(batch([row()] * before + rows)[before:])
    assert len(found) == len(rows)
    entries = dict(found)
    for one in rows:
        entry = entries[str(one["id"])]
        if one["gone"]:
            assert entry is TOMBSTONE
            continue
        assert isinstance(entry, Vector)
        assert entry.vector.tolist() == one["vector"]
        kept = {name: one[name] for name in ATTRIBUTES if one[name] is not None}
        assert dict(entry.attributes) == kept
        assert [type(value) for value in entry.attributes.values()] == [
            type(value) for value in kept.values()
        ]
        Collection(dimensions=DIMENSIONS).check(entry)


def test_a_deletion_does_not_need_a_vector() -> None:
    assert written(batch([row("a", vector=None, gone=True)])) == [("a", TOMBSTONE)]


def test_large_batches_make_records_of_a_bounded_size() -> None:
    count, dimensions = 3000, 256
    made = pa.RecordBatch.from_pydict(
        {
            "id": [f"doc-{number}" for number in range(count)],
            "vector": pa.ListArray.from_arrays(
                np.arange(count + 1, dtype=np.int32) * dimensions,
                np.arange(count * dimensions, dtype=np.float32),
            ),
        }
    )
    (records_made,) = VectorRows(VectorColumns(), ()).records([made, made[:0]])
    sizes = [len(record) for record in records_made.column("value").to_pylist()]
    assert len(sizes) > 2
    assert max(sizes) <= vector_rows.RECORD_BYTES


WRONG_ROWS: dict[str, tuple[list[Row], str]] = {
    "no id": ([{"id": None, "vector": [1.0]}], "id is null or empty"),
    "an empty id": ([row("")], "id is null or empty"),
    "a long id": ([row(), row("é" * 33)], "at most 64 bytes: 'ééé"),
    "an id twice": ([row("a"), row("b"), row("a")], "id 'a' occurs in several rows of one write"),
    "deleted as well": ([row("a"), row("a", gone=True)], "id 'a' occurs in several rows of one write"),
    "no vector": ([row("a"), row("b", vector=None)], "null in 1 rows, such as that of 'b'"),
    "an empty vector": ([row("a", vector=[])], "'a' has 0 components"),
    "another length": ([row("a"), row("b", vector=[1.0])], "'b' has 1 components, not 3"),
    "a null component": ([row("a", vector=[1.0, None, 2.0])], "null components"),
    "no number": ([row("a", vector=[1.0, math.nan, 2.0])], "outside -1e15 to 1e15"),
    "too large": ([row("a", vector=[1.0, 1e300, 2.0])], "outside -1e15 to 1e15"),
    "a long text": ([row("a", title="x" * 65_536)], "title has a text of 65536 bytes"),
    "an attribute that is no number": ([row("a", price=math.nan)], "price is infinite or NaN"),
}


@pytest.mark.parametrize("case", sorted(WRONG_ROWS))
def test_rows_that_the_collection_would_reject_are_reported_before_anything_is_stored(case: str) -> None:
    rows, problem = WRONG_ROWS[case]
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        written(batch(rows))


def test_the_length_of_vectors_is_one_for_all_batches_of_a_task() -> None:
    with pytest.raises(InvalidInput, match="'b' has 2 components, not 3"):
        written(batch([row("a")]), batch([row("b", vector=[1.0, 2.0])]))
    told = VectorRows(VectorColumns(dimensions=2), ())
    with pytest.raises(InvalidInput, match="'a' has 3 components, not 2"):
        written(batch([row("a")]), rows=told)


def test_an_id_in_two_tasks_is_found_by_the_whole_write() -> None:
    tasks = [VectorRows(VectorColumns(), ATTRIBUTES) for _ in range(2)]
    written(batch([row("a"), row("b")]), batch([row("c")]), rows=tasks[0])
    written(batch([row("d")]), rows=tasks[1])
    repeated_ids(task.digests for task in tasks)
    written(batch([row("c")]), rows=tasks[1])
    with pytest.raises(InvalidInput, match="1 rows repeat the id of another row"):
        repeated_ids(task.digests for task in tasks)
    repeated_ids([])


WRONG_COLUMNS: dict[str, tuple[str, dict[str, str], str]] = {
    "no id": ("vector array<float>", {}, "no column 'id'; they have vector"),
    "a number as id": ("id bigint, vector array<float>", {}, "'id' is bigint, and must be string"),
    "a text as vector": ("id string, vector string", {}, "must be array<float> or array<double>"),
    "a time": (
        "id string, vector array<float>, at timestamp",
        {},
        "'at' is timestamp, and must be string or",
    ),
    "no such attribute": ("id string, vector array<float>", {"attributes": "x"}, "no column 'x'"),
    "a text as flag": ("id string, vector array<float>, d string", {"delete": "d"}, "must be boolean"),
    "the name of the vector": (
        "id string, e array<float>, vector string",
        {"vector": "e"},
        "cannot have the name 'vector'",
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG_COLUMNS))
def test_columns_that_are_not_a_vector_are_reported_before_anything_runs(case: str) -> None:
    ddl, options, problem = WRONG_COLUMNS[case]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        VectorColumns.parse(options).attribute_columns(schema_of(ddl))


WRONG_OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "dimensions": ({"dimensions": "many"}, "dimensions: expected a whole number"),
    "none": ({"dimensions": "0"}, "expected 1 to 65535"),
    "a column twice": ({"attributes": "id"}, "named twice"),
    "no name": ({"id": " "}, "id: expected the name of a column"),
    "an unknown one": ({"deleted": "x"}, "did you mean 'delete'"),
}


@pytest.mark.parametrize("case", sorted(WRONG_OPTIONS))
def test_options_that_cannot_work_are_reported(case: str) -> None:
    options, problem = WRONG_OPTIONS[case]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        VectorColumns.parse(split_options({"store": "q"} | options, VECTOR_OPTIONS, VECTOR_FORMAT)[0])


def test_options_survive_a_round_trip() -> None:
    columns = VectorColumns(id="i", vector="v", attributes=("a",), delete="d", dimensions=4)
    assert VectorColumns.parse(columns.to_options()) == columns
    assert VectorColumns.parse(VectorColumns().to_options()) == VectorColumns()
