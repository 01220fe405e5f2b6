"""The format `penstock-topic`: a source of topics' records, and a sink that writes to one topic.

Each task writes its rows in chunks. Each chunk has its own idempotency key.

The key of a chunk names the application (the streaming query), its version (the micro-batch), the
partition, the number of the chunk, and a digest of its contents. A repeated task therefore writes nothing
twice while the server remembers the keys: for the topic's `idempotency_window_ms`, and until it restarts. If
the repeated task has different rows, all of them are written.

Rows are visible as soon as a task has written them: a topic has no commit across tasks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import xxhash
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, InvalidInput, Unsupported
from penstock.spark.sinks.topic_options import TopicSinkOptions
from penstock.spark.sources.base import check_schema
from penstock.spark.sources.topic import TopicReader, TopicStreamReader
from penstock.spark.sources.topic_client import topic_connection
from penstock.spark.sources.topic_columns import TOPIC_COLUMNS, topic_schema
from penstock.spark.sources.topic_options import TOPIC_FORMAT, TopicOptions
from penstock.spark.worker import freeze_modules
from penstock.topics import BATCH_RECORDS_MAX, Call, NewRecord, Repeat, write_body

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True, kw_only=True)
class Written(WriterCommitMessage):
    """A task's message to the driver."""

    records: int


class TopicFormat(DataSource):
    """The records of topics. `TopicOptions` describes the options of reading, `TopicSinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | topic | string | |
    | seq | bigint | the record's sequence in its topic |
    | ts | timestamp | when the server accepted it |
    | node | string | the node that wrote it, if given |
    | tag | string | |
    | data | string | JSON text; null only in a row that describes a gap |
    | meta | string | JSON text |

    For a write, the rows have `data` (JSON text, never null) and optionally `tag`, `node` and `meta`.
    """

    @property
    def _parsed(self) -> TopicOptions:
        return TopicOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return TOPIC_FORMAT

    def schema(self) -> str:
        return topic_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> TopicReader:
        check_schema(schema, self._parsed.columns, TOPIC_COLUMNS, TOPIC_FORMAT, "parse `data`")
        return TopicReader(self._parsed)

    def streamReader(self, schema: StructType) -> TopicStreamReader:
        check_schema(schema, self._parsed.columns, TOPIC_COLUMNS, TOPIC_FORMAT, "parse `data`")
        return TopicStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        return TopicWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:
        return TopicStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> TopicSinkOptions:
        if overwrite:
            raise Unsupported(
                f"{TOPIC_FORMAT} only appends: a topic is a log. Use mode('append') or outputMode('append'); "
                "write a result that changes to a table"
            )
        check_topic_columns(schema)
        return TopicSinkOptions.parse(self.options)


