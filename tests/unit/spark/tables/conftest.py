"""Tables of every kind in a directory, written without Spark: the tasks' files and the driver's commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock.spark.tables import DataFile, Table, TableKind, TableSpec, open_table
from penstock.spark.tables.parts import write_parts

SCHEMA = StructType([StructField("id", LongType()), StructField("k", StringType())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A table, with readers that do not use Penstock."""

    spec: TableSpec

    def open(self) -> Table:
        return open_table(self.spec)

    def write(self, ids: Iterable[int]) -> list[DataFile]:
        """Write files as a task does, with one row for each id."""
        numbers = list(ids)
        rows = pa.record_batch(
            {"id": pa.array(numbers, pa.int64()), "k": [None if n % 3 == 0 else f"k{n % 3}" for n in numbers]}
        )
        return write_parts(self.open().layout(SCHEMA), iter([rows]))

    def ids(self) -> list[int]:
        """Return the ids that a reader without Penstock finds."""
        return sorted(self._read()["id"].to_pylist())

    def _read(self) -> pa.Table:
        if self.spec.kind == "delta":
            from deltalake import DeltaTable

            return DeltaTable(self.spec.path).to_pyarrow_table()
        if self.spec.kind == "iceberg":
            from pyiceberg.catalog import load_catalog

            return (
                load_catalog("default", **self.spec.catalog_options)
                .load_table(self.spec.table)
                .scan()
                .to_arrow()
            )
        return ds.dataset(self.spec.path, format="parquet", partitioning="hive").to_table()


def make_spec(kind: TableKind, root: Path, partition_by: tuple[str, ...] = ()) -> TableSpec:
    if kind != "iceberg":
        return TableSpec(kind=kind, path=str(root / "table"), partition_by=partition_by)
    (root / "warehouse").mkdir(exist_ok=True)
    options = {
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{root}/catalog.db",
        "catalog.warehouse": f"file://{root}/warehouse",
    }
    return TableSpec(kind=kind, table="db.events", partition_by=partition_by, options=options)


def recorded_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the paths that are synced from now on, in order."""
    synced: list[str] = []

    def recording(sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(descriptor: int) -> None:
            sync(descriptor)
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        return record

    monkeypatch.setattr(os, "fsync", recording(os.fsync))
    monkeypatch.setattr(os, "fdatasync", recording(os.fdatasync))
    return synced


@pytest.fixture(params=["delta", "iceberg", "parquet"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A table that is partitioned by a column with nulls."""
    return Place(spec=make_spec(request.param, tmp_path, ("k",)))


@pytest.fixture
def delta(tmp_path: Path) -> Place:
    return Place(spec=make_spec("delta", tmp_path))


@pytest.fixture
def iceberg(tmp_path: Path) -> Place:
    return Place(spec=make_spec("iceberg", tmp_path))


@pytest.fixture
def parquet(tmp_path: Path) -> Place:
    return Place(spec=make_spec("parquet", tmp_path))
