"""The formats `penstock-timeseries` and `penstock-vector`, for `write` and `writeStream`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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


class TimeSeriesFormat(DataSource):
    """Points for a time series database, into the queue that feeds it. See `SeriesColumns`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        own, self._queue = split_options(options, SERIES_OPTIONS, SERIES_FORMAT)
        self._columns = SeriesColumns.parse(own)

    @classmethod
    def name(cls) -> str:
        return SERIES_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> SeriesWriter:
        _refuse_overwriting(self.name(), overwrite)
        return SeriesWriter(self._queue, self._columns, self._columns.layout(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SeriesStreamWriter:
        _refuse_overwriting(self.name(), overwrite)
        return SeriesStreamWriter(self._queue, self._columns, self._columns.layout(schema))


class VectorFormat(DataSource):
    """Vectors and deletions for a collection, into the queue that feeds it. See `VectorColumns`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        own, self._queue = split_options(options, VECTOR_OPTIONS, VECTOR_FORMAT)
        self._columns = VectorColumns.parse(own)

    @classmethod
    def name(cls) -> str:
        return VECTOR_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> VectorWriter:
        _refuse_overwriting(self.name(), overwrite)
        return VectorWriter(self._queue, self._columns, self._columns.attribute_columns(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> VectorStreamWriter:
        _refuse_overwriting(self.name(), overwrite)
        return VectorStreamWriter(self._queue, self._columns, self._columns.attribute_columns(schema))


def _refuse_overwriting(name: str, overwrite: bool) -> None:
    if overwrite:
        raise Unsupported(
            f"{name} only appends to the queue of a database: use mode('append'), or "
            "outputMode('append') in a stream"
        )


@dataclass(frozen=True, kw_only=True)
class UploadedVectors(Uploaded):
    """What one task tells the driver, with what only the whole write can be checked for."""

    digests: bytes
    dimensions: int | None


class SeriesWriter(BufferWriter):
    """Points to the queue of a time series database, as one batch write."""

    def __init__(self, options: SinkOptions, columns: SeriesColumns, layout: SeriesLayout) -> None:
        super().__init__(options)
        self._columns, self._layout = columns, layout

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        return _unsharded(super().write(metrics_records(iterator, self._columns, self._layout)))


class SeriesStreamWriter(BufferStreamWriter):
    """The same for a stream."""

    def __init__(self, options: SinkOptions, columns: SeriesColumns, layout: SeriesLayout) -> None:
        super().__init__(options)
        self._columns, self._layout = columns, layout

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        return _unsharded(super().write(metrics_records(iterator, self._columns, self._layout)))


class VectorWriter(BufferWriter):
    """Upserts and deletions to the queue of a collection, as one batch write."""

    def __init__(self, options: SinkOptions, columns: VectorColumns, attributes: tuple[str, ...]) -> None:
        super().__init__(options)
        self._columns, self._attributes = columns, attributes

    def write(self, iterator: Iterator[pa.RecordBatch]) -> UploadedVectors:
        rows = VectorRows(self._columns, self._attributes)
        return _with_ids(super().write(rows.records(iterator)), rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """As for a queue. Raises `InvalidInput`, and appends nothing, if an id is in several rows."""
        _check_whole(messages)
        super().commit(messages)


class VectorStreamWriter(BufferStreamWriter):
    """The same for a stream."""

    def __init__(self, options: SinkOptions, columns: VectorColumns, attributes: tuple[str, ...]) -> None:
        super().__init__(options)
        self._columns, self._attributes = columns, attributes

    def write(self, iterator: Iterator[pa.RecordBatch]) -> UploadedVectors:
        rows = VectorRows(self._columns, self._attributes)
        return _with_ids(super().write(rows.records(iterator)), rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """As for a queue. Raises `InvalidInput`, and appends nothing, if an id is in several rows."""
        _check_whole(messages)
        super().commit(messages, batchId)


def _unsharded(uploaded: Uploaded) -> Uploaded:
    if uploaded.shard is not None:
        raise Unsupported(
            "the queue has shards, and a database is fed from a queue without: give it a manifest of its own"
        )
    return uploaded


def _with_ids(uploaded: Uploaded, rows: VectorRows) -> UploadedVectors:
    _unsharded(uploaded)
    return UploadedVectors(
        partition=uploaded.partition,
        query=uploaded.query,
        shard=uploaded.shard,
        batches=uploaded.batches,
        digests=rows.digests,
        dimensions=rows.dimensions,
    )


def _check_whole(messages: Iterable[WriterCommitMessage | None]) -> None:
    uploaded = [message for message in messages if isinstance(message, UploadedVectors)]
    repeated_ids(message.digests for message in uploaded)
    found = sorted({message.dimensions for message in uploaded if message.dimensions is not None})
    if len(found) > 1:
        raise InvalidInput(f"the vectors of one write have {' and '.join(map(str, found))} components")
