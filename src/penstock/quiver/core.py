"""The components of one open core, and how they are connected."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.errors import Corrupt, NotFound, PenstockError, PermissionDenied, Unavailable
from penstock.metrics import Registry
from penstock.objects import open_store
from penstock.quiver.admission import Admission, CloseGuard, DiskSpace, LogThrottle
from penstock.quiver.append import Appender, Flusher
from penstock.quiver.config import QuiverConfig
from penstock.quiver.delivery.leases import Bundle, Lease
from penstock.quiver.delivery.subscription import Deliveries, DeliverySettings
from penstock.quiver.maintenance import Gauges, Maintenance, SubscriberUpkeep
from penstock.quiver.metrics import QuiverMetrics, RetentionMetrics
from penstock.quiver.model import SegmentInfo, Trigger
from penstock.quiver.offsets.external import ExternalAcks
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.state import Subscriber
from penstock.quiver.quota import Quota
from penstock.quiver.recovery import Recovered, rebuild_segment, recover
from penstock.quiver.retention.reaper import Reaper, RemovableSegments, Retention
from penstock.quiver.retention.shared_quota import SharedQuota
from penstock.quiver.segments.memtable import Memtable
from penstock.quiver.segments.upload import Uploader
from penstock.quiver.segments.writer import SegmentWriter
from penstock.quiver.wal.log import LoggedFile
from penstock.storage import FileSystem

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverStats:
    """A snapshot of one core. Sizes are in bytes."""

    segments: int
    segment_bytes: int
    open_bytes: int
    open_streams: int
    sealed_segments: int
    """The number of segments that are sealed and not yet on disk."""
    wal_bytes: int
    wal_files: int
    wal_cursor: int
    """The lowest log position that is still needed."""
    next_segment_seq: int
    next_wal_seq: int
    disk_bytes: int
    cap_bytes: int
    subscribers: tuple[Subscriber, ...]
    damage: tuple[str, ...]
    """Descriptions of everything that could not be read at startup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The environment of a core: file system, clock, randomness, metrics, and whether it uses threads."""

    fs: FileSystem
    clock: Clock
    rng: random.Random
    registry: Registry
    threads: bool = True
    maintenance: bool = True


class Core:
    """All components of one core directory. The caller has locked the directory."""

    def __init__(
        self, directory: str, config: QuiverConfig, runtime: Runtime, *, core_id: int, cores: int
    ) -> None:
        started_s = runtime.clock.monotonic()
        self.uploader: Uploader | None = None
        self.config = config
        self.clock = runtime.clock
        self.fs = runtime.fs
        self._directory = directory
        self._repair_lock = threading.Lock()
        self._rebuilt: set[int] = set()
        self.metrics = QuiverMetrics(runtime.registry)
        found = recover(runtime.fs, directory, config, core_id=core_id, clock=runtime.clock)
        self.offsets = found.offsets
        self.store = found.store
        self.wal = found.wal
        self.damage = found.damage
        self.deliveries = Deliveries(
            found.offsets,
            _delivery_settings(config),
            clock=runtime.clock,
            rng=runtime.rng,
            registry=runtime.registry,
        )
        self.deliveries.count_found(found.losses)
        self.segment_writer = SegmentWriter(
            found.store,
            next_seq=found.next_segment_seq,
            on_written=self._on_written,
            clock=runtime.clock,
            rng=runtime.rng,
            registry=runtime.registry,
        )
        self.memtable = Memtable(self.segment_writer, config.segment, end=found.cursor, clock=runtime.clock)
        self._replay(found)
        self.appender = Appender(
            found.wal if config.has_wal else None,
            self.memtable,
            config.wal,
            next_seq=found.next_wal_seq,
            clock=runtime.clock,
            registry=runtime.registry,
            threads=runtime.threads,
            logged_file=LoggedFile(runtime.fs, os.path.join(directory, "meta")),
        )
        self.uploader = self._make_uploader(runtime, core_id)
        self.flusher = Flusher(self.memtable, self.segment_writer, self.wal)
        self._assemble_limits(runtime, core_id=core_id, cores=cores)
        self.maintenance = Maintenance(
            self._steps(runtime),
            guard=self.guard,
            throttle=self._throttle,
            interval_s=config.maintenance_interval_s,
        )
        self._measure_recovery(found, runtime.clock.monotonic() - started_s)
        self.appender.start()
        if runtime.threads:
            self.segment_writer.start()
            if self.uploader is not None:
                self.uploader.start()
        if runtime.maintenance:
            self.maintenance.start()

    def _replay(self, found: Recovered) -> None:
        """Replay the log. Write segments on the way, so that a long log needs little memory."""
        for parts, end in found.pending():
            self.memtable.add(parts, end=end)
            while self.segment_writer.step():
                pass
        if self.wal is not None:
            # Marks after the last entry are not needed, but they prevent files from being removed.
            self.memtable.add((), end=self.wal.active_start)
        if found.expired:
            self.deliveries.metrics.lost_bundles.labels(reason="age", signal="unknown").inc(found.expired)
        if found.replayed or found.deduplicated:
            _LOGGER.info("replayed %d bundles from the log", found.replayed)

    def _make_uploader(self, runtime: Runtime, core_id: int) -> Uploader | None:
        """Return an uploader with all existing segments queued, or None if uploads are not configured."""
        upload = self.config.upload
        if upload.store is None:
            return None
        uploader = Uploader(
            self.store,
            open_store(upload.store),
            prefix=upload.prefix,
            core_id=core_id,
            clock=runtime.clock,
            rng=runtime.rng,
            registry=runtime.registry,
            on_corrupt=self._on_corrupt_copy,
        )
        uploader.submit(self.store.infos())
        return uploader

    def _on_corrupt_copy(self, info: SegmentInfo, error: Corrupt) -> None:
        if self.quarantine(info.seq, str(error)) and self.uploader is not None:
            self.uploader.submit([self.store.get(info.seq)])

    def _on_written(self, info: SegmentInfo) -> None:
        self.offsets.add_segment(info)
        if self.uploader is not None:
            self.uploader.submit([info])
        if self.wal is not None:
            self.wal.advance(self.memtable.needed())

    def _assemble_limits(self, runtime: Runtime, *, core_id: int, cores: int) -> None:
        """Create the components that limit disk and memory: the quota, the reaper, and admission."""
        config, clock = self.config, runtime.clock
        metrics = RetentionMetrics(runtime.registry)
        self.guard = CloseGuard()
        self._throttle = LogThrottle(clock)
        self._shared = self._make_shared_quota(runtime, core_id, cores)
        quota = Quota(
            runtime.fs,
            self._directory,
            hard_bytes=config.cap_per_core(cores),
            target_bytes=config.segment.target_bytes,
            wal_bytes=config.wal_bytes,
            min_free_bytes=config.retention.min_free_bytes,
            clock=clock,
            limit=None if self._shared is None else self._shared.limit,
        )
        self.segments = RemovableSegments(self.store, self.wal, self.segment_writer, self.uploader)
        reaper = Reaper(
            self.offsets,
            self.deliveries,
            self.segments,
            quota,
            Retention(
                policy=config.retention.size_cap_policy,
                max_age_s=config.retention.max_age_s,
                headroom_bytes=config.retention.headroom_bytes,
            ),
            core_id=core_id,
            clock=clock,
            shared=self._shared,
            metrics=metrics,
        )
        self.space = DiskSpace(
            quota,
            reaper,
            self.segments,
            config=config,
            memtable=self.memtable,
            store=self.store,
            wal=self.wal,
            offsets=self.offsets,
            appender=self.appender,
            flusher=self.flusher,
            guard=self.guard,
            throttle=self._throttle,
            clock=clock,
        )
        self.admission = Admission(
            config,
            appender=self.appender,
            memtable=self.memtable,
            flusher=self.flusher,
            space=self.space,
            guard=self.guard,
            metrics=metrics,
            cores=cores,
        )

    def _make_shared_quota(self, runtime: Runtime, core_id: int, cores: int) -> SharedQuota | None:
        if cores == 1:
            return None
        return SharedQuota(
            runtime.fs,
            os.path.dirname(self._directory),
            core_id=core_id,
            cores=cores,
            cap_bytes=self.config.retention.cap_bytes,
            target_bytes=self.config.segment.target_bytes,
            clock=runtime.clock,
        )

    def _steps(self, runtime: Runtime) -> list[Callable[[], object]]:
        """Return the steps of maintenance in order."""
        upkeep = SubscriberUpkeep(
            self.offsets,
            self.deliveries,
            ExternalAcks(runtime.fs, self._directory),
            orphan_timeout_s=self.config.subscribers.orphan_timeout_s,
            clock=runtime.clock,
        )
        gauges = Gauges(
            self.metrics,
            self.deliveries,
            self.memtable,
            self.wal,
            fs=runtime.fs,
            directory=self._directory,
            clock=runtime.clock,
        )
        steps: list[Callable[[], object]] = [self.memtable.seal_due]
        if not runtime.threads:
            steps.append(self._write_sealed)
        return [
            *steps,
            self.deliveries.expire,
            upkeep.apply_external_acks,
            upkeep.drop_orphans,
            self._tend_offsets,
            self.flusher.advance_log,
            self.space.reap,
            self.space.remove_delivered_log,
            gauges.update,
        ]

    def _write_sealed(self) -> None:
        while self.segment_writer.step():
            pass
        while self.uploader is not None and self.uploader.step():
            pass

    def _tend_offsets(self) -> None:
        self.offsets.tend(
            self.segment_writer.first_unwritten_seq, self.appender.next_seq, logged=self.appender.logged
        )

    def _measure_recovery(self, found: Recovered, seconds: float) -> None:
        metrics = self.metrics
        metrics.recovery_s.set(seconds)
        metrics.replayed.set(found.replayed)
        metrics.deduplicated.set(found.deduplicated)
        metrics.expired.inc(found.expired)
        if found.replay is not None:
            metrics.wal_corrupt.inc(len(found.replay.damage))

    def read(self, claim: Lease) -> Bundle | None:
        """Return the bundle of a claim, or None if it cannot be read. In that case the claim has ended."""
        try:
            batch = self.store.read(claim.ref.segment_seq, claim.ref.bundle)
        except Corrupt as error:
            if self.quarantine(claim.ref.segment_seq, str(error)):
                self.deliveries.defer(claim, 0)
            return None
        except (PenstockError, IndexError) as error:
            _LOGGER.error("segment %d cannot be read: %s", claim.ref.segment_seq, error)
            should_quarantine = self.deliveries.read_failed(claim)
            # A failed device may recover, and the bytes with it.
            if should_quarantine and not isinstance(error, Unavailable | PermissionDenied):
                self._give_up(claim.ref.segment_seq, str(error))
            return None
        except BaseException:
            # The bundle is not the cause, so another consumer may have it.
            self.deliveries.abandon(claim)
            raise
        return Bundle(claim, batch, items=batch.num_rows, resolver=self.deliveries)

    def quarantine(self, seq: int, reason: str) -> bool:
        """Quarantine a damaged segment, and keep its bytes as evidence.

        Return True if it was rebuilt from the log. Otherwise it is dropped for every subscriber.
        """
        with self._repair_lock:
            try:
                self.store.verify(seq)
            except NotFound:
                return False
            except PenstockError:
                pass
            else:
                return True  # another thread has already rebuilt it
            info = self.store.get(seq)
            self.metrics.corrupt.inc()
            self.damage.append(f"segment {seq} of bundles {info.wal_seq_min} to {info.wal_seq_max}: {reason}")
            if self._rebuild(info, reason):
                return True
            self._drop_corrupt(seq, reason)
            return False

    def _rebuild(self, info: SegmentInfo, reason: str) -> bool:
        """Rebuild a segment from the log, at most once per segment, because a disk may keep damaging it."""
        if self.wal is None or info.seq in self._rebuilt:
            return False
        self._rebuilt.add(info.seq)
        try:
            self.store.quarantine(info.seq, reason)
            return rebuild_segment(self.store, info, self.fs, os.path.join(self._directory, "wal"))
        except PenstockError as error:
            _LOGGER.error("cannot rebuild segment %d: %s", info.seq, error)
            return False

    def _give_up(self, seq: int, reason: str) -> None:
        self.metrics.corrupt.inc()
        self._drop_corrupt(seq, reason)

    def _drop_corrupt(self, seq: int, reason: str) -> None:
        self.deliveries.drop(seq, Outcome.DROPPED, reason="corrupt", force=True)
        if seq not in self.store.quarantined:
            with contextlib.suppress(PenstockError):
                self.store.quarantine(seq, reason)

    def stats(self) -> QuiverStats:
        """Return counts and sizes of all parts."""
        return QuiverStats(
            segments=len(self.store.infos()),
            segment_bytes=self.store.byte_count,
            open_bytes=self.memtable.open_bytes,
            open_streams=self.memtable.stream_count,
            sealed_segments=self.segment_writer.count,
            wal_bytes=0 if self.wal is None else self.wal.data_bytes,
            wal_files=0 if self.wal is None else self.wal.rotated_count + 1,
            wal_cursor=0 if self.wal is None else self.wal.cursor,
            next_segment_seq=self.segment_writer.next_seq,
            next_wal_seq=self.appender.next_seq,
            disk_bytes=self.space.used_bytes(),
            cap_bytes=self.space.cap_bytes,
            subscribers=tuple(self.deliveries.subscribers()),
            damage=tuple(self.damage),
        )

    def close(self) -> None:
        """Stop every component in order. A failed step does not prevent the next one."""
        with contextlib.ExitStack() as stack:
            if self.wal is not None:
                stack.callback(self.wal.close)
            stack.callback(self._close_offsets)
            stack.callback(self.deliveries.close)
            if self.uploader is not None:
                stack.callback(self.uploader.stop)
            stack.callback(self._clear_log)
            stack.callback(self.segment_writer.stop)
            stack.callback(self._last_flush)
            stack.callback(self.appender.close)
            if self._shared is not None:
                stack.callback(self._shared.close)
            stack.callback(self.maintenance.stop)

    def _last_flush(self) -> None:
        try:
            self.flusher.flush(Trigger.SHUTDOWN)
        except PenstockError as error:
            if not self.config.has_wal:
                raise
            _LOGGER.error("cannot write the open segments; their data stays in the log: %s", error)

    def _clear_log(self) -> None:
        """Remove segments that every subscriber has resolved. Empty the log if no segment is left.

        The log stays while a segment is left, because a damaged segment can be rebuilt from it.
        """
        try:
            self.space.reap()
            if self.wal is not None and not self.store.infos() and not self.memtable.memory_bytes:
                self.wal.clear()
        except PenstockError as error:
            _LOGGER.warning("cannot remove delivered data until the next start: %s", error)

    def _close_offsets(self) -> None:
        self.offsets.close(
            self.segment_writer.first_unwritten_seq, self.appender.next_seq, logged=self.appender.logged
        )


def _delivery_settings(config: QuiverConfig) -> DeliverySettings:
    return DeliverySettings(
        max_in_flight=config.delivery.max_in_flight,
        claim_timeout_s=config.delivery.claim_timeout_s,
        newest_first=config.delivery.order == "newest_first",
        retry_initial_s=config.retry.initial_s,
        retry_max_s=config.retry.max_s,
        retry_multiplier=config.retry.multiplier,
        max_attempts=config.retry.max_attempts,
    )
