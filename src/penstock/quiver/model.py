"""The words that every part of Quiver shares: what a bundle, a stream and a segment are called.

A *bundle* is one accepted batch. Each of its slots belongs to a *stream*: all batches of one slot that have
one schema. A *segment* is an immutable file with the bundles of one stream, in the order in which the
write-ahead log took them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

__all__ = ["BundleRef", "Pending", "SegmentInfo", "Signal"]


class Signal(enum.StrEnum):
    """What kind of telemetry a batch carries."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class BundleRef:
    """The place of one bundle: a segment, and the index of the record batch in it. Oldest first."""

    segment_seq: int
    bundle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """All that the sidecar of a committed segment says.

    Times are nanoseconds since the Unix epoch, in UTC. `event_ns_min` and `event_ns_max` are None when the
    data has no event time. `wal_start` and `wal_end` are the log positions that span its bundles, and
    `wal_seq_min` and `wal_seq_max` the entries; other segments may have bundles in that span.
    """

    seq: int
    signal: Signal
    slot: int
    schema_hash: str
    bundle_count: int
    item_count: int
    ingest_ns_min: int
    ingest_ns_max: int
    event_ns_min: int | None
    event_ns_max: int | None
    wal_start: int
    wal_end: int
    wal_seq_min: int
    wal_seq_max: int
    core_id: int
    file_size: int
    xxh3: str
    created_by: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """One accepted bundle's part for one stream, waiting in the open segment."""

    slot: int
    batch: pa.RecordBatch
    fingerprint: bytes
    ingest_ns: int
    wal_seq: int
    wal_start: int
    wal_end: int
    byte_count: int
