"""The parts of one open core, put together."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.errors import Corrupt, NotFound, PenstockError, PermissionDenied, Unavailable
from penstock.metrics import Registry
from penstock.objects import open_store
from penstock.quiver.append import Admission, Appender
from penstock.quiver.config import QuiverConfig
from penstock.quiver.delivery.leases import Bundle, Lease
from penstock.quiver.delivery.subscription import Deliveries, DeliverySettings
from penstock.quiver.maintenance import Maintenance
from penstock.quiver.metrics import QuiverMetrics, QuiverStats
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.recovery import Recovered, recover
from penstock.quiver.segments.memtable import Memtable, Trigger
from penstock.quiver.segments.recovery import rebuild_segment
from penstock.quiver.segments.writer import SegmentWriter
from penstock.quiver.tools.upload import Uploader
from penstock.quiver.wal.logged import LoggedFile
from penstock.storage import FileSystem

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a core gets from outside: file system, clock, randomness and metrics."""

    fs: FileSystem
    clock: Clock
    rng: random.Random
    registry: Registry
    threads: bool = True
    maintenance: bool = True


class Core:
    """All parts of one core directory. The caller has locked the directory."""

    def __init__(
        self, directory: str, config: QuiverConfig, runtime: Runtime, *, core_id: int, cores: int
    ) -> None:
        started_s = runtime.clock.monotonic()
        self.uploader: Uploader | None = None
        self.config = config
        self.clock = runtime.clock
        self._fs = runtime.fs
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
        self.deliveries.count_found(found.reconciled)
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
        self.maintenance = Maintenance(self, runtime, directory, core_id=core_id, cores=cores)
        self.admission = Admission(
            config,
            self.appender,
            self.memtable,
            self.maintenance,
            cores=cores,
            flush=self.flush,
            cut=self.cut,
            throttles=self.deliveries.metrics.throttles,
        )
        self.metrics.recovered(found, runtime.clock.monotonic() - started_s)
        self.appender.start()
        if runtime.threads:
            self.segment_writer.start()
            if self.uploader is not None:
                self.uploader.start()
        if runtime.maintenance:
            self.maintenance.start()

    def _replay(self, found: Recovered) -> None:
        """Replay the log, writing segments on the way, so that a long log needs little memory."""
        for parts, end in found.pending():
            self.memtable.add(parts, end=end)
            while self.segment_writer.step():
                pass
        if self.wal is not None:
            # Nobody needs marks after the last entry, but they keep files from being cut.
            self.memtable.add((), end=self.wal.active_start)
        if found.expired:
            self.deliveries.metrics.lost_bundles.labels(reason="age", signal="unknown").inc(found.expired)
        if found.replayed or found.deduplicated:
            _LOGGER.info("the log had %d bundles to take in", found.replayed)

    def _make_uploader(self, runtime: Runtime, core_id: int) -> Uploader | None:
        """Return an uploader with all existing segments queued; None if nothing is to be uploaded."""
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
        self.advance()

    def remove(self, *seqs: int) -> None:
        """Remove the files of segments that nobody needs; durable on return."""
        self.store.remove(*seqs)
        if self.uploader is not None:
            for seq in seqs:
                self.uploader.forget(seq)

    def bytes_of(self, seq: int) -> int:
        """Return what removing a segment frees. Raises `NotFound`."""
        return self.store.bytes_of(seq)

    def advance(self) -> None:
        """Cut the log down to what is still needed."""
        if self.wal is not None:
            self.wal.advance(self.memtable.needed())

    def cut(self) -> None:
        """Cut the log and remove the file that a rotation has just closed."""
        self.advance()
        if self.wal is not None:
            self.wal.tidy()

    def flush(self, trigger: Trigger = Trigger.FLUSH, timeout_s: float | None = None) -> None:
        """Seal open segments and wait until everything sealed is on disk. Raises as `SegmentWriter.drain`."""
        self.memtable.seal_all(trigger)
        self.segment_writer.drain(timeout_s)
        self.advance()

    def read(self, claim: Lease) -> Bundle | None:
        """Return the bundle of a claim, or None if it cannot be read; then the claim has ended."""
        try:
            batch = self.store.read(claim.ref.segment_seq, claim.ref.bundle)
        except Corrupt as error:
            if self.quarantine(claim.ref.segment_seq, str(error)):
                self.deliveries.defer(claim, 0)
            return None
        except (PenstockError, IndexError) as error:
            _LOGGER.error("segment %d cannot be read: %s", claim.ref.segment_seq, error)
            is_hopeless = self.deliveries.read_failed(claim)
            # A device that fails may come back, and the bytes with it.
            if is_hopeless and not isinstance(error, Unavailable | PermissionDenied):
                self._give_up(claim.ref.segment_seq, str(error))
            return None
        except BaseException:
            # Whatever it is, the bundle is not at fault: another consumer may have it.
            self.deliveries.abandon(claim)
            raise
        return Bundle(claim, batch, items=batch.num_rows, resolver=self.deliveries)

    def quarantine(self, seq: int, reason: str) -> bool:
        """Quarantine a damaged segment; its bytes are kept as evidence.

        Return True when it is whole again, because the log still had it. Otherwise nobody waits for it any
        more.
        """
        with self._repair_lock:
            try:
                self.store.verify(seq)
            except NotFound:
                return False
            except PenstockError:
                pass
            else:
                return True  # somebody else came upon it and put it right
            info = self.store.get(seq)
            self.metrics.corrupt.inc()
            self.damage.append(f"segment {seq} of bundles {info.wal_seq_min} to {info.wal_seq_max}: {reason}")
            if self._rebuild(info, reason):
                return True
            self._drop_corrupt(seq, reason)
            return False

    def _rebuild(self, info: SegmentInfo, reason: str) -> bool:
        """Rebuild a segment from the log; once for each, because a disk may go on damaging it."""
        if self.wal is None or info.seq in self._rebuilt:
            return False
        self._rebuilt.add(info.seq)
        try:
            self.store.quarantine(info.seq, reason)
            return rebuild_segment(self.store, info, self._fs, os.path.join(self._directory, "wal"))
        except PenstockError as error:
            _LOGGER.error("segment %d could not be put together again: %s", info.seq, error)
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
            disk_bytes=self.maintenance.disk_bytes(),
            cap_bytes=self.maintenance.cap_bytes,
            subscribers=tuple(self.deliveries.subscribers()),
            damage=tuple(self.damage),
        )

    def close(self) -> None:
        """Stop every part in order. Each step is tried, whatever became of the one before it."""
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
            stack.callback(self.maintenance.stop)

    def _last_flush(self) -> None:
        try:
            self.flush(Trigger.SHUTDOWN)
        except PenstockError as error:
            if not self.config.has_wal:
                raise
            _LOGGER.error("what is open stays in the log: %s", error)

    def _clear_log(self) -> None:
        """Remove segments that everybody has resolved, and empty the log once no segment is left.

        As long as one is left the log stays: a damaged segment can be rebuilt from it.
        """
        try:
            self.maintenance.reap_last()
            if self.wal is not None and not self.store.infos() and not self.memtable.memory_bytes:
                self.wal.clear()
        except PenstockError as error:
            _LOGGER.warning("delivered data stays until the next start: %s", error)

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
