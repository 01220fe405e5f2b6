from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

from penstock.buffer import CompressionType, InvalidInputError
from penstock.buffer.batch import decode_batch, encode_batch
from penstock.errors import ConfigError
from penstock.spark.sinks.buffer import BatchRows, check_columns, gather


def batch(values: list[bytes | None], metadata: list[bytes | None] | None = None) -> pa.RecordBatch:
    arrays = [pa.array(values, pa.binary())]
    if metadata is None:
        return pa.RecordBatch.from_arrays(arrays, names=["value"])
    return pa.RecordBatch.from_arrays([*arrays, pa.array(metadata, pa.binary())], names=["value", "metadata"])


def read(rows: BatchRows) -> list[bytes]:
    return decode_batch(memoryview(encode_batch(rows.chunks, CompressionType.NONE).to_bytes())).to_list()


def metadata_of_records(rows: BatchRows) -> list[bytes]:
    """Return the metadata of every record, as a reader would assign it."""
    starts = [start for start, _ in rows.runs] + [rows.count]
    return [run for place, (start, run) in enumerate(rows.runs) for _ in range(start, starts[place + 1])]


rows_of_a_task = st.lists(
    st.lists(st.tuples(st.binary(max_size=30), st.sampled_from([b"", b"x", b"yy", None])), max_size=12),
    max_size=5,
)


@given(rows_of_a_task, st.integers(1, 120))
def test_rows_keep_their_order_and_their_metadata(
    task: list[list[tuple[bytes, bytes | None]]], bytes_max: int
) -> None:
    found = list(gather((batch([v for v, _ in rows], [m for _, m in rows]) for rows in task), bytes_max))
    expected = [row for rows in task for row in rows]
    assert [record for rows in found for record in read(rows)] == [value for value, _ in expected]
    assert [payload for rows in found for payload in metadata_of_records(rows)] == [
        payload or b"" for _, payload in expected
    ]
    for rows in found:
        assert rows.count == sum(map(len, rows.chunks)) > 0
        assert rows.weight <= bytes_max or rows.count == 1
        assert all(before[1] != after[1] for before, after in zip(rows.runs, rows.runs[1:], strict=False))


def test_no_rows_give_no_batch() -> None:
    assert list(gather([], 100)) == []
    assert list(gather([batch([]), batch([], [])], 100)) == []


def test_pieces_are_filled_across_record_batches() -> None:
    found = list(gather([batch([b"x" * 92]) for _ in range(10)], 500))
    assert [rows.count for rows in found] == [5, 5]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary()], ids=str)
def test_text_is_stored_as_its_bytes(kind: pa.DataType) -> None:
    values = pa.array(["a", "", "zwölf"], pa.string()).cast(pa.binary()).cast(kind)
    (rows,) = gather([pa.RecordBatch.from_arrays([values], names=["value"])], 1000)
    assert read(rows) == [b"a", b"", "zwölf".encode()]
    assert rows.runs == [(0, b"")]


def test_a_null_value_is_rejected() -> None:
    with pytest.raises(InvalidInputError, match="null in 2 rows"):
        list(gather([batch([b"a", None, None])], 1000))


def test_metadata_that_changes_with_every_row_is_refused_before_it_fills_the_manifest() -> None:
    values, metadata = [b""] * 2000, [b"%1000d" % n for n in range(2000)]
    with pytest.raises(InvalidInputError, match="Sort the rows by it"):
        list(gather([batch(values, metadata)], 1 << 20))
    (rows,) = gather([batch(values, sorted(payload[:1] for payload in metadata))], 1 << 20)
    assert len(rows.runs) == 1


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("value: binary", None),
        ("value: string, metadata: binary", None),
        ("metadata: binary, value: binary", None),
        ("value: string, id: bigint", "not 'id'"),
        ("value: bigint", "is bigint, and must be binary or string"),
        ("value: string, metadata: string", "is string, and must be binary"),
        ("metadata: binary", "the rows do not have"),
        ("value: string, value: string", "twice"),
    ],
)
def test_columns_are_checked_before_anything_is_written(schema: str, complaint: str | None) -> None:
    kinds = {"binary": BinaryType(), "string": StringType(), "bigint": LongType()}
    fields = StructType()
    for column in schema.split(", "):
        name, kind = column.split(": ")
        fields = fields.add(name, kinds[kind])
    if complaint is None:
        check_columns(fields)
    else:
        with pytest.raises(ConfigError, match=complaint):
            check_columns(fields)
