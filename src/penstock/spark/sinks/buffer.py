"""The format `penstock-buffer`: a source of a queue's records, and a sink that appends to it.

Tasks store batch objects, and the driver appends all of them in one manifest write:

1. Each task stores its rows as batch objects and reports their locations to the driver. Objects of a failed
   or superseded task attempt are never appended; the queue's consumer deletes them as garbage.
2. `commit` appends the objects of the successful attempts, in the order of the partitions, under a
   transaction: the query's id and the number of the micro-batch. Repeating it after a crash, even with other
   objects, is a no-op.
3. `abort` deletes nothing: Spark also calls it after a `commit` that raised but may have been applied.

All rows of one application go into one shard of a sharded queue. This keeps them in order, in one manifest
write, and in one transaction log.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.blocking import loop_thread
from penstock.buffer import (
    InvalidInputError,
    Metadata,
    StoredBatch,
    Transaction,
    append_batches,
    shard_config,
    store_batch,
)
from penstock.clock import SYSTEM_CLOCK
from penstock.codec import RecordChunk, as_binary_array
from penstock.errors import ConfigError, Rejected, Unavailable, Unsupported
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy
from penstock.spark.sinks.options import SinkOptions
from penstock.spark.sources.base import check_schema
from penstock.spark.sources.buffer import BufferReader, BufferStreamReader
from penstock.spark.sources.buffer_options import FORMAT, BufferOptions
from penstock.spark.sources.columns import COLUMNS, spark_schema
from penstock.spark.sources.queues import find_shards
from penstock.spark.worker import freeze_modules, worker_store

_QUERY_ID: Final = "sql.streaming.queryId"
UPLOADS: Final = 2
"""Concurrent uploads of a task. They hide the store's latency while the next object fills."""

_POLICY: Final = RetryPolicy(deadline_s=60.0)


@dataclass(frozen=True, kw_only=True)
class Uploaded(WriterCommitMessage):
    """A task's message to the driver."""

    partition: int
    query: str | None
    shard: int | None
    batches: tuple[StoredBatch, ...]


class BufferFormat(DataSource):
    """The records of a queue. `BufferOptions` describes the options of reading, `SinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | sequence | bigint | the batch's sequence in its shard |
    | index | int | the record's position in its batch |
    | value | binary | the record |
    | ingestion_time | timestamp | when the producer accepted it |
    | metadata | binary | the bytes that the producer attached to it |
    | location | string | the batch object's key |
    | shard | int | 0 in a queue without shards |

    For a write, the rows have `value` (binary or string, never null) and optionally `metadata` (binary).
    """

    @property
    def _parsed(self) -> BufferOptions:
        return BufferOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return spark_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> BufferReader:
        check_schema(schema, self._parsed.columns, COLUMNS, FORMAT, "decode `value`")
        return BufferReader(self._parsed)

    def streamReader(self, schema: StructType) -> BufferStreamReader:
        check_schema(schema, self._parsed.columns, COLUMNS, FORMAT, "decode `value`")
        return BufferStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> BufferWriter:
        return BufferWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> BufferStreamWriter:
        return BufferStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise Unsupported(
                f"{FORMAT} only appends: the records in a queue belong to its consumer. Use mode('append') "
                "or outputMode('append'); write a result that changes to a table"
            )
        check_columns(schema)
        return SinkOptions.parse(self.options)


