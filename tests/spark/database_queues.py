"""Readers of the queue of a database, which read it as the database does."""

from __future__ import annotations

import asyncio
from pathlib import Path

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.spark.conftest import MANIFEST

from penstock.buffer import BatchDescriptor
from penstock.buffer.inspect import QueueReader
from penstock.objects import LocalStore
from penstock.services.feed import payload_per_record
from penstock.timeseries.ingest import series_of_metrics
from penstock.vector.delta import TOMBSTONE
from penstock.vector.records import decode_record

__all__ = ["entries_in", "points_in", "queued"]


def queued(store: Path, manifest: str = MANIFEST) -> list[tuple[bytes, bytes]]:
    """Return every record of a queue with its metadata, in order."""

    async def work() -> list[tuple[bytes, bytes]]:
        reader = QueueReader(LocalStore(str(store)), manifest)
        index = await reader.index()
        found: list[tuple[bytes, bytes]] = []
        for place in range(len(index)):
            batch = await reader.fetch(BatchDescriptor.of(index[place]))
            records = list(batch.entries)
            found += zip(records, payload_per_record(batch.metadata, len(records)), strict=True)
        return found

    return asyncio.run(work())


def points_in(store: Path, label: str) -> list[tuple[str, float]]:
    """Return a label and the value of every point in the queue."""
    found = []
    for record, _ in queued(store):
        for one in series_of_metrics(ExportMetricsServiceRequest.FromString(record)).series:
            found += [(dict(one.labels)[label], value) for value in one.samples.values.tolist()]
    return sorted(found)


def entries_in(store: Path) -> list[tuple[str, bool]]:
    """Return the id of every entry in the queue, and whether it is a deletion."""
    return sorted(
        (name, entry is TOMBSTONE) for made in queued(store) for name, entry in decode_record(*made)
    )
