"""What can be said about an open Quiver: numbers for people, and gauges for a dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.metrics import Registry
from penstock.quiver.subscribers import Subscriber

if TYPE_CHECKING:
    from penstock.quiver.recovery import Recovered

__all__ = ["QuiverMetrics", "QuiverStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverStats:
    """One core as it was when somebody asked. Sizes are bytes."""

    segments: int
    segment_bytes: int
    open_bytes: int
    open_streams: int
    sealed_segments: int
    """Sealed and not yet on disk."""
    wal_bytes: int
    wal_files: int
    wal_cursor: int
    """The lowest position of the log that is still needed."""
    next_segment_seq: int
    next_wal_seq: int
    disk_bytes: int
    cap_bytes: int
    subscribers: tuple[Subscriber, ...]
    damage: tuple[str, ...]
    """What could not be read at the start, in words."""


class QuiverMetrics:
    """The metrics of the log, the open segments and recovery; made once per registry."""

    def __init__(self, registry: Registry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.wal_bytes = gauge("quiver.wal.bytes", "bytes of the log that hold something")
        self.wal_files = gauge("quiver.wal.files", "files of the log")
        self.unsynced = gauge("quiver.wal.unsynced_bytes", "bytes submitted and not yet answered for")
        self.wal_corrupt = counter("quiver.wal.corrupt_total", "damaged ranges found in the log")
        self.open_bytes = gauge("quiver.open.bytes", "bytes that wait in open segments")
        self.open_age = gauge("quiver.open.age_seconds", "how long the oldest bundle waits for its segment")
        self.open_streams = gauge("quiver.open.streams", "streams that have an open segment")
        self.quarantined = gauge("quiver.quarantine.files", "files set aside because they are damaged")
        self.corrupt = counter("quiver.segment.corrupt_total", "segments set aside while they were delivered")
        self.recovery_s = gauge("quiver.recovery.seconds", "how long the last start took")
        self.replayed = gauge("quiver.recovery.replayed", "bundles that the last start took from the log")
        self.deduplicated = gauge(
            "quiver.recovery.deduplicated", "bundles of the log that segments had already"
        )
        self.expired = counter("quiver.recovery.expired_total", "bundles of the log that were too old")

    def recovered(self, found: Recovered, seconds: float) -> None:
        """Tell what a start did."""
        self.recovery_s.set(seconds)
        self.replayed.set(found.replayed)
        self.deduplicated.set(found.deduplicated)
        self.expired.inc(found.expired)
        if found.replay is not None:
            self.wal_corrupt.inc(len(found.replay.damage))
