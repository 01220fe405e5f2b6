"""Tables as sinks: Delta, Iceberg and plain Parquet folders, each micro-batch in them once.

Tasks write Parquet files that no reader can see; the driver makes all files of a micro-batch part of the
table in one step and records in the same step which micro-batch of which query they were. Doing it again is a
no-op.
"""

from __future__ import annotations

from penstock.spark.tables.errors import SchemaMismatch, VersionBehind
from penstock.spark.tables.spec import TableKind, TableSpec
from penstock.spark.tables.table import DataFile, Table, open_table

__all__ = ["DataFile", "SchemaMismatch", "Table", "TableKind", "TableSpec", "VersionBehind", "open_table"]
