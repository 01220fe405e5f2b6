"""The metrics of the buffer, by their public names."""

from __future__ import annotations

from penstock.metrics import DEFAULT_REGISTRY, CounterChild, GaugeChild, HistogramChild, Registry


class Instruments:
    """The buffer's counters, gauges and histograms in one registry. Flush counters count successes only.

    Metrics without labels are bound once, here, because every batch uses them. The owner of a labelled metric
    binds its own labels.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = r = registry or DEFAULT_REGISTRY

        def counter(name: str, help: str) -> CounterChild:
            return r.counter(name, help).labels()

        def gauge(name: str, help: str) -> GaugeChild:
            return r.gauge(name, help).labels()

        def histogram(name: str, help: str) -> HistogramChild:
            return r.histogram(name, help).labels()

        self.batches_flushed = counter("buffer.batches_flushed", "Batches stored and in the queue.")
        self.entries_flushed = counter("buffer.entries_flushed", "Records stored and in the queue.")
        self.bytes_flushed = counter("buffer.bytes_flushed", "Record bytes before compression.")
        self.bytes_written = counter("buffer.bytes_written", "Bytes of batch objects in the queue.")
        self.batches_collected = counter("buffer.batches_collected", "Batches delivered by a consumer.")
        self.entries_collected = counter("buffer.entries_collected", "Records delivered by a consumer.")
        self.bytes_collected = counter("buffer.bytes_collected", "Record bytes delivered by a consumer.")
        self.acks = counter("buffer.acks", "Batches acknowledged.")
        self.descriptors_handed_out = counter("buffer.descriptors_handed_out", "Descriptors handed out.")
        self.gc_files_deleted = counter("buffer.gc_files_deleted", "Batch objects deleted as garbage.")
        self.gc_files_failed = counter("buffer.gc_files_failed", "Garbage that could not be deleted yet.")
        self.manifest_writes = r.counter(
            "buffer.manifest_writes", "Attempts to write the manifest.", ("role",)
        )
        self.manifest_conflicts = r.counter("buffer.manifest_conflicts", "Attempts that lost.", ("role",))
        self.append_unknown = r.counter(
            "buffer.append_unknown_total", "Appends whose reply did not settle them.", ("resolved",)
        )
        self.gaps = counter("buffer.gap_total", "Holes found between delivered sequences.")
        self.duplicates = counter("buffer.duplicate_total", "Locations seen twice in the queue.")
        self.bad_batches = counter("buffer.bad_batch_total", "Batches set aside as dead letters.")
        self.reuploads = counter("buffer.reupload_total", "Batches stored again under a new name.")
        self.queue_length = gauge("buffer.queue_length", "Entries in the manifest when last seen.")
        self.consumer_lag = gauge("buffer.consumer_lag_seconds", "Age of the last delivered batch.")
        self.manifest_bytes = gauge("buffer.manifest_bytes", "Size of the manifest when last seen.")
        self.inflight_bytes = gauge("buffer.inflight_bytes", "Record bytes accepted and not yet durable.")
        self.oldest_unflushed = gauge(
            "buffer.oldest_unflushed_seconds", "Age of the oldest accepted call that is not durable."
        )
        self.flush_duration = histogram("buffer.flush_duration_seconds", "Encode, store and append.")
        self.fetch_duration = histogram("buffer.fetch_duration_seconds", "Fetch and decode one batch.")
        self.gc_duration = histogram("buffer.gc_duration_seconds", "One garbage collection cycle.")
        self.append_group_size = r.histogram(
            "buffer.append_group_size", "Batches per manifest write.", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        ).labels()
