"""Totals in a Delta table: added up once, inserted once."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.unit.spark.tables.conftest import Place

from penstock.errors import ConfigError, InvalidInput, Unsupported
from penstock.spark.tables import SchemaMismatch, TableSpec, VersionBehind
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


def test_known_keys_are_added_up_and_others_inserted(delta: Place) -> None:
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


def test_a_micro_batch_behind_the_last_is_refused(delta: Place) -> None:
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
    narrow = rows((1, "a", 1, None, "x")).set_column(2, "n", pa.array([1], pa.int32()))
    with pytest.raises(SchemaMismatch, match="'n'"):
        merge(delta, narrow, 1)


@pytest.mark.parametrize(
    ("keys", "add", "says"),
    [
        pytest.param([], ["n"], "at least one key", id="no-keys"),
        pytest.param(["dya"], ["n"], "no column 'dya'", id="misspelt"),
        pytest.param(["k", "n"], ["n"], "cannot be a key", id="both"),
    ],
)
def test_wrong_columns_are_told(delta: Place, keys: list[str], add: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        merge_into(delta.spec, rows((1, "a", 1, None, "x")), keys=keys, add=add, app="q", version=0)


def test_only_delta_tables_are_merged_into() -> None:
    with pytest.raises(Unsupported, match="Delta"):
        merge_into(TableSpec(kind="parquet", path="/t"), rows(), keys=KEYS, add=ADD, app="q", version=0)
