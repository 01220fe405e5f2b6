"""Totals in a Delta table, summed once and inserted once."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql.pandas.types import from_arrow_schema
from tests.unit.spark.tables.conftest import Place, recorded_syncs

from penstock.errors import ConfigError, InvalidInput, Unsupported
from penstock.spark.errors import SchemaMismatch, SumTooLarge, VersionBehind
from penstock.spark.tables import TableSpec
from penstock.spark.tables.merge import merge_into

COLUMNS = ["Day", "k", "n", "amount", "last"]
KEYS, ADD = ["Day", "k"], ["n", "amount"]


def rows(*given: tuple[int, str | None, int | None, str | None, str]) -> pa.Table:
    return pa.table(
        {
            "Day": pa.array([row[0] for row in given], pa.date32()),
            "k": pa.array([row[1] for row in given], pa.string()),
            "n": pa.array([row[2] for row in given], pa.int64()),
            "amount": pa.array(
                [None if row[3] is None else Decimal(row[3]) for row in given], pa.decimal128(10, 2)
            ),
            "last": pa.array([row[4] for row in given], pa.string()),
        }
    )


def merge(place: Place, table: pa.Table, version: int) -> bool:
    return merge_into(place.spec, table, keys=KEYS, add=ADD, app="q", version=version)


def held(place: Place) -> dict[str | None, tuple[int | None, Decimal | None, str]]:
    found = DeltaTable(place.spec.path).to_pyarrow_table().to_pylist()
    return {row["k"]: (row["n"], row["amount"], row["last"]) for row in found}


def test_rows_with_known_keys_are_summed_and_others_inserted(delta: Place) -> None:
    assert merge(delta, rows((1, "a", 1, "1.10", "x"), (1, None, 2, None, "y")), 0)
    assert merge(
        delta, rows((1, "a", 5, "1.10", "z"), (1, None, None, "3.00", "w"), (2, "b", 7, None, "v")), 1
    )
    assert held(delta) == {
        "a": (6, Decimal("2.20"), "z"),
        None: (2, Decimal("3.00"), "w"),
        "b": (7, None, "v"),
    }


def test_a_micro_batch_that_is_run_again_is_not_added_twice(delta: Place) -> None:
    table = rows((1, "a", 1, "1.00", "x"))
    assert merge(delta, table, 0)
    assert not merge(delta, table, 0)
    assert held(delta) == {"a": (1, Decimal("1.00"), "x")}
    assert delta.open().rows_by_version("q") == {0: 1}


def test_a_micro_batch_before_the_last_is_refused(delta: Place) -> None:
    merge(delta, rows((1, "a", 1, None, "x")), 5)
    with pytest.raises(VersionBehind):
        merge(delta, rows((1, "a", 1, None, "x")), 4)


def test_no_rows_change_nothing(delta: Place) -> None:
    assert merge(delta, rows(), 0)
    assert held(delta) == {}


def test_equal_keys_in_one_micro_batch_are_refused(delta: Place) -> None:
    with pytest.raises(InvalidInput, match="GROUP BY Day, k"):
        merge(delta, rows((1, None, 1, None, "x"), (1, None, 2, None, "y")), 0)


def test_rows_that_do_not_fit_are_refused(delta: Place) -> None:
    merge(delta, rows((1, "a", 1, None, "x")), 0)
    narrow = rows((1, "a", 1, None, "x")).set_column(4, "last", pa.array([1], pa.int32()))
    with pytest.raises(SchemaMismatch, match="'last'"):
        merge(delta, narrow, 1)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.string()], ids=str)
def test_columns_without_room_for_sums_are_refused(delta: Place, kind: pa.DataType) -> None:
    narrow = pa.table({"k": ["a"], "n": pa.array([1]).cast(kind)})
    with pytest.raises(ConfigError, match=r"CAST\(n AS BIGINT\)"):
        merge_into(delta.spec, narrow, keys=["k"], add=["n"], app="q", version=0)


@pytest.mark.parametrize(
    ("kind", "held", "more"),
    [
        pytest.param(pa.int64(), 2**63 - 1, 1, id="bigint"),
        pytest.param(pa.int64(), -(2**63), -1, id="bigint-below"),
        pytest.param(pa.decimal128(5, 2), Decimal("999.99"), Decimal("1.00"), id="decimal"),
        pytest.param(pa.decimal128(38, 0), Decimal(10**38 - 1), Decimal(1), id="widest-decimal"),
        pytest.param(pa.decimal128(38, 0), Decimal(10**38 - 1), Decimal(10**38 - 1), id="far-too-wide"),
    ],
)
def test_a_total_that_does_not_fit_leaves_the_table_unchanged(
    delta: Place, kind: pa.DataType, held: object, more: object
) -> None:
    def add(number: object, version: int) -> None:
        given = pa.table({"k": ["a", f"b{version}"], "n": pa.array([number, None], kind)})
        merge_into(delta.spec, given, keys=["k"], add=["n"], app="q", version=version)

    add(held, 0)
    with pytest.raises(SumTooLarge, match="a total of n is too large"):
        add(more, 1)
    table = DeltaTable(delta.spec.path)
    assert sorted(table.to_pyarrow_table()["k"].to_pylist()) == ["a", "b0"]
    assert table.transaction_version("q") == 0


def test_the_largest_total_fits(delta: Place) -> None:
    for version, number in enumerate([2**63 - 2, 1]):
        given = pa.table({"k": ["a"], "n": pa.array([number], pa.int64())})
        merge_into(delta.spec, given, keys=["k"], add=["n"], app="q", version=version)
    assert DeltaTable(delta.spec.path).to_pyarrow_table()["n"].to_pylist() == [2**63 - 1]


def test_files_that_a_merge_wrote_are_durable(delta: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows((1, "a", 1, None, "x"))
    delta.open().prepare(from_arrow_schema(table.schema))
    synced = recorded_syncs(monkeypatch)
    for _ in range(2):
        synced.clear()
        merge(delta, table, 0)
        [file] = DeltaTable(delta.spec.path).file_uris()
        entry = f"{delta.spec.path}/_delta_log/{1:020}.json"
        assert synced.index(file) < synced.index(delta.spec.path) < synced.index(entry)


@pytest.mark.parametrize(
    ("keys", "add", "says"),
    [
        pytest.param([], ["n"], "at least one key", id="no-keys"),
        pytest.param(["dya"], ["n"], "no column 'dya'", id="misspelt"),
        pytest.param(["k", "n"], ["n"], "cannot be a key", id="both"),
    ],
)
def test_wrong_columns_are_reported(delta: Place, keys: list[str], add: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        merge_into(delta.spec, rows((1, "a", 1, None, "x")), keys=keys, add=add, app="q", version=0)


def test_only_delta_tables_are_merged_into() -> None:
    with pytest.raises(Unsupported, match="Delta"):
        merge_into(TableSpec(kind="parquet", path="/t"), rows(), keys=KEYS, add=ADD, app="q", version=0)
