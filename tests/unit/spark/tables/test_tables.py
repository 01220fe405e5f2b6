"""The contract that every kind of table keeps."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import DateType, IntegerType, LongType, StringType, StructField, StructType
from tests.unit.spark.tables.conftest import SCHEMA, Place, make_spec

from penstock.errors import PenstockError
from penstock.spark.errors import SchemaMismatch, VersionBehind
from penstock.spark.tables import TableSpec, open_table
from penstock.spark.tables.parts import write_parts


def test_readers_see_a_micro_batch_when_it_is_committed(place: Place) -> None:
    table = place.open()
    table.prepare(SCHEMA)
    files = place.write(range(9))
    assert (
        place.ids() == []
        if place.spec.kind != "parquet"
        else not any(Path(place.spec.path).glob("*.parquet"))
    )
    assert table.commit("q", 0, files)
    assert place.ids() == list(range(9))
    assert table.row_count() == 9


def test_a_micro_batch_that_is_run_again_adds_nothing(place: Place) -> None:
    place.open().prepare(SCHEMA)
    assert place.open().commit("q", 0, place.write(range(9)))
    place.open().prepare(SCHEMA)
    assert not place.open().commit("q", 0, place.write(range(9)))
    assert place.ids() == list(range(9))


def test_a_micro_batch_before_the_last_is_refused(place: Place) -> None:
    table = place.open()
    table.prepare(SCHEMA)
    table.commit("q", 4, place.write(range(3)))
    with pytest.raises(VersionBehind, match=r"micro-batch 4 of q.* this one is 3.*checkpoint"):
        table.commit("q", 3, place.write(range(3, 6)))
    assert place.ids() == [0, 1, 2]


def test_every_query_has_its_own_versions(place: Place) -> None:
    table = place.open()
    table.prepare(SCHEMA)
    table.commit("a", 7, place.write([0, 1]))
    table.commit("b", 0, place.write([2, 3]))
    assert (table.last_version("a"), table.last_version("b"), table.last_version("c")) == (7, 0, None)
    assert place.ids() == [0, 1, 2, 3]


def test_the_table_records_the_rows_of_every_micro_batch(place: Place) -> None:
    table = place.open()
    table.prepare(SCHEMA)
    for version in range(3):
        table.commit("q", version, place.write(range(10 * version, 10 * version + version + 1)))
    table.commit("other", 0, place.write([99]))
    assert place.open().rows_by_version("q") == {0: 1, 1: 2, 2: 3}


def test_an_empty_micro_batch_changes_nothing(place: Place) -> None:
    table = place.open()
    table.prepare(SCHEMA)
    assert table.commit("q", 0, [])
    assert table.last_version("q") is None


def test_a_missing_table_is_empty(place: Place) -> None:
    table = place.open()
    assert (table.last_version("q"), table.rows_by_version("q"), table.row_count()) == (None, {}, 0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param([StructField("id", IntegerType())], "CAST", id="type"),
        pytest.param(
            [StructField("id", LongType()), StructField("x", LongType())], "'x' is not in", id="surplus"
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_they_are_written(
    place: Place, fields: list[StructField], says: str
) -> None:
    place.open().prepare(SCHEMA)
    with pytest.raises(SchemaMismatch, match=says):
        place.open().prepare(StructType([*fields, StructField("k", StringType())]))


def test_another_partitioning_is_refused(place: Place, tmp_path: Path) -> None:
    place.open().prepare(SCHEMA)
    open_table(make_spec(place.spec.kind, tmp_path)).prepare(SCHEMA)
    with pytest.raises(SchemaMismatch, match=r"partitioned by \(k\), not by \(id\)"):
        open_table(make_spec(place.spec.kind, tmp_path, ("id",))).prepare(SCHEMA)


def test_a_table_can_be_partitioned_by_dates_numbers_and_flags(place: Place, tmp_path: Path) -> None:
    schema = StructType(
        [StructField("id", LongType()), StructField("day", DateType()), StructField("n", IntegerType())]
    )
    (tmp_path / "typed").mkdir()
    typed = Place(spec=make_spec(place.spec.kind, tmp_path / "typed", ("day", "n")))
    typed.open().prepare(schema)
    rows = pa.record_batch(
        {
            "id": pa.array([1, 2], pa.int64()),
            "day": pa.array([20000, None], pa.date32()),
            "n": pa.array([-1, 7], pa.int32()),
        }
    )
    typed.open().commit("q", 0, write_parts(typed.open().layout(schema), iter([rows])))
    assert typed.ids() == [1, 2]


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_location_that_cannot_be_written_is_reported(kind: str) -> None:
    # Not even root can create folders there.
    spec = TableSpec(kind=kind, path="/proc/penstock/table")  # type: ignore[arg-type]
    with pytest.raises(PenstockError, match=r"/proc/penstock/table.* cannot be"):
        open_table(spec).prepare(SCHEMA)
