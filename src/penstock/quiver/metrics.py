"""The metrics of an open Quiver."""

from __future__ import annotations

from penstock.metrics import Registry


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


class RetentionMetrics:
    """The metrics of caps and deletions; asking again for one registry gives the same metrics."""

    def __init__(self, registry: Registry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.evictions = counter("quiver.gc.evictions_total", "segments deleted", ("reason",))
        self.emergencies = counter(
            "quiver.retention.size_emergency_total",
            "times that the cap made unprocessed data go",
        )
        self.throttles = counter("quiver.ingest.throttle_total", "writes refused or held up by a cap")
        self.core_bytes = gauge("quiver.core.bytes", "bytes on disk", ("core_id",))
        self.cap_fraction = gauge("quiver.core.cap_fraction", "bytes on disk by the cap", ("core_id",))


class DeliveryMetrics:
    """Made once per registry; asking again gives the same metrics."""

    def __init__(self, registry: Registry) -> None:
        by_subscriber = ("subscriber",)
        by_loss = ("reason", "signal")
        counter, gauge = registry.counter, registry.gauge
        self.dropped_segments = counter(
            "quiver.subscriber.dropped_segments_total",
            "segments dropped unprocessed",
            by_subscriber,
        )
        self.segments_dropped = counter("quiver.segment.dropped_total", "segments dropped, each counted once")
        self.nacks = counter("quiver.subscriber.nacks_total", "bundles given back with a nack", by_subscriber)
        self.redelivered = counter(
            "quiver.subscriber.redelivered_total", "bundles handed out again", by_subscriber
        )
        self.stale_claims = counter(
            "quiver.subscriber.stale_claims_total",
            "answers after the end of a claim",
            by_subscriber,
        )
        self.lost_segments = counter("quiver.loss.segments", "segments lost to somebody", by_loss)
        self.lost_bundles = counter("quiver.loss.bundles", "bundles lost to somebody", by_loss)
        self.lost_items = counter("quiver.loss.items", "items lost to somebody", by_loss)
        self.lost_bytes = counter("quiver.loss.bytes", "bytes of segments lost to somebody", by_loss)
        self.log_bytes = gauge("quiver.ack_log.bytes", "bytes of the acknowledgement log")
        self.log_records = gauge("quiver.ack_log.records", "records written since the start")
        self.since_checkpoint = gauge("quiver.ack_log.since_checkpoint", "records behind the last checkpoint")
        self.hwm = gauge("quiver.subscriber.hwm", "everything up to this segment is resolved", by_subscriber)
        self.lag_segments = gauge(
            "quiver.subscriber.lag_segments", "segments that are not all resolved", by_subscriber
        )
        self.lag_seconds = gauge(
            "quiver.subscriber.lag_seconds", "age of the oldest data that is not resolved", by_subscriber
        )
        self.gap_segments = gauge(
            "quiver.subscriber.gap_segments", "segments resolved out of order or in part", by_subscriber
        )
        self.in_flight = gauge("quiver.subscriber.in_flight", "bundles claimed", by_subscriber)
        self.deferred = gauge("quiver.subscriber.deferred", "bundles put off for later", by_subscriber)

    def clear(self, subscriber: str) -> None:
        """Set the lag of a removed subscriber to 0, or an alarm about it would never end."""
        for one in (self.lag_segments, self.lag_seconds, self.gap_segments, self.in_flight, self.deferred):
            one.set(0, subscriber=subscriber)
