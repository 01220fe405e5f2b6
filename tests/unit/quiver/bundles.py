"""Batches, parts and sealed segments for tests."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.quiver.model import Pending, SealedSegment, StreamKey, Trigger
from penstock.quiver.wal.payload import fingerprint

SLOT = 63
SECOND_NS = 1_000_000_000


def batch(*values: int) -> pa.RecordBatch:
    texts = [f"row {n}" for n in values]
    return pa.record_batch({"n": pa.array(values, pa.int64()), "s": pa.array(texts, pa.string())})


def part(
    data: pa.RecordBatch, wal_seq: int = 0, *, slot: int = SLOT, ingest_ns: int | None = None, size: int = 100
) -> Pending:
    return Pending(
        slot=slot,
        batch=data,
        fingerprint=fingerprint(data.schema),
        ingest_ns=wal_seq * SECOND_NS if ingest_ns is None else ingest_ns,
        wal_seq=wal_seq,
        wal_start=wal_seq * 1000,
        wal_end=wal_seq * 1000 + 1000,
        byte_count=size,
    )


def sealed(parts: Sequence[Pending], trigger: Trigger = Trigger.FLUSH) -> SealedSegment:
    key = StreamKey(parts[0].slot, parts[0].fingerprint)
    return SealedSegment(
        key=key, parts=parts, byte_count=sum(each.byte_count for each in parts), trigger=trigger
    )


def sealed_of(*batches: pa.RecordBatch, first_seq: int = 1, slot: int = SLOT) -> SealedSegment:
    return sealed([part(data, first_seq + place, slot=slot) for place, data in enumerate(batches)])
