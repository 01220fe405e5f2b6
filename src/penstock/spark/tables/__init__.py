"""Table sinks: Delta, Iceberg and plain Parquet folders. Each micro-batch is added exactly once.

Tasks write Parquet files that readers cannot see yet. The driver adds all files of a micro-batch to the
table in one step. The same step records the query and the number of the micro-batch, so repeating it is a
no-op.
"""

from __future__ import annotations

from penstock.spark.tables.spec import TableKind, TableSpec
from penstock.spark.tables.table import DataFile, Table

__all__ = ["DataFile", "Table", "TableKind", "TableSpec", "open_table"]


def open_table(spec: TableSpec) -> Table:
    """Open a table without contacting its store. Raise `Unsupported` if its library is missing."""
    if spec.kind == "delta":
        from penstock.spark.tables.delta import DeltaLog

        return DeltaLog(spec)
    if spec.kind == "iceberg":
        from penstock.spark.tables.iceberg import IcebergTable

        return IcebergTable(spec)
    from penstock.spark.tables.parquet import ParquetFolder

    return ParquetFolder(spec)
