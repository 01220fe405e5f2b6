"""The dead-letter table: every record that did not decode, with its bytes, its position and the reason.

A micro-batch writes the letters, a redrive puts them back into the queue, and the console shows them.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.blocking import loop_thread
from penstock.clock import SYSTEM_CLOCK
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.pipeline.decode import REASON, VALUE
from penstock.spark.tables.spec import TableSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LETTER_COLUMNS: Final = (
    "pipeline string, batch bigint, shard int, sequence bigint, index int, ingestion_time timestamp, "
    "metadata binary, value binary, reason string, at timestamp"
)
"""The columns of the table. A gap has `index` -1, a null `value`, and its range in `metadata`."""


def letters_of(decoded: DataFrame, pipeline: str, batch: int, *, gaps_only: bool = False) -> DataFrame:
    """Return the bad records and the gaps of a decoded frame, or only the gaps, as rows of the table."""
    from pyspark.sql import functions as F

    bad = decoded.filter(F.col("_index") < 0 if gaps_only else F.col(REASON).isNotNull())
    return bad.select(
        F.lit(pipeline).alias("pipeline"),
        F.lit(batch).cast("bigint").alias("batch"),
        F.col("_shard").alias("shard"),
        F.col("_sequence").alias("sequence"),
        F.col("_index").alias("index"),
        F.col("_ingestion_time").alias("ingestion_time"),
        F.col("_metadata").alias("metadata"),
        F.col(VALUE).alias("value"),
        F.col(REASON).alias("reason"),
        F.current_timestamp().alias("at"),
    )


HEADS: Final = ("pipeline", "shard", "sequence", "index", "reason", "at")
"""The columns that describe a letter without its bytes."""
BODIES: Final = ("pipeline", "shard", "sequence", "index", "ingestion_time", "metadata", "value")

Letters: TypeAlias = pa.Table
"""Letters with the columns `HEADS` or `BODIES`."""
Position: TypeAlias = tuple[int, int, int]
"""Shard, sequence and index of a record in the queue."""
_POSITION: Final = ("shard", "sequence", "index")
_POSITION_SCHEMA: Final = pa.schema([("shard", pa.int32()), ("sequence", pa.int64()), ("index", pa.int32())])
_POLICY: Final = RetryPolicy(deadline_s=30.0)
_AT_ONCE: Final = 8


def read_letters(spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None = None) -> pa.Table:
    """Return the letters of a table, optionally with sequences in the inclusive range `within`.

    Return no rows if the table does not exist. Raise the error of the table's library if it is unreachable.
    """
    if spec.kind == "delta":
        found = _delta(spec, columns, within)
    elif spec.kind == "iceberg":
        found = _iceberg(spec, columns, within)
    else:
        found = _parquet(spec, columns, within)
    if found is None:
        return pa.table({name: pa.nulls(0) for name in columns})
    return found


def _within(within: tuple[int, int] | None) -> pc.Expression | None:
    if within is None:
        return None
    field = pc.field("sequence")
    return (field >= within[0]) & (field <= within[1])


def _delta(spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None) -> pa.Table | None:
    from penstock.spark.tables.delta import load_delta

    table = load_delta(spec)
    if table is None:
        return None
    return table.to_pyarrow_dataset().to_table(columns=list(columns), filter=_within(within))


def _iceberg(spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None) -> pa.Table | None:
    from penstock.spark.tables.iceberg import load_iceberg

    table = load_iceberg(spec)
    if table is None:
        return None
    scan = table.scan(selected_fields=tuple(columns))
    if within is not None:
        scan = scan.filter(f"sequence >= {within[0]} and sequence <= {within[1]}")
    return scan.to_arrow()


def _parquet(spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None) -> pa.Table | None:
    parts = loop_thread().run(_parquet_files(spec, columns, within))
    return pa.concat_tables(parts) if parts else None


async def _parquet_files(
    spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None
) -> list[pa.Table]:
    store = open_store(spec.store)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(key: str) -> pa.Table:
        async with limit:
            return _columns_of(await _get(store, key), columns, within)

    try:
        listed = await retry(lambda: store.list(""), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
        keys = [info.key for info in listed if info.key.endswith(".parquet") and not _hidden(info.key)]
        return await asyncio.gather(*(one(key) for key in keys))
    finally:
        await store.close()


async def _get(store: ObjectStore, key: str) -> memoryview:
    blob = await retry(lambda: store.get(key), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    return memoryview(blob.data)


def _columns_of(raw: memoryview, columns: Sequence[str], within: tuple[int, int] | None) -> pa.Table:
    return pq.read_table(pa.BufferReader(pa.py_buffer(raw)), columns=list(columns), filters=_within(within))


def _hidden(key: str) -> bool:
    return any(part.startswith(("_", ".")) for part in key.split("/"))


def distinct_letters(rows: Letters) -> Letters:
    """Return the letters in queue order, one for each position."""
    ordered = rows.sort_by([(name, "ascending") for name in _POSITION])
    if ordered.num_rows < 2:
        return ordered
    columns = [ordered[name].to_numpy() for name in _POSITION]
    differs = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return ordered.filter(pa.array(np.concatenate([[True], differs])))


def letters_without(rows: Letters, taken: Iterable[Position]) -> Letters:
    """Return the letters whose positions are not in `taken`."""
    table = _positions(taken)
    if not table.num_rows:
        return rows
    left = _numbered(rows).join(table, list(_POSITION), join_type="left anti")
    return rows.take(left["_row"].sort())


def letters_at(bodies: Letters, pipeline: str, places: Sequence[Position]) -> Letters:
    """Return the records at `places` in queue order. Omit records that are no longer in the table."""
    if not bodies.num_rows:
        return bodies
    rows = distinct_letters(bodies.filter((pc.field("pipeline") == pipeline) & (pc.field("index") >= 0)))
    found = _numbered(rows).join(_positions(places), list(_POSITION), join_type="left semi")
    return rows.take(found["_row"].sort())


def _numbered(rows: Letters) -> pa.Table:
    return (
        rows.select(_POSITION)
        .cast(_POSITION_SCHEMA)
        .append_column("_row", pa.array(np.arange(rows.num_rows)))
    )


def _positions(places: Iterable[Position]) -> pa.Table:
    listed = list(places)
    columns = zip(*listed, strict=True) if listed else ((), (), ())
    return pa.table(dict(zip(_POSITION, map(list, columns), strict=True)), schema=_POSITION_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter with its bytes."""

    shard: int
    sequence: int
    index: int
    """The record's position in its batch, or -1 for a gap in the queue."""
    reason: str
    at_ms: int
    value: bytes | None
    redriven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterPage:
    """A page of letters in queue order. `following` is the cursor for the next page, or None."""

    letters: Sequence[Letter]
    following: Position | None
    total: int
    left: int
    """The number of letters, without gaps, that have not been redriven yet."""


