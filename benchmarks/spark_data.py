"""The same records as a queue, as Parquet files and as Arrow files, and long queues of repeated batches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.buffer import CompressionType, Metadata, manifest, store_batch
from penstock.objects.local import LocalStore
from records import array_of

__all__ = ["MANIFEST", "BatchFiles", "make_files", "make_queue"]

MANIFEST = "ingest/manifest"
OBJECT_RECORDS = 50_000
RECORD_BYTES = 200
_DISTINCT = 40
"""Number of distinct objects. Further ones repeat them, to limit the use of disk and page cache."""
_GROUP_ROWS = 25_000
_STAMP = (Metadata(start_index=0, ingestion_time_ms=1_760_000_000_000),)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFiles:
    """The same `records` records in three formats."""

    records: int
    queue: Path
    parquet: Path
    arrow: tuple[str, ...]


def make_files(root: Path, records: int, compression: str) -> BatchFiles:
    """Create objects, Parquet files and Arrow files with the same records in the same portions."""
    count = max(1, records // OBJECT_RECORDS)
    distinct = min(count, _DISTINCT)
    queue, parquet, arrow = (root / name for name in ("queue", "parquet", "arrow"))
    for folder in (queue, parquet, arrow):
        folder.mkdir(parents=True)
    locations: list[str] = []
    for number in range(distinct):
        values = array_of(OBJECT_RECORDS * RECORD_BYTES, RECORD_BYTES, seed=number % 4)[:OBJECT_RECORDS]
        table = pa.table({"value": values})
        pq.write_table(table, parquet / f"{number:04d}.parquet", compression=_parquet(compression))
        with pa.ipc.new_file(arrow / f"{number:04d}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=_GROUP_ROWS)
        locations += make_objects(queue, [values], compression)
    for number in range(distinct, count):
        os.link(parquet / f"{number % distinct:04d}.parquet", parquet / f"{number:04d}.parquet")
    make_manifest(queue, [locations[number % distinct] for number in range(count)])
    paths = tuple(str(arrow / f"{number % distinct:04d}.arrow") for number in range(count))
    return BatchFiles(records=count * OBJECT_RECORDS, queue=queue, parquet=parquet, arrow=paths)


def _parquet(compression: str) -> str:
    return "zstd" if compression == "zstd" else "snappy"


def make_queue(root: Path, entries: int, records: pa.BinaryArray) -> Path:
    """Create a queue of `entries` batches that all refer to one object with these records."""
    root.mkdir(parents=True)
    (location,) = make_objects(root, [records], "none")
    make_manifest(root, [location] * entries)
    return root


def make_objects(root: Path, batches: Sequence[pa.BinaryArray], compression: str) -> list[str]:
    async def work() -> list[str]:
        store = LocalStore(root)
        kind = CompressionType.ZSTD if compression == "zstd" else CompressionType.NONE
        stored = [await store_batch(store, "ingest", batch, compression=kind) for batch in batches]
        await store.close()
        return [batch.location for batch in stored]

    return asyncio.run(work())


def make_manifest(root: Path, locations: Sequence[str]) -> None:
    items = [manifest.NewEntry(location=location, metadata=_STAMP) for location in locations]
    raw = manifest.append(manifest.EMPTY_MANIFEST, items)

    async def work() -> None:
        store = LocalStore(root)
        await store.put_if_absent(MANIFEST, raw)
        await store.close()

    asyncio.run(work())
