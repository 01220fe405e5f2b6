"""From the rows that Spark hands to a task to the records of writes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.topic_options import TOPIC_FORMAT
from penstock.topics import BATCH_RECORDS_MAX, NewRecord

__all__ = ["CHUNK_BYTES", "check_topic_columns", "chunks"]

CHUNK_BYTES: Final = 4 << 20
"""JSON text of one write: committed as a whole, and sent again as a whole."""

_WRITABLE: Final = ("data", "tag", "node", "meta")


def check_topic_columns(schema: StructType) -> None:
    """Raise `ConfigError` unless the columns are `data` and perhaps `tag`, `node`, `meta`, all strings."""
    names = schema.fieldNames()
    for column in schema.fields:
        if column.name not in _WRITABLE:
            raise ConfigError(
                f"{TOPIC_FORMAT} writes the columns {', '.join(_WRITABLE)} and has no place for "
                f"{column.name!r}: put it into data (for example with to_json(struct(*)) AS data), or drop it"
            )
        kind = column.dataType.simpleString()
        if kind != "string":
            raise ConfigError(
                f"{TOPIC_FORMAT}: column {column.name!r} is {kind}, and must be string: cast it"
            )
    if "data" not in names:
        raise ConfigError(f"{TOPIC_FORMAT} writes the column 'data', and the rows have none: name one so")
    if len(set(names)) < len(names):
        raise ConfigError(f"{TOPIC_FORMAT}: a column is there twice in {', '.join(names)}")


def chunks(batches: Iterable[pa.RecordBatch], bytes_max: int = CHUNK_BYTES) -> Iterator[list[NewRecord]]:
    """The rows, in order, in writes of up to `bytes_max` and 10,000 records; a longer record is one alone.

    The same rows make the same chunks. Raises `InvalidInput` for data that is null.
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
