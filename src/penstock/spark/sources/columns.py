"""The columns of a record in Spark, built as Arrow without a Python object per record.

A gap is a range of sequences that has left the queue, or a batch object that is missing or damaged. With
`onGap=record` each gap becomes one row instead of an error. It reaches a table in the same way as records:

| column | |
|---|---|
| `sequence` | the first sequence of the gap |
| `index` | -1, an index that records never have |
| `metadata` | JSON: `{"gap": {"first": 2, "last": 3, "reason": "..."}}` |
| `location` | the batch object, or null for a range |
| `value`, `ingestion_time` | null |

A checkpoint that belongs to another queue is always an error, never a gap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.codec import Block
from penstock.config import unknown_key
from penstock.errors import ConfigError
from penstock.spark.sources.offsets import Bounds

KnownColumns: TypeAlias = dict[str, tuple[str, pa.DataType]]
"""A map of column names to their Spark and Arrow types, in the order of the schema."""
COLUMNS: Final[KnownColumns] = {
    "sequence": ("bigint", pa.int64()),
    "index": ("int", pa.int32()),
    "value": ("binary", pa.binary()),
    "ingestion_time": ("timestamp", pa.timestamp("us", tz="UTC")),
    "metadata": ("binary", pa.binary()),
    "location": ("string", pa.string()),
    "shard": ("int", pa.int32()),
}

GAP_COLUMNS: Final = ("sequence", "index", "metadata")
"""The columns that distinguish the row of a gap from a record."""
GAP_INDEX: Final = -1

ROWS_MAX: Final = 32_768
"""The most rows in a record batch: Spark is not faster with more."""
ROWS_MIN: Final = 8_192
"""The target for joining small record batches: each one costs a round trip through the socket."""
BYTES_MAX: Final = 16 << 20
"""The most bytes in a record batch of several records: it is in memory twice on its way to Spark."""

_MS_MAX: Final = (2**63 - 1) // 1000
_Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    """The plan for reading one batch object: small when pickled, and the same after every restart."""

    shard: int
    sequence: int
    location: str
    starts: bytes = b""
    """One u32 per produce call: the index of its first record."""
    times_ms: bytes = b""
    """One i64 per produce call: its ingestion time."""
    payloads: tuple[bytes, ...] | None = None
    """One payload per produce call, or None if all are empty."""
    manifest: str = ""
    """The key of the queue's manifest, for dead letters; empty unless gaps are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A range of sequences in a shard, `first` to `last`, that could not be read."""

    shard: int
    first: int
    last: int
    reason: str
    location: str | None = None


def acknowledged_gap(shard: int, start: int, end: int, held: Bounds) -> Gap | None:
    """Return the part of `start` to `end - 1` that has left the queue, or None.

    A repeated micro-batch finds the same gap, or a wider one if another consumer has acknowledged more in the
    meantime. A sink that committed the first run skips the second by its version. Other sinks get the row of
    the wider gap, which describes the records that they did not get.
    """
    edge = min(held.first, end)
    reason = "the queue no longer held these sequences: another consumer has acknowledged them"
    return Gap(shard=shard, first=start, last=edge - 1, reason=reason) if start < edge else None


def parse_columns(text: str, known: KnownColumns = COLUMNS) -> tuple[str, ...]:
    """Parse column names. Raise `ConfigError` for an unknown or repeated name, or if there are none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"columns: expected some of {', '.join(known)}, found nothing")
    for name in names:
        if name not in known:
            raise unknown_key(f"columns: {name!r}", name, known)
    if len(set(names)) < len(names):
        raise ConfigError(f"columns: {text!r} names a column twice")
    return names


def spark_schema(columns: Sequence[str], known: KnownColumns = COLUMNS) -> str:
    """Return the schema in Spark's DDL notation."""
    return ", ".join(f"{name} {known[name][0]}" for name in columns)


def arrow_schema(columns: Sequence[str], known: KnownColumns = COLUMNS) -> pa.Schema:
    """Return the schema that every record batch must have."""
    return pa.schema([(name, known[name][1]) for name in columns])


def needs_metadata(columns: Sequence[str]) -> bool:
    """Return whether the columns need the metadata that producers attach to their records."""
    return "ingestion_time" in columns or "metadata" in columns


