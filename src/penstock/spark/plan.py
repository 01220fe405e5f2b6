"""From entries of the queue to the work of tasks: which objects each one fetches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from pyspark.sql.datasource import InputPartition

from penstock.buffer import Entry
from penstock.spark.holes import Hole

__all__ = ["BatchSlice", "Slice", "SlicePartition", "group", "slice_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    """One batch object as a task needs it: small when pickled, the same after every restart."""

    shard: int
    sequence: int
    location: str
    starts: bytes = b""
    """u32 per produce call: the index of its first record."""
    times_ms: bytes = b""
    """i64 per produce call."""
    payloads: tuple[bytes, ...] | None = None
    """Per produce call; None when all are empty."""
    manifest: str = ""
    """Its queue's manifest, when a hole is to be recorded: what is wrong is told there."""


Slice: TypeAlias = BatchSlice | Hole


class SlicePartition(InputPartition):
    """The batch objects of one task, in queue order, and the holes between them."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        super().__init__(None)
        self.slices = tuple(slices)


def slice_of(shard: int, entry: Entry, *, with_metadata: bool, manifest: str = "") -> BatchSlice:
    """An entry of the queue, with what the producers said of it only if a column shows that."""
    if not with_metadata:
        return BatchSlice(shard=shard, sequence=entry.sequence, location=entry.location, manifest=manifest)
    payloads = tuple(meta.payload for meta in entry.metadata)
    return BatchSlice(
        shard=shard,
        sequence=entry.sequence,
        location=entry.location,
        starts=np.array([meta.start_index for meta in entry.metadata], "<u4").tobytes(),
        times_ms=np.array([meta.ingestion_time_ms for meta in entry.metadata], "<i8").tobytes(),
        payloads=payloads if any(payloads) else None,
        manifest=manifest,
    )


def group(slices: Sequence[Slice], partitions: int) -> list[SlicePartition]:
    """At most `partitions` runs of neighbours, none empty, whose lengths differ by one at most."""
    count = min(partitions, len(slices))
    edges = [len(slices) * number // count for number in range(count + 1)] if count else [0]
    return [SlicePartition(slices[a:b]) for a, b in itertools.pairwise(edges)]
