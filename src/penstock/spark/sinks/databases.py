"""The formats `penstock-timeseries` and `penstock-vector`, for `write` and `writeStream`.

Both write to the queue that feeds a database. An `Encoding` holds their differences: the conversion of rows
into records, and the checks of a whole write.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.errors import InvalidInput, Unsupported
from penstock.spark.sinks.buffer import BufferStreamWriter, BufferWriter, Uploaded
from penstock.spark.sinks.options import SinkOptions, split_options
from penstock.spark.sinks.series import (
    SERIES_FORMAT,
    SERIES_OPTIONS,
    SeriesColumns,
    SeriesLayout,
    metrics_records,
)
from penstock.spark.sinks.vectors import (
    VECTOR_FORMAT,
    VECTOR_OPTIONS,
    VectorColumns,
    VectorRows,
    repeated_ids,
)

Store: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Uploaded]
Messages: TypeAlias = Sequence[WriterCommitMessage | None]


class Encoding(Protocol):
    """The conversion of rows into the records of a database's queue. It is pickled for the tasks."""

    def store(self, rows: Iterator[pa.RecordBatch], store: Store) -> Uploaded:
        """Store the records of one task. Raise `InvalidInput` for invalid rows."""
        ...

    def check(self, messages: Messages) -> None:
        """Raise `InvalidInput` if the rows of all tasks are inconsistent with each other."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PointEncoding:
    """The encoding of rows as points of time series."""

    columns: SeriesColumns
    layout: SeriesLayout

    def store(self, rows: Iterator[pa.RecordBatch], store: Store) -> Uploaded:
        return store(metrics_records(rows, self.columns, self.layout))

    def check(self, messages: Messages) -> None:
        """Accept every write: points of several tasks are independent."""


@dataclass(frozen=True, kw_only=True)
class UploadedVectors(Uploaded):
    """A task's message to the driver, with the values for the checks of the whole write."""

    digests: bytes
    dimensions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorEncoding:
    """The encoding of rows as upserts and deletions of vectors, with each id once in a write."""

    columns: VectorColumns
    attributes: tuple[str, ...]

    def store(self, rows: Iterator[pa.RecordBatch], store: Store) -> UploadedVectors:
        encoder = VectorRows(self.columns, self.attributes)
        uploaded = store(encoder.records(rows))
        return UploadedVectors(
            partition=uploaded.partition,
            query=uploaded.query,
            shard=uploaded.shard,
            batches=uploaded.batches,
            digests=encoder.digests,
            dimensions=encoder.dimensions,
        )

    def check(self, messages: Messages) -> None:
        uploaded = [message for message in messages if isinstance(message, UploadedVectors)]
        repeated_ids(message.digests for message in uploaded)
        found = sorted({message.dimensions for message in uploaded if message.dimensions is not None})
        if len(found) > 1:
            raise InvalidInput(f"the vectors of one write have {' and '.join(map(str, found))} components")


class DatabaseWriter(BufferWriter):
    """The writer of a batch write to the queue of a database."""

    def __init__(self, options: SinkOptions, encoding: Encoding) -> None:
        super().__init__(options)
        self._encoding = encoding

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        return _unsharded(self._encoding.store(iterator, super().write))

    def commit(self, messages: Messages) -> None:
        """Append the records of all tasks.

        Raise `InvalidInput` and append nothing if they are inconsistent with each other.
        """
        self._encoding.check(messages)
        super().commit(messages)


class DatabaseStreamWriter(BufferStreamWriter):
    """The writer of a stream to the queue of a database."""

    def __init__(self, options: SinkOptions, encoding: Encoding) -> None:
        super().__init__(options)
        self._encoding = encoding

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        return _unsharded(self._encoding.store(iterator, super().write))

    def commit(self, messages: Messages, batchId: int) -> None:
        """Append the records of all tasks, as a batch write does."""
        self._encoding.check(messages)
        super().commit(messages, batchId)


def _unsharded(uploaded: Uploaded) -> Uploaded:
    if uploaded.shard is not None:
        raise Unsupported(
            "the queue has shards, and a database reads only from a queue without shards: use another "
            "manifest_path"
        )
    return uploaded


class DatabaseFormat(DataSource):
    """A sink for the queue of a database. A subclass provides the options and the encoding."""

    format_name: ClassVar[str]
    own_options: ClassVar[Sequence[str]]

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._own, self._queue = split_options(options, self.own_options, self.format_name)

    @classmethod
    def name(cls) -> str:
        return cls.format_name

    @abstractmethod
    def _encoding(self, schema: StructType) -> Encoding:
        """Return the encoding for rows with this schema. Raise `ConfigError` if the schema does not fit."""

    def writer(self, schema: StructType, overwrite: bool) -> DatabaseWriter:
        self._refuse_overwriting(overwrite)
        return DatabaseWriter(self._queue, self._encoding(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DatabaseStreamWriter:
        self._refuse_overwriting(overwrite)
        return DatabaseStreamWriter(self._queue, self._encoding(schema))

    def _refuse_overwriting(self, overwrite: bool) -> None:
        if overwrite:
            raise Unsupported(
                f"{self.format_name} only appends to the queue of a database: use mode('append'), or "
                "outputMode('append') in a stream"
            )


class TimeSeriesFormat(DatabaseFormat):
    """Points for a time series database. See `SeriesColumns`."""

    format_name = SERIES_FORMAT
    own_options = SERIES_OPTIONS

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._columns = SeriesColumns.parse(self._own)

    def _encoding(self, schema: StructType) -> PointEncoding:
        return PointEncoding(columns=self._columns, layout=self._columns.layout(schema))


class VectorFormat(DatabaseFormat):
    """Vectors and deletions for a collection. See `VectorColumns`."""

    format_name = VECTOR_FORMAT
    own_options = VECTOR_OPTIONS

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._columns = VectorColumns.parse(self._own)

    def _encoding(self, schema: StructType) -> VectorEncoding:
        return VectorEncoding(columns=self._columns, attributes=self._columns.attribute_columns(schema))
