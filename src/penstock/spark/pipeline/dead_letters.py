"""The dead-letter table: every record that did not decode, with its bytes, its place and the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

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
"""`index` is -1 and `value` null for a hole in the queue; `metadata` then tells its range."""


def letters_of(decoded: DataFrame, pipeline: str, batch: int, *, gaps_only: bool = False) -> DataFrame:
    """The bad records and the holes of a decoded frame, or the holes alone, as rows of the table."""
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
"""What a letter is about, without its bytes."""
BODIES: Final = ("pipeline", "shard", "sequence", "index", "ingestion_time", "metadata", "value")
_POLICY: Final = RetryPolicy(deadline_s=30.0)
_AT_ONCE: Final = 8


def read_letters(spec: TableSpec, columns: Sequence[str], within: tuple[int, int] | None = None) -> pa.Table:
    """The letters in a table, of the sequences `within` (both ends included); none if there is no table.

    Raises what the table's library makes of an unreachable place.
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
