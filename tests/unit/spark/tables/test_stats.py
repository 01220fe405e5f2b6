"""Statistics of data files: exact, or left out."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.tables.stats import delta_stats, statistics_columns

AT = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC)


def stats_of(table: pa.Table, group_rows: int = 1000) -> dict[str, dict[str, object]]:
    sink = pa.BufferOutputStream()
    footers: list[pq.FileMetaData] = []
    names = statistics_columns(table.schema)
    with pq.ParquetWriter(
        sink, table.schema, write_statistics=names or False, metadata_collector=footers
    ) as writer:
        writer.write_table(table, row_group_size=group_rows)
    found: dict[str, dict[str, object]] = json.loads(delta_stats(footers[0], table.schema))
    return found


def test_bounds_and_nulls_are_those_of_all_row_groups() -> None:
    table = pa.table(
        {"n": pa.array([5, None, 3, 9, None, None], pa.int64()), "s": ["b", "a", None, "d", "e", "c"]}
    )
    found = stats_of(table, group_rows=2)
    assert found["numRecords"] == 6
    assert (found["minValues"], found["maxValues"]) == ({"n": 3, "s": "a"}, {"n": 9, "s": "e"})
    assert found["nullCount"] == {"n": 3, "s": 1}


def test_times_have_all_their_digits() -> None:
    table = pa.table({"at": pa.array([AT], pa.timestamp("us", "UTC")), "day": [AT.date()]})
    assert stats_of(table)["maxValues"] == {"at": "2026-01-31T12:00:00.123456Z", "day": "2026-01-31"}


def test_what_cannot_be_said_exactly_is_left_out() -> None:
    table = pa.table(
        {
            "long": ["x" * 1000],
            "nan": [float("nan")],
            "exact": pa.array([Decimal("1.50")], pa.decimal128(10, 2)),
            "digits": pa.array([Decimal("12345678901234567890.12")], pa.decimal128(38, 2)),
            "bytes": [b"x"],
            "list": [[1]],
            "far": pa.array([2**62], pa.int64()).cast(pa.timestamp("us", "UTC")),
        }
    )
    found = stats_of(table)
    assert found["maxValues"] == {"exact": 1.5}
    assert "bytes" not in found["nullCount"]


def test_a_file_without_plain_columns_has_its_rows_counted() -> None:
    assert stats_of(pa.table({"b": [b"x", b"y"]}))["numRecords"] == 2
