"""The formats `penstock-delta`, `penstock-iceberg` and `penstock-parquet`, for `write` and `writeStream`.

In a stream, a micro-batch is identified by the query's id and the batch number, both from Spark. A batch
write is identified by the options `txnAppId` and `txnVersion`, which `foreachBatch` and repeatable jobs set.
Without them every write is unique.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, Unsupported
from penstock.spark.tables import open_table
from penstock.spark.tables.parts import write_parts
from penstock.spark.tables.spec import TableKind, TableSpec
from penstock.spark.tables.table import DataFile, FileLayout, one_time_app
from penstock.spark.worker import freeze_modules

_QUERY_ID: Final = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """The identity of a batch write: its application and version."""

    app: str
    version: int

    @classmethod
    def take(cls, options: dict[str, str]) -> Txn | None:
        """Remove `txnAppId` and `txnVersion` from `options`. Raise `ConfigError` if only one is given."""
        found = {key.lower(): options.pop(key) for key in list(options) if key.lower().startswith("txn")}
        app, version = found.pop("txnappid", None), found.pop("txnversion", None)
        if found:
            raise ConfigError(f"{', '.join(found)}: unknown option; the two are txnAppId and txnVersion")
        if app is None and version is None:
            return None
        if not app or version is None:
            raise ConfigError("txnAppId and txnVersion: give both or neither")
        if not version.strip().isdigit():
            raise ConfigError(f"txnVersion: expected a whole number of at least 0, found {version!r}")
        return cls(app=app, version=int(version))

    @classmethod
    def unique(cls) -> Txn:
        """Return an identity for a write that is never repeated."""
        return cls(app=one_time_app(), version=0)


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """A task's message to the driver."""

    query: str | None
    files: list[DataFile]


class TableFormat(DataSource):
    """A data source that appends to a table. `TableSpec` and `Txn` describe the options."""

    kind: ClassVar[TableKind]

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        own = dict(options)
        self._txn = Txn.take(own)
        self._spec = TableSpec.parse(self.kind, own)

    @classmethod
    def name(cls) -> str:
        return f"penstock-{cls.kind}"

    def writer(self, schema: StructType, overwrite: bool) -> TableWriter:
        return TableWriter(self._spec, self._layout(schema, overwrite), self._txn or Txn.unique())

    def streamWriter(self, schema: StructType, overwrite: bool) -> TableStreamWriter:
        if self._txn is not None:
            raise ConfigError(
                "txnAppId and txnVersion are for batch writes; a stream takes them from its query"
            )
        return TableStreamWriter(self._spec, self._layout(schema, overwrite))

    def _layout(self, schema: StructType, overwrite: bool) -> FileLayout:
        if overwrite:
            raise Unsupported(
                f"{self.name()} only appends: use mode('append'), or outputMode('append') in a stream"
            )
        table = open_table(self._spec)
        table.prepare(schema)
        return table.layout(schema)


class DeltaFormat(TableFormat):
    """`penstock-delta`: a Delta table at a path."""

    kind = "delta"


class IcebergFormat(TableFormat):
    """`penstock-iceberg`: a table of an Iceberg catalog."""

    kind = "iceberg"


class ParquetFormat(TableFormat):
    """`penstock-parquet`: a folder of Parquet files."""

    kind = "parquet"


class TableWriter(DataSourceArrowWriter):
    """The writer of a batch write: tasks write the files, the driver commits them."""

    def __init__(self, spec: TableSpec, layout: FileLayout, txn: Txn) -> None:
        self._spec = spec
        self._layout = layout
        self._txn = txn

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._layout, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        open_table(self._spec).commit(self._txn.app, self._txn.version, _files(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: Spark also aborts after a commit that raised, and that one may have been applied."""


class TableStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream: tasks write the files of a micro-batch, the driver commits them."""

    def __init__(self, spec: TableSpec, layout: FileLayout) -> None:
        self._spec = spec
        self._layout = layout

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._layout, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        queries = {message.query for message in messages if isinstance(message, Written)}
        if not queries:
            return  # no task, no rows
        query = queries.pop()
        if queries or not query:
            raise Unsupported(
                "Spark does not pass the query id to its tasks, so a repeated micro-batch could not be "
                "detected; use a Spark version that Penstock supports"
            )
        open_table(self._spec).commit(query, batchId, _files(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: Spark also aborts after a commit that raised, and that one may have been applied."""


def _write(layout: FileLayout, rows: Iterator[pa.RecordBatch]) -> Written:
    context = TaskContext.get()
    query = context.getLocalProperty(_QUERY_ID) if context is not None else None
    written = Written(query=query, files=write_parts(layout, rows))
    freeze_modules()
    return written


def _files(messages: Sequence[WriterCommitMessage | None]) -> list[DataFile]:
    return [file for message in messages if isinstance(message, Written) for file in message.files]
