"""The metrics of an open Quiver."""

from __future__ import annotations

from penstock.metrics import Registry


class QuiverMetrics:
    """The metrics of the log, the open segments and recovery. Each registry creates them once."""

    def __init__(self, registry: Registry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.wal_bytes = gauge("quiver.wal.bytes", "bytes of data in the log")
        self.wal_files = gauge("quiver.wal.files", "files of the log")
        self.unsynced = gauge("quiver.wal.unsynced_bytes", "bytes submitted to the log and not yet written")
        self.wal_corrupt = counter("quiver.wal.corrupt_total", "damaged ranges found in the log")
        self.open_bytes = gauge("quiver.open.bytes", "bytes that wait in open segments")
        self.open_age = gauge("quiver.open.age_seconds", "age of the oldest bundle in an open segment")
        self.open_streams = gauge("quiver.open.streams", "streams with an open segment")
        self.quarantined = gauge("quiver.quarantine.files", "damaged files in the quarantine")
        self.corrupt = counter("quiver.segment.corrupt_total", "segments quarantined during delivery")
        self.recovery_s = gauge("quiver.recovery.seconds", "duration of the last startup")
        self.replayed = gauge("quiver.recovery.replayed", "bundles replayed from the log at the last startup")
        self.deduplicated = gauge(
            "quiver.recovery.deduplicated", "bundles skipped at the last startup because a segment has them"
        )
        self.expired = counter("quiver.recovery.expired_total", "bundles of the log that were too old")


class RetentionMetrics:
    """The metrics of caps and deletions. Each registry creates them once."""

    def __init__(self, registry: Registry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.evictions = counter("quiver.gc.evictions_total", "segments deleted", ("reason",))
        self.emergencies = counter(
            "quiver.retention.size_emergency_total",
            "times that unprocessed data was dropped for the cap",
        )
        self.throttles = counter("quiver.ingest.throttle_total", "writes refused or delayed by a cap")
        self.core_bytes = gauge("quiver.core.bytes", "bytes on disk", ("core_id",))
        self.cap_fraction = gauge(
            "quiver.core.cap_fraction", "bytes on disk divided by the cap", ("core_id",)
        )


class DeliveryMetrics:
    """The metrics of delivery. Each registry creates them once."""

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
        self.nacks = counter("quiver.subscriber.nacks_total", "bundles returned with a nack", by_subscriber)
        self.redelivered = counter(
            "quiver.subscriber.redelivered_total", "bundles delivered again", by_subscriber
        )
        self.stale_claims = counter(
            "quiver.subscriber.stale_claims_total",
            "acks and nacks that came after the claim had ended",
            by_subscriber,
        )
        self.lost_segments = counter(
            "quiver.loss.segments", "segments lost to at least one subscriber", by_loss
        )
        self.lost_bundles = counter("quiver.loss.bundles", "bundles lost to at least one subscriber", by_loss)
        self.lost_items = counter("quiver.loss.items", "items lost to at least one subscriber", by_loss)
        self.lost_bytes = counter(
            "quiver.loss.bytes", "bytes of segments lost to at least one subscriber", by_loss
        )
        self.log_bytes = gauge("quiver.ack_log.bytes", "bytes of the acknowledgement log")
        self.log_records = gauge("quiver.ack_log.records", "records written since the start")
        self.since_checkpoint = gauge("quiver.ack_log.since_checkpoint", "records after the last checkpoint")
        self.hwm = gauge("quiver.subscriber.hwm", "segment up to which everything is resolved", by_subscriber)
        self.lag_segments = gauge(
            "quiver.subscriber.lag_segments", "segments that are not fully resolved", by_subscriber
        )
        self.lag_seconds = gauge(
            "quiver.subscriber.lag_seconds", "age of the oldest unresolved data", by_subscriber
        )
        self.gap_segments = gauge(
            "quiver.subscriber.gap_segments", "segments resolved out of order or partly", by_subscriber
        )
        self.in_flight = gauge("quiver.subscriber.in_flight", "bundles claimed", by_subscriber)
        self.deferred = gauge("quiver.subscriber.deferred", "bundles deferred", by_subscriber)

    def clear(self, subscriber: str) -> None:
        """Set the gauges of a removed subscriber to 0, so that alerts on them end."""
        for one in (self.lag_segments, self.lag_seconds, self.gap_segments, self.in_flight, self.deferred):
            one.set(0, subscriber=subscriber)
