"""Tables as sinks: Delta, Iceberg and plain Parquet folders, each micro-batch in them once.

Tasks write Parquet files that no reader can see; the driver makes all files of a micro-batch part of the
table in one step and records in the same step which micro-batch of which query they were. Doing it again is a
no-op.
"""

from __future__ import annotations

from penstock.spark.tables.spec import TableKind, TableSpec
from penstock.spark.tables.table import DataFile, Table

__all__ = ["DataFile", "Table", "TableKind", "TableSpec", "open_table"]


def open_table(spec: TableSpec) -> Table:
    """Open the table of a spec. Nothing is contacted yet; raises `Unsupported` if its library is missing."""
    if spec.kind == "delta":
        from penstock.spark.tables.delta import DeltaLog

        return DeltaLog(spec)
    if spec.kind == "iceberg":
        from penstock.spark.tables.iceberg import IcebergTable

        return IcebergTable(spec)
    from penstock.spark.tables.parquet import ParquetFolder

    return ParquetFolder(spec)
