"""The columns of a topic's record in Spark, built from a decoded page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import pyarrow as pa

from penstock.spark.sources.columns import KnownColumns, arrow_schema, one_row, parse_columns, spark_schema
from penstock.topics import Record

TOPIC_COLUMNS: Final[KnownColumns] = {
    "topic": ("string", pa.string()),
    "seq": ("bigint", pa.int64()),
    "ts": ("timestamp", pa.timestamp("us", tz="UTC")),
    "node": ("string", pa.string()),
    "tag": ("string", pa.string()),
    "data": ("string", pa.string()),
    "meta": ("string", pa.string()),
}
GAP_COLUMNS: Final = ("seq", "data", "meta")
"""The columns that distinguish the row of a gap from a record."""

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
_ENCODER: Final = msgspec.json.Encoder()


def parse_topic_columns(text: str) -> tuple[str, ...]:
    """Parse column names. Raise `ConfigError` for an unknown or repeated name, or if there are none."""
    return parse_columns(text, TOPIC_COLUMNS)


def topic_schema(columns: Sequence[str]) -> str:
    """Return the schema in Spark's DDL notation."""
    return spark_schema(columns, TOPIC_COLUMNS)


def empty_batch(columns: Sequence[str]) -> pa.RecordBatch:
    """Build a record batch without rows."""
    return build_records("", [], columns)


def build_records(topic: str, records: Sequence[Record], columns: Sequence[str]) -> pa.RecordBatch:
    """Build the chosen columns for records. `data` and `meta` stay JSON text."""
    arrays = [_BUILDERS[name](topic, records) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns, TOPIC_COLUMNS))


def build_gap(topic: str, first: int, last: int, reason: str, columns: Sequence[str]) -> pa.RecordBatch:
    """Build the row that replaces records that are gone. Unlike in a record, its `data` is null."""
    meta = _ENCODER.encode({"gap": {"first": first, "last": last, "reason": reason}}).decode()
    known: dict[str, int | str | None] = {"topic": topic, "seq": first, "meta": meta}
    return one_row(known, columns, TOPIC_COLUMNS)


def _topic(topic: str, records: Sequence[Record]) -> pa.Array:
    return pa.repeat(pa.scalar(topic, pa.string()), len(records))


def _seq(_: str, records: Sequence[Record]) -> pa.Array:
    return pa.array([record.seq for record in records], pa.int64())


def _ts(_: str, records: Sequence[Record]) -> pa.Array:
    return pa.array([record.ts_ms for record in records], _MILLISECONDS).cast(TOPIC_COLUMNS["ts"][1])


def _node(_: str, records: Sequence[Record]) -> pa.Array:
    return pa.array([record.node for record in records], pa.string())


def _tag(_: str, records: Sequence[Record]) -> pa.Array:
    return pa.array([record.tag for record in records], pa.string())


def _data(_: str, records: Sequence[Record]) -> pa.Array:
    return pa.array([bytes(record.data) for record in records], pa.binary()).cast(pa.string())


def _meta(_: str, records: Sequence[Record]) -> pa.Array:
    texts = [None if record.meta is None else bytes(record.meta) for record in records]
    return pa.array(texts, pa.binary()).cast(pa.string())


_BUILDERS: Final[dict[str, Callable[[str, Sequence[Record]], pa.Array]]] = {
    "topic": _topic,
    "seq": _seq,
    "ts": _ts,
    "node": _node,
    "tag": _tag,
    "data": _data,
    "meta": _meta,
}
