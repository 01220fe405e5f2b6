"""Writing to a topic: each task writes its rows in chunks, each under an idempotency key of its own.

The key of a chunk names the application (the streaming query), its version (the micro-batch), the
partition, the number of the chunk, and a digest of what is in it. So a task that is run again writes nothing
twice while the server remembers the keys, which it does for the topic's `idempotency_window_ms` and until it
restarts; and a task that comes with other rows the second time loses none of them.

Rows are visible as soon as a task has written them: there is no commit over several tasks in a topic.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import pyarrow as pa
import xxhash
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.blocking import loop_thread
from penstock.errors import ConfigError, Unsupported
from penstock.spark.reader import freeze_modules
from penstock.spark.topic_pages import topic_connection
from penstock.spark.topic_rows import chunks
from penstock.spark.topic_sink_options import TopicSinkOptions
from penstock.topics import Call, NewRecord, Repeat, write_body

__all__ = ["TopicStreamWriter", "TopicWriter", "Written", "chunk_key"]

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True, kw_only=True)
class Written(WriterCommitMessage):
    """What one task tells the driver."""

    records: int


class TopicWriter(DataSourceArrowWriter):
    """One batch write: a step of its own, or that of `txnAppId` and `txnVersion`."""

    def __init__(self, options: TopicSinkOptions) -> None:
        self._options = options
        given = options.transaction
        self._app, self._version = (uuid.uuid4().hex, 0) if given is None else (given.app, given.version)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator, self._app, self._version)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: the tasks have written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: what was written stays."""


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """A stream: the keys of a micro-batch are those of its query and its number."""

    def __init__(self, options: TopicSinkOptions) -> None:
        if options.transaction is not None:
            raise ConfigError(
                "txnAppId, txnVersion: these are for batch writes; a stream goes by its own query and batch "
                "numbers. Leave them out"
            )
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = _context()
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if not query or not batch:
            raise Unsupported(
                "Spark did not tell the task which micro-batch it works for, so a repeated one could not be "
                "told from a new one; use a release of Spark that Penstock supports"
            )
        return _write(self._options, iterator, query, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: the tasks have written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what was written stays, and the next attempt does not write it again."""


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
    """The idempotency key of a chunk: short and ASCII, whatever the application is called."""
    digest = xxhash.xxh3_128(step.encode())
    digest.update(body)
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_.:") else "_" for c in step[-100:])
    return f"spark:{readable}:{digest.hexdigest()}"
