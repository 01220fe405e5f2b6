"""Rows by partition value: every row in one group, values as text, and folders that readers understand."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.spark.tables.parts import NULL_FOLDER, exact_folder, safe_folder, split

ROWS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", ""]), st.sampled_from([None, 1, 2])), min_size=0, max_size=60
)


def batch(rows: list[tuple[str | None, int | None]]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "k": pa.array([row[0] for row in rows], pa.string()),
            "n": pa.array([row[1] for row in rows], pa.int32()),
            "id": pa.array(range(len(rows)), pa.int64()),
        }
    )


@given(ROWS)
def test_every_row_is_in_the_group_of_its_values_and_in_order(
    rows: list[tuple[str | None, int | None]],
) -> None:
    seen: list[int] = []
    for values, group in split(batch(rows), ["k", "n"], keep=False):
        assert group.schema.names == ["id"]
        ids = group.column("id").to_pylist()
        assert ids == sorted(ids)
        for row in ids:
            k, n = rows[row]
            assert dict(values) == {"k": k or None, "n": None if n is None else str(n)}
        seen += ids
    assert sorted(seen) == list(range(len(rows)))


def test_values_are_text_that_every_reader_parses() -> None:
    rows = pa.record_batch(
        {
            "d": pa.array([dt.date(2026, 1, 31)]),
            "b": pa.array([True]),
            "n": pa.array([-5]),
            "id": pa.array([0]),
        }
    )
    assert split(rows, ["d", "b", "n"], keep=False)[0][0] == (("d", "2026-01-31"), ("b", "true"), ("n", "-5"))


def test_a_batch_of_one_value_is_not_copied() -> None:
    rows = batch([("a", 1)] * 100)
    [(_, group)] = split(rows, ["k", "n"], keep=True)
    assert group.column("id").buffers()[1].address == rows.column("id").buffers()[1].address


def test_kept_columns_keep_the_empty_string() -> None:
    assert split(batch([("", 1)]), ["k"], keep=True)[0][0] == (("k", ""),)
    assert split(batch([("", 1)]), ["k"], keep=False)[0][0] == (("k", None),)


def test_folders_have_the_names_that_other_writers_use() -> None:
    assert exact_folder((("day", "2026-01-31"), ("k", None))) == f"day=2026-01-31/k={NULL_FOLDER}"


@pytest.mark.parametrize("value", ["a/b", "12:30", "50%", "a=b", "what?", 'say "x"', "tab\t"])
def test_a_value_that_readers_would_misread_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match="regexp_replace"):
        exact_folder((("k", value),))


def test_a_folder_whose_name_is_not_read_takes_any_value() -> None:
    assert safe_folder((("k", "a/b: 50%"), ("n", None))) == f"k=a_b__50_/n={NULL_FOLDER}"
    assert len(safe_folder((("k", "x" * 5000),))) < 200
