"""Statistics of data files: no value is out of bounds, and readers find every row."""

from __future__ import annotations

import datetime as dt
import json
import math
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.pandas.types import from_arrow_schema
from tests.unit.spark.tables.conftest import make_spec

from penstock.spark.tables.delta import DeltaLog
from penstock.spark.tables.parts import delta_stats, statistics_columns, write_parts

AT = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC)


def stats_text(table: pa.Table, group_rows: int = 1000) -> str:
    sink = pa.BufferOutputStream()
    footers: list[pq.FileMetaData] = []
    names = statistics_columns(table.schema)
    with pq.ParquetWriter(
        sink, table.schema, write_statistics=names or False, metadata_collector=footers
    ) as writer:
        writer.write_table(table, row_group_size=group_rows)
    return delta_stats(footers[0], table.schema)


def stats_of(table: pa.Table, group_rows: int = 1000) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(stats_text(table, group_rows))
    return found


def test_bounds_and_nulls_are_those_of_all_row_groups() -> None:
    table = pa.table(
        {"n": pa.array([5, None, 3, 9, None, None], pa.int64()), "s": ["b", "a", None, "d", "e", "c"]}
    )
    found = stats_of(table, group_rows=2)
    assert found["numRecords"] == 6
    assert (found["minValues"], found["maxValues"]) == ({"n": 3, "s": "a"}, {"n": 9, "s": "e"})
    assert found["nullCount"] == {"n": 3, "s": 1}


def test_times_keep_all_digits() -> None:
    table = pa.table({"at": pa.array([AT], pa.timestamp("us", "UTC")), "day": [AT.date()]})
    assert stats_of(table)["maxValues"] == {"at": "2026-01-31T12:00:00.123456Z", "day": "2026-01-31"}


def test_bounds_are_exact_or_wider_than_the_values() -> None:
    table = pa.table(
        {
            "long": ["x" * 1000],
            "wild": ["a" + chr(0xD7FF) * 63 + "b"],
            "nan": [float("nan")],
            "float": pa.array([1.5], pa.float32()),
            "digits": pa.array([Decimal("12345678901234567890.12")], pa.decimal128(38, 2)),
            "zero": pa.array([Decimal(0)], pa.decimal128(38, 18)),
            "bytes": [b"x"],
            "list": [[1]],
            "void": pa.array([None], pa.int64()),
        }
    )
    text = stats_text(table)
    assert '"digits":12345678901234567890.12,"zero":0.000000000000000000' in text
    found = json.loads(text)
    assert found["minValues"]["long"] == "x" * 64
    assert found["maxValues"]["long"] == "x" * 63 + "y"
    assert found["maxValues"]["wild"] == "a" + chr(0xD7FF) * 62 + chr(0xE000)
    assert found["maxValues"]["nan"] == sys.float_info.max
    assert found["minValues"]["float"] == -3.4028234663852886e38
    assert (
        found["minValues"].keys()
        == found["maxValues"].keys()
        == set(table.column_names)
        - {
            "bytes",
            "list",
            "void",
        }
    )
    assert found["nullCount"]["void"] == 1
    assert "bytes" not in found["nullCount"]


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(pa.array([2**62], pa.int64()).cast(pa.timestamp("us", "UTC")), id="far"),
        pytest.param(pa.array([math.inf]), id="infinity"),
        pytest.param(pa.array([chr(0x10FFFF) * 65]), id="no-greater-text"),
        pytest.param(pa.array(["x" * 5000]), id="text-without-footer-statistics"),
    ],
)
def test_a_column_without_bounds_removes_all_bounds(column: pa.Array) -> None:
    found = stats_of(pa.table({"n": [1], "c": column}))
    assert found == {"numRecords": 1, "nullCount": {"n": 0, "c": 0}}


def test_a_very_wide_file_has_no_bounds() -> None:
    found = stats_of(pa.table({f"c{number}": [1] for number in range(129)}))
    assert "minValues" not in found


VALUES = {
    "n": pa.array([1, 2, 3, None], pa.int64()),
    "f": pa.array([1.5, -2.5, 3.5, None]),
    "g": pa.array([1.5, 2.5, 3.5, None], pa.float32()),
    "nan": pa.array([1.5, float("nan"), 3.5, None]),
    "long": pa.array(["x" * 100, "x" * 99 + "y", "\U0001f600" * 70, None]),
    "whole": pa.array([Decimal(10**37), Decimal(10**37 + 1), Decimal(-(10**37)), None], pa.decimal128(38, 0)),
    "money": pa.array([Decimal("1.10"), Decimal("2.20"), Decimal("-0.01"), None], pa.decimal128(10, 2)),
    "at": pa.array([AT, AT.replace(year=2027), AT.replace(microsecond=1), None], pa.timestamp("us", "UTC")),
    "local": pa.array([0, 1, 2, None], pa.timestamp("us")),
    "day": pa.array([dt.date(2026, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "flag": pa.array([True, False, True, None]),
    "raw": pa.array([b"a", b"b", b"c", None]),
    "void": pa.array([None] * 4, pa.int64()),
    "inf": pa.array([1.5, math.inf, -math.inf, None]),
}


@pytest.mark.parametrize("infinite", [False, True], ids=["finite", "infinite"])
def test_filters_of_readers_find_every_row(tmp_path: Path, infinite: bool) -> None:
    rows = pa.table(VALUES if infinite else {name: VALUES[name] for name in VALUES if name != "inf"})
    log, schema = DeltaLog(make_spec("delta", tmp_path)), from_arrow_schema(rows.schema)
    log.prepare(schema)
    # One file for each pair of rows: some are skipped.
    for version, start in enumerate((0, 2)):
        part = rows.slice(start, 2).combine_chunks().to_batches()
        log.commit("q", version, write_parts(log.layout(schema), iter(part)))
    readers = DeltaTable(str(tmp_path / "table")).to_pyarrow_dataset()
    everything = readers.to_table()
    assert everything.num_rows == 4
    for name in rows.column_names:
        column = pc.field(name)
        # Nothing is compared with NaN: Arrow and engines disagree on what that means.
        values = [value for value in rows[name] if value.is_valid and value.as_py() == value.as_py()]
        conditions = [column.is_null(), column.is_valid()]
        for value in values or [pa.scalar(1)]:
            conditions += [column == value, column > value, column < value, column >= value]
        for condition in conditions:
            found = readers.to_table(filter=condition, columns=["n"])["n"].to_pylist()
            expected = everything.filter(condition)["n"].to_pylist()
            assert sorted(map(str, found)) == sorted(map(str, expected)), condition


def test_rows_in_another_order_than_a_wide_table_are_found(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(40)]
    log = DeltaLog(make_spec("delta", tmp_path))
    log.prepare(from_arrow_schema(pa.schema([(name, pa.int64()) for name in names])))
    rows = pa.record_batch({name: pa.array([1], pa.int64()) for name in reversed(names)})
    log.commit("q", 0, write_parts(log.layout(from_arrow_schema(rows.schema)), iter([rows])))
    readers = DeltaTable(str(tmp_path / "table")).to_pyarrow_dataset()
    assert [readers.count_rows(filter=pc.field(name) == 1) for name in names] == [1] * 40


def test_a_file_without_plain_columns_has_its_rows_counted() -> None:
    assert stats_of(pa.table({"b": [b"x", b"y"]}))["numRecords"] == 2
