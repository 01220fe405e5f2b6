"""Writing rows to the queue of a database: the writers of `penstock.spark.sink`, behind an encoder.

The promise is theirs: tasks store batch objects, the driver appends all of them in one manifest write under
(application, version), and a version that is there already is not appended again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from penstock.errors import InvalidInput, Unsupported
from penstock.spark.databases.series_columns import SeriesColumns, SeriesLayout
from penstock.spark.databases.series_rows import metrics_records
from penstock.spark.databases.vector_columns import VectorColumns
from penstock.spark.databases.vector_rows import VectorRows, repeated_ids
from penstock.spark.sink import BufferStreamWriter, BufferWriter, Uploaded
from penstock.spark.sink_options import SinkOptions

__all__ = ["SeriesStreamWriter", "SeriesWriter", "UploadedVectors", "VectorStreamWriter", "VectorWriter"]


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
