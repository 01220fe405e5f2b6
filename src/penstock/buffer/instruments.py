"""Every metric of the buffer, by its public name."""

from __future__ import annotations

from penstock.metrics import DEFAULT_REGISTRY, Registry


class Instruments:
    """The buffer's counters, gauges and histograms in one registry. Flush counters count successes only."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = r = registry or DEFAULT_REGISTRY
        self.batches_flushed = r.counter("buffer.batches_flushed", "Batches stored and in the queue.")
        self.entries_flushed = r.counter("buffer.entries_flushed", "Records stored and in the queue.")
        self.bytes_flushed = r.counter("buffer.bytes_flushed", "Record bytes before compression.")
        self.bytes_written = r.counter("buffer.bytes_written", "Bytes of batch objects in the queue.")
        self.batches_collected = r.counter("buffer.batches_collected", "Batches delivered by a consumer.")
        self.entries_collected = r.counter("buffer.entries_collected", "Records delivered by a consumer.")
        self.bytes_collected = r.counter("buffer.bytes_collected", "Record bytes delivered by a consumer.")
        self.acks = r.counter("buffer.acks", "Batches acknowledged.")
        self.descriptors_handed_out = r.counter("buffer.descriptors_handed_out", "Descriptors handed out.")
        self.gc_files_deleted = r.counter("buffer.gc_files_deleted", "Batch objects deleted as garbage.")
        self.gc_files_failed = r.counter("buffer.gc_files_failed", "Garbage that could not be deleted yet.")
        self.manifest_writes = r.counter(
            "buffer.manifest_writes", "Attempts to write the manifest.", ("role",)
        )
        self.manifest_conflicts = r.counter("buffer.manifest_conflicts", "Attempts that lost.", ("role",))
        self.append_unknown = r.counter(
            "buffer.append_unknown_total", "Appends whose reply did not settle them.", ("resolved",)
        )
        self.gaps = r.counter("buffer.gap_total", "Holes found between delivered sequences.")
        self.duplicates = r.counter("buffer.duplicate_total", "Locations seen twice in the queue.")
        self.bad_batches = r.counter("buffer.bad_batch_total", "Batches set aside as dead letters.")
        self.reuploads = r.counter("buffer.reupload_total", "Batches stored again under a new name.")
        self.queue_length = r.gauge("buffer.queue_length", "Entries in the manifest when last seen.")
        self.consumer_lag = r.gauge("buffer.consumer_lag_seconds", "Age of the last delivered batch.")
        self.manifest_bytes = r.gauge("buffer.manifest_bytes", "Size of the manifest when last seen.")
        self.inflight_bytes = r.gauge("buffer.inflight_bytes", "Record bytes accepted and not yet durable.")
        self.oldest_unflushed = r.gauge(
            "buffer.oldest_unflushed_seconds", "Age of the oldest accepted call that is not durable."
        )
        self.flush_duration = r.histogram("buffer.flush_duration_seconds", "Encode, store and append.")
        self.fetch_duration = r.histogram("buffer.fetch_duration_seconds", "Fetch and decode one batch.")
        self.gc_duration = r.histogram("buffer.gc_duration_seconds", "One garbage collection cycle.")
        self.append_group_size = r.histogram(
            "buffer.append_group_size", "Batches per manifest write.", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
