"""The files of tasks: large enough, few in memory, and with the columns of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.objects import StoreConfig
from penstock.spark.tables import parts
from penstock.spark.tables.parts import write_parts
from penstock.spark.tables.table import FileLayout

ROWS = pa.schema([("id", pa.int64()), ("k", pa.string())])


def layout(root: Path, **given: object) -> FileLayout:
    plain = FileLayout(
        store=StoreConfig(url=str(root)), rows=ROWS, files=ROWS, target_file_bytes=1 << 20, statistics="delta"
    )
    return replace(plain, **given)  # type: ignore[arg-type]


def batch(ids: range, keys: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "k": [f"k{n % keys}" for n in ids]})


def test_many_small_batches_become_one_row_group(tmp_path: Path) -> None:
    [file] = write_parts(layout(tmp_path), iter([batch(range(n, n + 10)) for n in range(0, 1000, 10)]))
    footer = pq.read_metadata(tmp_path / file.path)
    assert (footer.num_rows, footer.num_row_groups, file.rows) == (1000, 1, 1000)
    assert file.size == (tmp_path / file.path).stat().st_size


def test_a_new_file_begins_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 10_000)
    made = layout(tmp_path, target_file_bytes=5_000, compression="none")
    files = write_parts(made, iter([batch(range(n, n + 1000)) for n in range(0, 10_000, 1000)]))
    assert len(files) > 2
    assert sum(file.rows for file in files) == 10_000
    assert len({file.path for file in files}) == len(files)


def test_many_values_do_not_keep_as_many_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "OPEN_FILES_MAX", 8)
    divided = layout(tmp_path, partition_by=("k",), files=pa.schema([("id", pa.int64())]))
    files = write_parts(divided, iter([batch(range(n, n + 60), keys=20) for n in range(0, 240, 60)]))
    assert sum(file.rows for file in files) == 240
    assert {file.partition for file in files} == {(("k", f"k{n}"),) for n in range(20)}


def test_memory_is_bounded_over_all_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WAITING_BYTES_MAX", 4_000)
    divided = layout(tmp_path, partition_by=("k",), files=pa.schema([("id", pa.int64())]))
    files = write_parts(divided, iter([batch(range(n, n + 500), keys=3) for n in range(0, 2000, 500)]))
    assert len(files) > 3
    assert sum(file.rows for file in files) == 2000


def test_columns_are_put_in_the_tables_order_and_types(tmp_path: Path) -> None:
    rows = pa.record_batch({"k": ["a"], "id": pa.array([1], pa.int32())})
    [file] = write_parts(layout(tmp_path), iter([rows]))
    assert pq.read_table(tmp_path / file.path).to_pylist() == [{"id": 1, "k": "a"}]


def test_no_rows_give_no_file(tmp_path: Path) -> None:
    assert write_parts(layout(tmp_path), iter([batch(range(0))])) == []
    assert write_parts(layout(tmp_path, partition_by=("k",)), iter([])) == []