class TopicWriter(DataSourceArrowWriter):
    """The writer of a batch write, identified by `txnAppId` and `txnVersion` or by a new id."""

    def __init__(self, options: TopicSinkOptions) -> None:
        self._options = options
        given = options.transaction
        self._app, self._version = (uuid.uuid4().hex, 0) if given is None else (given.app, given.version)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator, self._app, self._version)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: the tasks have written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: written records stay."""


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. The query id and the batch number are part of every key."""

    def __init__(self, options: TopicSinkOptions) -> None:
        if options.transaction is not None:
            raise ConfigError(
                "txnAppId, txnVersion: these are for batch writes; a stream uses its query id and batch "
                "number. Leave them out"
            )
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = _context()
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if not query or not batch:
            raise Unsupported(
                "Spark did not pass the query id and batch number to the task, so a repeated micro-batch "
                "would look like a new one; use a release of Spark that Penstock supports"
            )
        return _write(self._options, iterator, query, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: the tasks have written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: written records stay, and the next attempt does not repeat them."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "only tasks of Spark write"
    return context


def _write(options: TopicSinkOptions, rows: Iterator[pa.RecordBatch], app: str, version: int) -> Written:
    partition = _context().partitionId()
    count = 0
    for number, records in enumerate(chunks(rows)):
        _write_chunk(options, records, f"{app}:{version}:{partition}:{number}")
        count += len(records)
    freeze_modules()
    return Written(records=count)


def _write_chunk(options: TopicSinkOptions, records: Sequence[NewRecord], step: str) -> None:
    body = write_body(
        records, tag=None, node=None, idempotency_key=None, create=options.create, config=options.config
    )
    call = Call(
        method="POST",
        path=f"/v0/topics/{quote(options.topic, safe='')}",
        repeat=Repeat.KEYED,
        topic=options.topic,
        body=body,
        query={"return_seqs": "false"},
        headers={"Idempotency-Key": chunk_key(step, body)},
    )
    loop_thread().run(topic_connection(options.address).send(call))


def chunk_key(step: str, body: bytes) -> str:
    """Return the idempotency key of a chunk. It is short and ASCII for any application name."""
    digest = xxhash.xxh3_128(step.encode())
    digest.update(body)
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_.:") else "_" for c in step[-100:])
    return f"spark:{readable}:{digest.hexdigest()}"


CHUNK_BYTES: Final = 4 << 20
"""The most JSON bytes of one write, which is committed and retried as a whole."""

_WRITABLE: Final = ("data", "tag", "node", "meta")


def check_topic_columns(schema: StructType) -> None:
    """Raise `ConfigError` unless the columns are `data` and optionally `tag`, `node`, `meta`, all strings."""
    names = schema.fieldNames()
    for column in schema.fields:
        if column.name not in _WRITABLE:
            raise ConfigError(
                f"{TOPIC_FORMAT} writes only the columns {', '.join(_WRITABLE)}, not {column.name!r}: put it "
                "into data (for example with to_json(struct(*)) AS data), or drop it"
            )
        kind = column.dataType.simpleString()
        if kind != "string":
            raise ConfigError(
                f"{TOPIC_FORMAT}: column {column.name!r} is {kind}, and must be string: cast it"
            )
    if "data" not in names:
        raise ConfigError(
            f"{TOPIC_FORMAT} writes the column 'data', which the rows do not have: name a column 'data'"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{TOPIC_FORMAT}: a column occurs twice in {', '.join(names)}")


def chunks(batches: Iterable[pa.RecordBatch], bytes_max: int = CHUNK_BYTES) -> Iterator[list[NewRecord]]:
    """Split the rows, in order, into writes of up to `bytes_max` and `BATCH_RECORDS_MAX` records.

    A longer record gets its own write. The same rows give the same chunks. Raise `InvalidInput` if `data` is
    null in a row.
    """
    chunk: list[NewRecord] = []
    size = 0
    for batch in batches:
        for record, length in _records(batch):
            if chunk and (len(chunk) >= BATCH_RECORDS_MAX or size + length > bytes_max):
                yield chunk
                chunk, size = [], 0
            chunk.append(record)
            size += length
    if chunk:
        yield chunk


def _records(batch: pa.RecordBatch) -> Iterator[tuple[NewRecord, int]]:
    data = batch.column("data")
    if data.null_count:
        raise InvalidInput(
            f"data is null in {data.null_count} rows; a record is JSON text: filter them out, or write "
            "coalesce(data, 'null')"
        )
    tags, nodes, metas = (_texts(batch, name) for name in ("tag", "node", "meta"))
    for text, tag, node, meta in zip(data.to_pylist(), tags, nodes, metas, strict=True):
        json_meta = None if meta is None else msgspec.Raw(meta)
        yield (
            NewRecord(data=msgspec.Raw(text), tag=tag, node=node, meta=json_meta),
            len(text) + len(meta or ""),
        )


def _texts(batch: pa.RecordBatch, name: str) -> list[str | None]:
    texts: list[str | None] = (
        batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
    )
    return texts