class LetterReader:
    """A reader of one pipeline's letters in queue order, each position once.

    Keep the result of `heads` between calls, since it reads the whole table except the bytes. The methods
    raise what `read_letters` raises.
    """

    def __init__(self, table: TableSpec, pipeline: str) -> None:
        self._table = table
        self._pipeline = pipeline

    def heads(self) -> Letters:
        """Return all letters without their bytes."""
        heads = read_letters(self._table, HEADS)
        return distinct_letters(heads.filter(pc.field("pipeline") == self._pipeline)) if len(heads) else heads

    def page(
        self, heads: Letters, after: Position | None, limit: int, redriven: Collection[Position]
    ) -> LetterPage:
        """Return a page of letters after a position, with their bytes."""
        places = list(zip(*(heads[name].to_pylist() for name in _POSITION), strict=True))
        start = 0 if after is None else bisect.bisect_right(places, after)
        more = start + limit < len(places)
        return LetterPage(
            letters=self._with_bytes(heads.slice(start, limit), redriven),
            following=places[start + limit - 1] if more else None,
            total=len(places),
            left=sum(place[2] >= 0 and place not in redriven for place in places),
        )

    def find(self, heads: Letters, position: Position, redriven: Collection[Position]) -> Letter | None:
        """Return the letter at a position, or None."""
        shard, sequence, index = position
        found = heads.filter(
            (pc.field("shard") == shard) & (pc.field("sequence") == sequence) & (pc.field("index") == index)
        )
        letters = self._with_bytes(found, redriven)
        return letters[0] if letters else None

    def _with_bytes(self, heads: Letters, redriven: Collection[Position]) -> list[Letter]:
        if not heads.num_rows:
            return []
        within = (pc.min(heads["sequence"]).as_py(), pc.max(heads["sequence"]).as_py())
        bodies = read_letters(self._table, ("pipeline", *_POSITION, "value"), within)
        values = {
            (row["shard"], row["sequence"], row["index"]): row["value"]
            for row in bodies.to_pylist()
            if row["pipeline"] == self._pipeline
        }
        return [
            Letter(
                shard=row["shard"],
                sequence=row["sequence"],
                index=row["index"],
                reason=row["reason"] or "",
                at_ms=int(row["at"].timestamp() * 1000),
                value=values.get((row["shard"], row["sequence"], row["index"])),
                redriven=(row["shard"], row["sequence"], row["index"]) in redriven,
            )
            for row in heads.to_pylist()
        ]