class BufferWriter(DataSourceArrowWriter):
    """The writer of a batch write, under `txnAppId` and `txnVersion` or without a transaction."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        transaction = options.transaction
        self._app = uuid.uuid4().hex if transaction is None else transaction.app

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        return _upload(self._options, iterator, query=None, app=self._app)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Append the objects that the tasks stored. Raise `StaleTransaction` or another `StorageError`."""
        _append(self._options, _sorted(messages), self._options.transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: the stored objects may be in the queue. If not, the consumer deletes them."""


class BufferStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. Each micro-batch is one transaction of the query."""

    def __init__(self, options: SinkOptions) -> None:
        if options.transaction is not None:
            raise ConfigError(
                "txnAppId, txnVersion: these are for batch writes; a stream uses its query id and batch "
                "number. Leave them out"
            )
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Uploaded:
        query = _context().getLocalProperty(_QUERY_ID)
        if not query:
            raise Unsupported(
                "Spark did not pass the query id to the task, so a repeated micro-batch would look like a "
                "new one; use a release of Spark that Penstock supports"
            )
        return _upload(self._options, iterator, query=query, app=query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Append as a batch write does, under the transaction (query, batchId)."""
        uploaded = _sorted(messages)
        query = next((message.query for message in uploaded if message.query), None)
        if query is not None:
            _append(self._options, uploaded, Transaction(app=query, version=batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing, as for a batch write."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "only tasks of Spark write"
    return context


def _sorted(messages: Sequence[WriterCommitMessage | None]) -> list[Uploaded]:
    uploaded = [message for message in messages if isinstance(message, Uploaded)]
    return sorted(uploaded, key=lambda message: message.partition)


def _upload(options: SinkOptions, rows: Iterator[pa.RecordBatch], *, query: str | None, app: str) -> Uploaded:
    """Store the rows of a task under the prefix of its shard."""
    store = worker_store(options.store)
    shard: int | None = None
    prefix: str | None = None
    uploads: list[Future[StoredBatch]] = []
    with ThreadPoolExecutor(UPLOADS, thread_name_prefix="penstock-upload") as pool:
        for part in gather(rows, options.batch_bytes):
            if prefix is None:  # look up the shard only for a task with rows
                shards = loop_thread().run(find_shards(store, options.producer, options.sharded))
                shard, config = shards.of_app(app)
                prefix = config.prefix
            if len(uploads) >= UPLOADS:
                uploads[-UPLOADS].result()
            uploads.append(pool.submit(_store, store, prefix, part, options))
        batches = tuple(upload.result() for upload in uploads)
    freeze_modules()
    return Uploaded(partition=_context().partitionId(), query=query, shard=shard, batches=batches)


def _store(store: ObjectStore, prefix: str, rows: BatchRows, options: SinkOptions) -> StoredBatch:
    now_ms = SYSTEM_CLOCK.now_ms()
    items = [Metadata(start_index=start, ingestion_time_ms=now_ms, payload=run) for start, run in rows.runs]
    work = store_batch(
        store, prefix, rows.chunks, compression=options.compression, metadata=items, policy=_POLICY
    )
    return loop_thread().run(work)


def _append(options: SinkOptions, uploaded: Sequence[Uploaded], transaction: Transaction | None) -> None:
    filled = [message for message in uploaded if message.batches]
    if not filled:
        return
    if len({message.shard for message in filled}) > 1:
        raise Unavailable(
            f"{options.manifest_path} became a sharded queue while rows were being written to it; nothing "
            "was appended, write the rows again"
        )
    batches = [batch for message in filled for batch in message.batches]
    shard, store = filled[0].shard, worker_store(options.store)
    config = options.producer if shard is None else shard_config(options.producer, shard)
    loop_thread().run(append_batches(config, batches, transaction, store=store))


METADATA_BYTES_MAX: Final = 1 << 20
"""The most bytes that one batch may add to the manifest, which every append and read transfers completely."""

_COLUMNS: Final = {"value": ("binary", "string"), "metadata": ("binary",)}
_FRAMING_BYTES: Final = 8
_META_BYTES: Final = 16


def check_columns(schema: StructType) -> None:
    """Raise `ConfigError` unless the columns are `value` and optionally `metadata`, with supported types."""
    for column in schema.fields:
        kinds = _COLUMNS.get(column.name)
        kind = column.dataType.simpleString()
        if kinds is None:
            raise ConfigError(
                f"{FORMAT} writes only the columns 'value' and 'metadata', not {column.name!r}: put it into "
                "value (for example with to_json(struct(*)) AS value), or drop it"
            )
        if kind not in kinds:
            raise ConfigError(
                f"{FORMAT}: column {column.name!r} is {kind}, and must be {' or '.join(kinds)}: cast it"
            )
    names = schema.fieldNames()
    if "value" not in names:
        raise ConfigError(
            f"{FORMAT} writes the column 'value', which the rows do not have: name a column 'value'"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{FORMAT}: a column occurs twice in {', '.join(names)}")


@dataclass(slots=True, kw_only=True)
class BatchRows:
    """The records of one batch object, and the positions where their metadata changes."""

    chunks: list[RecordChunk] = field(default_factory=list)
    runs: list[tuple[int, bytes]] = field(default_factory=list)
    """(first record, metadata) of every run of records with equal metadata."""
    count: int = 0
    weight: int = 0
    """The bytes of the records including their framing."""
    metadata_bytes: int = 0

    def add(self, chunk: RecordChunk, runs: Iterable[tuple[int, bytes]]) -> None:
        """Add records. The positions in `runs` are relative to the first of them."""
        for start, payload in runs:
            if not self.runs or self.runs[-1][1] != payload:
                self.runs.append((self.count + start, payload))
                self.metadata_bytes += _META_BYTES + len(payload)
        if self.metadata_bytes > METADATA_BYTES_MAX:
            raise InvalidInputError(
                f"metadata changes {len(self.runs)} times in {self.count + len(chunk)} rows of one batch; it "
                f"is stored in the manifest, which allows {METADATA_BYTES_MAX} bytes of it for each batch. "
                "Sort the rows by it, or put it into value"
            )
        self.chunks.append(chunk)
        self.count += len(chunk)
        self.weight += _weight(chunk)


def gather(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[BatchRows]:
    """Split the rows, in order, into pieces of up to `bytes_max`. A longer record gets its own piece.

    Raise `InvalidInputError` for a null value, or if the metadata changes too often.
    """
    rows = BatchRows()
    for batch in batches:
        values = _values(batch.column("value"))
        metadata = batch.column("metadata") if "metadata" in batch.schema.names else None
        start = 0
        while start < len(values):
            rest = values[start:]
            chunk = RecordChunk.of_array(rest)
            fitting = _fitting(chunk, bytes_max - rows.weight)
            if fitting == 0 and rows.count:
                yield rows
                rows = BatchRows()
                continue
            taken = max(1, fitting)
            part = RecordChunk(rest[:taken], chunk.lengths[:taken])
            rows.add(part, _runs(metadata, start, taken))
            start += taken
    if rows.count:
        yield rows


def _values(column: pa.Array) -> pa.BinaryArray:
    if column.null_count:
        raise InvalidInputError(
            f"value is null in {column.null_count} rows; a record is bytes, possibly empty: filter them "
            "out, or use coalesce(value, '')"
        )
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    try:
        return as_binary_array(column)
    except Rejected as error:
        raise InvalidInputError(str(error)) from error


def _weight(chunk: RecordChunk) -> int:
    return chunk.record_bytes + _FRAMING_BYTES * len(chunk)


def _fitting(chunk: RecordChunk, room: int) -> int:
    """Return the number of leading records that fit into `room` bytes."""
    if _weight(chunk) <= room:
        return len(chunk)
    ends = np.cumsum(chunk.lengths, dtype="<i8") + np.arange(1, len(chunk) + 1) * _FRAMING_BYTES
    return int(np.searchsorted(ends, room, side="right"))


def _runs(metadata: pa.Array | None, start: int, count: int) -> list[tuple[int, bytes]]:
    """Return (first, payload) for every run of equal metadata. Null counts as empty."""
    if metadata is None:
        return [(0, b"")]
    part = metadata[start : start + count]
    if part.null_count:
        part = pc.fill_null(part, b"")
    encoded = pc.run_end_encode(part)
    starts = [0, *encoded.run_ends.to_pylist()[:-1]]
    return list(zip(starts, encoded.values.to_pylist(), strict=True))