def build_batch(slice_: BatchSlice, block: Block, columns: Sequence[str]) -> pa.RecordBatch:
    """Build the chosen columns for the records of one batch object."""
    arrays = [_BUILDERS[name](slice_, block) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def build_gap(gap: Gap, columns: Sequence[str]) -> pa.RecordBatch:
    """Build the row that replaces records that could not be read."""
    metadata = {"gap": {"first": gap.first, "last": gap.last, "reason": gap.reason}}
    values: dict[str, int | str | bytes | None] = {
        "sequence": gap.first,
        "index": GAP_INDEX,
        "metadata": json.dumps(metadata, ensure_ascii=False).encode(),
        "location": gap.location,
        "shard": gap.shard,
    }
    return one_row(values, columns, COLUMNS)


def one_row(values: Mapping[str, object], columns: Sequence[str], known: KnownColumns) -> pa.RecordBatch:
    """Build one row. Columns without a value are null."""
    arrays = [pa.array([values.get(name)], known[name][1]) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns, known))


def _sequence(slice_: BatchSlice, block: Block) -> pa.Array:
    return pa.array(np.full(len(block), slice_.sequence, "<i8"))


def _index(_: BatchSlice, block: Block) -> pa.Array:
    return pa.array(np.arange(len(block), dtype="<i4"))


def _value(_: BatchSlice, block: Block) -> pa.Array:
    return block.to_arrow()


def _ingestion_time(slice_: BatchSlice, block: Block) -> pa.Array:
    times = np.frombuffer(slice_.times_ms, "<i8")
    # A time that does not fit into microseconds becomes null.
    valid = np.abs(np.clip(times, -_MS_MAX - 1, _MS_MAX + 1)) <= _MS_MAX
    calls = pa.array(np.where(valid, times, 0) * 1000, mask=~valid).cast(COLUMNS["ingestion_time"][1])
    return calls.take(_call_of_each(slice_, len(block)))


def _metadata(slice_: BatchSlice, block: Block) -> pa.Array:
    payloads = slice_.payloads or [b""] * (len(slice_.starts) // 4)
    return pa.array(payloads, pa.binary()).take(_call_of_each(slice_, len(block)))


def _location(slice_: BatchSlice, block: Block) -> pa.Array:
    return pa.repeat(pa.scalar(slice_.location, pa.string()), len(block))


def _shard(slice_: BatchSlice, block: Block) -> pa.Array:
    return pa.array(np.full(len(block), slice_.shard, "<i4"))


_BUILDERS: Final[dict[str, Callable[[BatchSlice, Block], pa.Array]]] = {
    "sequence": _sequence,
    "index": _index,
    "value": _value,
    "ingestion_time": _ingestion_time,
    "metadata": _metadata,
    "location": _location,
    "shard": _shard,
}


def _call_of_each(slice_: BatchSlice, count: int) -> pa.Array:
    """Return the index of each record's produce call, null for records before the first call."""
    starts = np.frombuffer(slice_.starts, "<u4").astype("<i8")
    edges = np.minimum(np.maximum.accumulate(starts), count) if len(starts) else starts
    before = int(edges[0]) if len(edges) else count
    lengths = np.diff(np.append(edges, count)) if len(edges) else edges
    calls: _Indices = np.concatenate(
        [np.zeros(before, "<i8"), np.repeat(np.arange(len(lengths), dtype="<i8"), lengths)]
    )
    return pa.array(calls, mask=np.arange(count) < before) if before else pa.array(calls)


def regroup(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small record batches and split large ones, to a size that suits Spark."""
    waiting: list[pa.RecordBatch] = []
    rows, size = 0, 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if waiting and (rows >= ROWS_MIN or size + batch.nbytes > BYTES_MAX):
            yield from _cut(_joined(waiting))
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if waiting:
        yield from _cut(_joined(waiting))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into pieces within both bounds. A single record is never split."""
    rows = batch.num_rows
    if rows <= 1 or (rows <= ROWS_MAX and batch.nbytes <= BYTES_MAX):
        yield batch
        return
    step = ROWS_MAX if rows > ROWS_MAX else rows // 2
    for start in range(0, rows, step):
        yield from _cut(batch.slice(start, step))
