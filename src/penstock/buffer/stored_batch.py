"""A batch object that is stored and not in the queue yet: what a task uploads and its driver appends.

The two run on different machines, so the value that passes between them is small and can be pickled; the
records are in the store.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from penstock.buffer.batch import CompressionType
from penstock.buffer.errors import InvalidInputError
from penstock.buffer.manifest import Metadata
from penstock.buffer.open_batch import BATCH_WEIGHT_MAX, FRAMING_BYTES, OpenBatch
from penstock.buffer.upload import BatchUpload
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.codec import RecordChunk, as_binary_array
from penstock.errors import Rejected
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy

__all__ = ["StoredBatch", "StoredRecords", "store_batch"]

StoredRecords: TypeAlias = Sequence[bytes] | pa.Array | pa.ChunkedArray | RecordChunk | Sequence[RecordChunk]
"""Records as a list, as Arrow, or in the encoder's own chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Where the records are, and what the manifest will say of them."""

    location: str
    minted_ms: int
    """The millisecond in the name: at or below the garbage floor, the object must be copied first."""
    record_count: int
    record_bytes: int
    size: int
    """Bytes of the object."""
    metadata: tuple[Metadata, ...]


async def store_batch(
    store: ObjectStore,
    prefix: str,
    records: StoredRecords,
    *,
    compression: CompressionType = CompressionType.NONE,
    metadata: bytes | Sequence[Metadata] = b"",
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random = SYSTEM_RNG,
    policy: RetryPolicy | None = None,
) -> StoredBatch:
    """Store records as one batch object below `prefix`, durably; `append_batches` puts it into the queue.

    Until then, and if that never comes, the object is garbage that the consumer collects. `metadata` is one
    payload for all records, or items that say where each starts. Passing faults are retried. Raises
    `InvalidInputError` for no records or more than a batch holds, and `StorageError`.
    """
    chunks = _chunks(records)
    count = sum(map(len, chunks))
    record_bytes = sum(chunk.record_bytes for chunk in chunks)
    if count == 0:
        raise InvalidInputError("a batch needs at least one record (an empty record is fine: [b''])")
    if record_bytes + FRAMING_BYTES * count > BATCH_WEIGHT_MAX:
        raise InvalidInputError(
            f"{record_bytes} bytes in {count} records are beyond the {BATCH_WEIGHT_MAX} bytes of a batch; "
            "split them into several"
        )
    items = _items(metadata, count, clock)
    batch = OpenBatch(ordinal=0, metadata=items, records=[*chunks], count=count, record_bytes=record_bytes)
    upload = BatchUpload(
        batch,
        store=store,
        prefix=prefix,
        compression=compression,
        policy=policy or RetryPolicy(),
        clock=clock,
        rng=rng,
    )
    await upload.run(floor_ms=-1)
    if upload.error is not None:
        raise upload.error
    return StoredBatch(
        location=upload.location,
        minted_ms=upload.minted_ms,
        record_count=count,
        record_bytes=record_bytes,
        size=upload.object_bytes,
        metadata=tuple(items),
    )


def _chunks(records: StoredRecords) -> list[RecordChunk]:
    if isinstance(records, RecordChunk):
        return [records]
    if isinstance(records, list | tuple) and records and isinstance(records[0], RecordChunk):
        return list(records)
    try:
        return [RecordChunk.of_array(as_binary_array(records))]
    except Rejected as error:
        raise InvalidInputError(str(error)) from error


def _items(metadata: bytes | Sequence[Metadata], count: int, clock: Clock) -> list[Metadata]:
    if isinstance(metadata, bytes):
        return [Metadata(start_index=0, ingestion_time_ms=clock.now_ms(), payload=metadata)]
    starts = [item.start_index for item in metadata]
    if starts != sorted(starts) or (starts and starts[-1] >= count):
        raise InvalidInputError(f"metadata of {count} records must start at rising places within them")
    return list(metadata)
