"""The data model that all parts of Quiver share: bundles, streams, segments and slots.

A *bundle* is one accepted batch. Each of its slots belongs to a *stream*: all batches of one slot with the
same schema. A *segment* is an immutable file that holds bundles of one stream, in the order of the
write-ahead log. A *slot* identifies the kind of payload in a batch. Its number is stored on disk and never
changes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from penstock.errors import InvalidInput


class Signal(enum.StrEnum):
    """The kind of telemetry in a batch."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class BundleRef:
    """The address of one bundle: a segment and the index of the record batch in it. Sorts oldest first."""

    segment_seq: int
    bundle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """The metadata of a committed segment, as stored in its sidecar.

    Times are nanoseconds since the Unix epoch, in UTC. `event_ns_min` and `event_ns_max` are None when the
    data has no event time. `wal_start` and `wal_end` are the log positions that span its bundles.
    `wal_seq_min` and `wal_seq_max` are the first and last entry numbers. Other segments may have bundles in
    that span.
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
    """The part of one accepted bundle that belongs to one stream and waits in the open segment."""

    slot: int
    batch: pa.RecordBatch
    fingerprint: bytes
    ingest_ns: int
    wal_seq: int
    wal_start: int
    wal_end: int
    byte_count: int


SLOT_MAX: Final = 63

SLOTS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "resource_attrs",
        2: "scope_attrs",
        10: "metrics",
        11: "number_points",
        12: "summary_points",
        13: "histogram_points",
        14: "exp_histogram_points",
        15: "number_point_attrs",
        16: "summary_point_attrs",
        17: "histogram_point_attrs",
        18: "exp_histogram_point_attrs",
        19: "number_exemplars",
        20: "histogram_exemplars",
        21: "exp_histogram_exemplars",
        22: "number_exemplar_attrs",
        23: "histogram_exemplar_attrs",
        24: "exp_histogram_exemplar_attrs",
        25: "multivariate",
        26: "metric_attrs",
        30: "logs",
        31: "log_attrs",
        40: "spans",
        41: "span_attrs",
        42: "span_events",
        43: "span_links",
        44: "span_event_attrs",
        45: "span_link_attrs",
        50: "spans_flat",
        51: "logs_flat",
        52: "metrics_flat",
        60: "logs_otlp",
        61: "traces_otlp",
        62: "metrics_otlp",
        63: "other",
    }
)
"""The defined slots. Slot 63 is for batches that are not telemetry."""

_FLAT: Final = {Signal.TRACES: 50, Signal.LOGS: 51, Signal.METRICS: 52, Signal.OTHER: 63}
_RAW: Final = {Signal.LOGS: 60, Signal.TRACES: 61, Signal.METRICS: 62}
_SINGLES: Final = {
    50: Signal.TRACES,
    51: Signal.LOGS,
    52: Signal.METRICS,
    60: Signal.LOGS,
    61: Signal.TRACES,
    62: Signal.METRICS,
}
_SPAN_TIMES: Final = ("start_time",)
_TIMES: Final = ("time", "observed_time", "timestamp", "start_time")


def slot_name(slot: int) -> str:
    """Return the name of a slot. Raise `InvalidInput` if the slot is not defined."""
    name = SLOTS.get(slot)
    if name is None:
        raise InvalidInput(f"slot {slot} is not in the slot table; use slot 63 for your own batches")
    return name


def signal_of(slot: int) -> Signal:
    """Return the signal of a slot, or `OTHER` for a slot that several signals share."""
    slot_name(slot)
    if 10 <= slot < 30:
        return Signal.METRICS
    if 30 <= slot < 40:
        return Signal.LOGS
    if 40 <= slot < 50:
        return Signal.TRACES
    return _SINGLES.get(slot, Signal.OTHER)


def flat_slot(signal: Signal) -> int:
    """Return the slot of the flat table of a signal."""
    return _FLAT[signal]


def raw_slot(signal: Signal) -> int:
    """Return the slot for unmodified requests of a signal. Raise `InvalidInput` if there is none."""
    slot = _RAW.get(signal)
    if slot is None:
        raise InvalidInput(
            f"signal {signal.value!r} has no raw form; raw requests are logs, traces or metrics"
        )
    return slot


def event_columns(slot: int) -> tuple[str, ...]:
    """Return the columns that may hold the event time of a slot's rows, in order of preference."""
    return _SPAN_TIMES if slot in (40, 50) else _TIMES


class Trigger(enum.StrEnum):
    """The reason why a segment was sealed."""

    SIZE = "size"
    AGE = "age"
    STREAMS = "streams"
    WAL_CAP = "wal_cap"
    PRESSURE = "pressure"
    FLUSH = "flush"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, order=True)
class StreamKey:
    """The identity of one stream: a slot and the fingerprint of a schema."""

    slot: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SealedSegment:
    """The bundles of one complete segment that waits to be written. It has at least one part."""

    key: StreamKey
    parts: Sequence[Pending]
    byte_count: int
    trigger: Trigger

    @property
    def signal(self) -> Signal:
        return signal_of(self.key.slot)

    @property
    def wal_start(self) -> int:
        """The lowest log position that is needed until this segment is committed."""
        return min(part.wal_start for part in self.parts)
