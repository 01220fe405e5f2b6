"""From the rows that Spark hands to a task to the records of batch objects. Pure, and never row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from penstock.buffer import InvalidInputError
from penstock.codec import RecordChunk, as_binary_array
from penstock.errors import ConfigError, Rejected
from penstock.spark.options import FORMAT

__all__ = ["METADATA_BYTES_MAX", "BatchRows", "check_columns", "gather"]

METADATA_BYTES_MAX: Final = 1 << 20
"""What one batch object may add to the manifest, which every append and every look transfers whole."""

_COLUMNS: Final = {"value": ("binary", "string"), "metadata": ("binary",)}
_FRAMING_BYTES: Final = 8
_META_BYTES: Final = 16


def check_columns(schema: StructType) -> None:
    """Raise `ConfigError` unless the columns are `value` and perhaps `metadata`, in a type that fits."""
    for column in schema.fields:
        kinds = _COLUMNS.get(column.name)
        kind = column.dataType.simpleString()
        if kinds is None:
            raise ConfigError(
                f"{FORMAT} writes the columns 'value' and 'metadata' and has no place for {column.name!r}: "
                "put it into value (for example with to_json(struct(*)) AS value), or drop it"
            )
        if kind not in kinds:
            raise ConfigError(
                f"{FORMAT}: column {column.name!r} is {kind}, and must be {' or '.join(kinds)}: cast it"
            )
    names = schema.fieldNames()
    if "value" not in names:
        raise ConfigError(f"{FORMAT} writes the column 'value', and the rows have none: name one so")
    if len(set(names)) < len(names):
        raise ConfigError(f"{FORMAT}: a column is there twice in {', '.join(names)}")


@dataclass(slots=True, kw_only=True)
class BatchRows:
    """The records of one batch object, and where the metadata changes among them."""

    chunks: list[RecordChunk] = field(default_factory=list)
    runs: list[tuple[int, bytes]] = field(default_factory=list)
    """(first record, metadata) of every run of records with equal metadata."""
    count: int = 0
    weight: int = 0
    """Bytes of the records with their framing."""
    metadata_bytes: int = 0

    def add(self, chunk: RecordChunk, runs: Iterable[tuple[int, bytes]]) -> None:
        """Take records whose runs are counted from the first of them."""
        for start, payload in runs:
            if not self.runs or self.runs[-1][1] != payload:
                self.runs.append((self.count + start, payload))
                self.metadata_bytes += _META_BYTES + len(payload)
        if self.metadata_bytes > METADATA_BYTES_MAX:
            raise InvalidInputError(
                f"metadata changes {len(self.runs)} times in {self.count + len(chunk)} rows of one batch; it "
                f"is kept in the manifest, which takes {METADATA_BYTES_MAX} bytes of it for each batch. "
                "Sort the rows by it, or put it into value"
            )
        self.chunks.append(chunk)
        self.count += len(chunk)
        self.weight += _weight(chunk)


def gather(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[BatchRows]:
    """The rows, in order, in pieces of up to `bytes_max`; a longer record is a piece of its own.

    Raises `InvalidInputError` for a null value or metadata that changes too often.
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
    """How many of the first records fit into `room`."""
    if _weight(chunk) <= room:
        return len(chunk)
    ends = np.cumsum(chunk.lengths, dtype="<i8") + np.arange(1, len(chunk) + 1) * _FRAMING_BYTES
    return int(np.searchsorted(ends, room, side="right"))


def _runs(metadata: pa.Array | None, start: int, count: int) -> list[tuple[int, bytes]]:
    """(first, payload) of every run of equal metadata; null counts as empty."""
    if metadata is None:
        return [(0, b"")]
    part = metadata[start : start + count]
    if part.null_count:
        part = pc.fill_null(part, b"")
    encoded = pc.run_end_encode(part)
    starts = [0, *encoded.run_ends.to_pylist()[:-1]]
    return list(zip(starts, encoded.values.to_pylist(), strict=True))
