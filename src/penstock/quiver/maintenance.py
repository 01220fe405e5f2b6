"""What Quiver does periodically: seal segments, cut the log, delete what is done, free space on demand."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.clock import SteadyClock
from penstock.errors import NotFound, PenstockError
from penstock.quiver.errors import AtCapacity, Closed
from penstock.quiver.offsets.external import ExternalAck, ExternalAcks
from penstock.quiver.quota import FRAME_BYTES, Quota, footprint
from penstock.quiver.retention.reaper import FirstSeen, Reaper, Retention
from penstock.quiver.retention.shared_quota import SharedQuota
from penstock.quiver.segments.memtable import Trigger
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.quiver.core import Core, Runtime

_LOGGER = logging.getLogger(__name__)
_SLICE_S: Final = 0.01
_MEASURE_EVERY_S: Final = 1.0
_WARN_EVERY_S: Final = 10.0
_RESERVED: Final = "reserved"


class Maintenance:
    """The periodic work and the disk quota of one core.

    `run` does what is due; after `start` a thread calls it.
    """

    def __init__(self, core: Core, runtime: Runtime, directory: str, *, core_id: int, cores: int) -> None:
        config = core.config
        self._core = core
        self._clock = SteadyClock(runtime.clock)
        self._fs = runtime.fs
        self._directory = directory
        self._threads = runtime.threads
        self._external_acks = ExternalAcks(runtime.fs, directory)
        self._shared = _shared_quota(core, runtime, directory, core_id=core_id, cores=cores)
        self._quota = Quota(
            runtime.fs,
            directory,
            hard_bytes=config.cap_per_core(cores),
            target_bytes=config.segment.target_bytes,
            wal_bytes=config.wal_bytes,
            min_free_bytes=config.retention.min_free_bytes,
            clock=runtime.clock,
            shared=self._shared,
        )
        self._reaper = Reaper(
            core.offsets,
            core.deliveries,
            core,
            self._quota,
            Retention(
                policy=config.retention.size_cap_policy,
                max_age_s=config.retention.max_age_s,
                headroom_bytes=config.retention.headroom_bytes,
            ),
            core_id=core_id,
            clock=runtime.clock,
            shared=self._shared,
            may_remove=self._may_remove,
        )
        self._orphans_seen = FirstSeen[tuple[str, int]]()
        self._pressure = 0
        self._warned_s: float | None = None
        self._measured_s: float | None = None
        self._turn = threading.Lock()
        self._counting = threading.RLock()
        self._idle = threading.Condition()
        self._busy: list[int] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- time ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Call `run` on a thread every `maintenance_interval` from here on."""
        self._thread = threading.Thread(target=self._loop, name="quiver-maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step under way; nothing is done any more when this returns."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._turn:
            pass  # another thread may be in `run`
        with self._idle:
            # Not for ourselves: a signal may have come while this very thread was at work.
            self._idle.wait_for(lambda: all(one == threading.get_ident() for one in self._busy))
        if self._shared is not None:
            with self._counting:
                self._shared.close()

    def _loop(self) -> None:
        while not self._stopping.wait(self._core.config.maintenance_interval_s):
            try:
                self.run()
            except Closed:
                return
            except PenstockError as error:
                self._warn("maintenance", error)
            except Exception:
                if self._may_warn():
                    _LOGGER.exception("maintenance")

    def _may_warn(self) -> bool:
        """Whether it is time for another log line about what may happen ten times a second."""
        now_s = self._clock.monotonic()
        if self._warned_s is not None and now_s - self._warned_s < _WARN_EVERY_S:
            return False
        self._warned_s = now_s
        return True

    def run(self) -> None:
        """Do what is due now. Raises what the disk raises; what was not done is due the next time.

        Raises `Closed` after `stop`: the directory may belong to another process.
        """
        core = self._core
        with self._turn, contextlib.ExitStack() as stack:
            self._check_open()
            # Each step is tried, whatever became of the others; what runs first is called last.
            stack.callback(self._measure)
            stack.callback(self._forget_delivered)
            stack.callback(self._reap)
            stack.callback(core.advance)
            stack.callback(
                core.offsets.tend,
                core.segment_writer.first_unwritten_seq,
                core.appender.next_seq,
                logged=core.appender.logged,
            )
            stack.callback(self._drop_orphans)
            stack.callback(self._apply_external_acks)
            stack.callback(core.deliveries.expire)
            stack.callback(self._finalize)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Guard a caller that changes files: `stop` waits for its end. Raises `Closed`."""
        here = threading.get_ident()
        with self._idle:
            self._check_open()
            self._busy.append(here)
        try:
            yield
        finally:
            with self._idle:
                self._busy.remove(here)
                self._idle.notify_all()

    def _check_open(self) -> None:
        if self._stopping.is_set():
            raise Closed("this Quiver is closed; open it again")

    def _finalize(self) -> None:
        self._core.memtable.seal_due()
        if not self._threads:
            while self._core.segment_writer.step():
                pass
            while self._core.uploader is not None and self._core.uploader.step():
                pass

    def _apply_external_acks(self) -> None:
        for note in self._external_acks.take():
            self._apply_external_ack(note)

    def _apply_external_ack(self, note: ExternalAck) -> None:
        """Acknowledge for a process that only reads: it is done with every segment up to a number."""
        offsets = self._core.offsets
        if note.subscriber not in offsets.names():
            offsets.register(note.subscriber)
            offsets.activate(note.subscriber)
        self._core.deliveries.ack_through(note.subscriber, note.through)

    def _drop_orphans(self) -> None:
        timeout_s = self._core.config.subscribers.orphan_timeout_s
        if timeout_s is None:
            return
        age_ms = int(timeout_s * 1000)
        limit_ns = (self._clock.cautious_ms(age_ms) - age_ms) * 1_000_000
        orphans = self._core.offsets.orphaned()
        known_for_long = self._orphans_seen.known_for(timeout_s, orphans, self._clock.monotonic())
        for name, since_ns in orphans:
            if since_ns > limit_ns and (name, since_ns) not in known_for_long:
                continue
            _LOGGER.warning("subscriber %r is orphaned for too long and is dropped", name)
            self._core.deliveries.unregister(name)

    def _reap(self) -> None:
        self._count()
        self._reaper.reap()

    def _forget_delivered(self) -> None:
        """Start a new log file when every bundle in this one is delivered, so that no payload stays."""
        core = self._core
        is_delivered = not core.store.infos() and core.memtable.needed() >= core.memtable.end
        if is_delivered and self._log_bytes > 0 and core.wal is not None and core.wal.has_entries:
            core.appender.rotate()
            core.cut()

    def reap_last(self) -> None:
        """Remove the segments that everybody has resolved, after everything else has stopped."""
        self._reap()

    def _measure(self) -> None:
        now_s = self._clock.monotonic()
        if self._measured_s is not None and now_s - self._measured_s < _MEASURE_EVERY_S:
            return
        self._measured_s = now_s
        core, metrics = self._core, self._core.metrics
        core.deliveries.measure()
        metrics.open_bytes.set(core.memtable.open_bytes)
        metrics.open_streams.set(core.memtable.stream_count)
        metrics.open_age.set(core.memtable.age_s())
        metrics.unsynced.set(core.memtable.expected_bytes)
        metrics.quarantined.set(len(self._fs.list_files(os.path.join(self._directory, "quarantine"))))
        if core.wal is not None:
            metrics.wal_bytes.set(core.wal.data_bytes)
            metrics.wal_files.set(core.wal.rotated_count + 1)

    # ---- room ----------------------------------------------------------------------------------------

    @property
    def cap_bytes(self) -> int:
        """The bytes that this core may use now."""
        return self._quota.hard_bytes

    def disk_bytes(self) -> int:
        """Return the bytes that this core uses, with what is in memory and about to be written."""
        with self._counting:
            self._count()
            return self._quota.used

    def has_room(self, byte_count: int) -> bool:
        """Whether a bundle of so many bytes stays below the soft cap and leaves enough free space."""
        with self._counting:
            self._count()
            return not self._quota.excess(self._footprint(byte_count))

    def reserve(self, byte_count: int) -> bool:
        """Reserve room for a bundle, if there is some, until `release`."""
        with self._counting:
            if not self.has_room(byte_count):
                return False
            self._quota.charge(_RESERVED, self._footprint(byte_count))
            return True

    def release(self, byte_count: int) -> None:
        """Release what was reserved for a bundle: it is counted itself now, or was not accepted."""
        with self._counting:
            self._quota.release(_RESERVED, self._footprint(byte_count))

    def reclaim(self, byte_count: int, wait_s: float = 0.0) -> None:
        """Return when a bundle of so many bytes fits; delete what may go and wait at most `wait_s`.

        Raises `AtCapacity`, `Closed`, and what the disk raises.
        """
        self._check_open()
        if self._reclaim(byte_count):
            return
        deadline_s = self._clock.monotonic() + wait_s
        slices = int(wait_s / _SLICE_S)
        while slices > 0 and self._clock.monotonic() < deadline_s:
            slices -= 1
            self._stopping.wait(_SLICE_S)
            self._check_open()
            if self._reclaim(byte_count):
                return
        raise AtCapacity(
            f"{format_size(self._quota.used)} of {format_size(self._quota.hard_bytes)} are in use, or the "
            "device is nearly full, and nothing may be deleted; retry when subscribers have caught up",
            retry_after_s=1.0,
        )

    def _reclaim(self, byte_count: int) -> bool:
        needed_bytes = self._footprint(byte_count)
        drops = self._core.config.retention.size_cap_policy == "drop_oldest"
        with self.at_work(), self._under_pressure():
            self._count()
            if self._reaper.reclaim(needed_bytes, may_drop=False):
                return True
            # What costs no data comes before what does.
            self._free_log(needed_bytes)
            if self._reaper.reclaim(needed_bytes):
                return True
            if not drops or not self._core.memtable.memory_bytes:
                return False
            self._core.flush(Trigger.PRESSURE)
            self._shed_log(needed_bytes)
            return self._reaper.reclaim(needed_bytes)

    @contextlib.contextmanager
    def _under_pressure(self) -> Iterator[None]:
        """Let segments be removed before the log is cut after them."""
        with self._counting:
            self._pressure += 1
        try:
            yield
        finally:
            with self._counting:
                self._pressure -= 1

    def _free_log(self, needed_bytes: int) -> None:
        """Seal open segments if they or the bundle are large, or hold much of the log; cut the log."""
        core, target = self._core, self._quota.target_bytes
        if core.memtable.open_bytes >= target // 2 or max(needed_bytes, self._log_bytes) >= target:
            try:
                core.flush(Trigger.PRESSURE)
            except PenstockError as error:
                # On a full disk nothing can be written before something goes.
                self._warn("what is open could not be written to make room", error)
        self._shed_log(needed_bytes)

    def _shed_log(self, needed_bytes: int) -> None:
        """Cut the active log file as well, if nothing in it is needed and that frees enough."""
        core = self._core
        self._count()
        worth = min(self._quota.target_bytes, self._quota.excess(needed_bytes))
        if self._log_bytes >= max(1, worth) and core.memtable.needed() >= core.memtable.end:
            try:
                core.appender.rotate()
                core.cut()
            except PenstockError as error:
                self._warn("the log could not be cut to make room", error)
            self._count()

    @property
    def _log_bytes(self) -> int:
        """Bytes of entries in the log, needed or not; 0 while more are being written."""
        core = self._core
        if core.wal is None or core.memtable.expected_bytes:
            return 0
        return max(0, core.memtable.end - core.wal.oldest)

    def _warn(self, what: str, error: PenstockError) -> None:
        if self._may_warn():
            _LOGGER.warning("%s: %s", what, error)

    def _footprint(self, byte_count: int) -> int:
        return footprint(byte_count, has_wal=self._core.config.has_wal)

    def _count(self) -> None:
        """Count every byte once: first what waits, then what is stored, which may include some of it."""
        core = self._core
        with self._counting:
            waiting = core.memtable.waiting()
            stored_bytes, stored = core.store.usage(seq for seq, _ in waiting.sealed)
            sealed = [byte_count for seq, byte_count in waiting.sealed if seq not in stored]
            frames = FRAME_BYTES * (waiting.stream_count + len(sealed))
            in_log = 0 if core.wal is None else max(0, waiting.end - core.wal.oldest)
            self._quota.put(
                segments=stored_bytes,
                open=waiting.open_bytes + sum(sealed) + waiting.expected_bytes + frames,
                ack=core.offsets.log_bytes,
                wal=in_log + waiting.expected_bytes,
            )

    def _may_remove(self, seq: int) -> bool:
        """Whether a segment is uploaded, if it has to be, and the log is cut after it.

        Otherwise a restart would read its bundles from the log again. The log is ignored while room is needed
        or segments cannot be written, because it cannot be cut then.
        """
        core = self._core
        if core.uploader is not None and not core.uploader.is_uploaded(seq):
            return False
        if core.wal is None or self._pressure or core.segment_writer.last_error is not None:
            return True
        try:
            return core.store.get(seq).wal_end <= core.wal.cursor
        except NotFound:
            return True


def _shared_quota(
    core: Core, runtime: Runtime, directory: str, *, core_id: int, cores: int
) -> SharedQuota | None:
    if cores == 1:
        return None
    return SharedQuota(
        runtime.fs,
        os.path.dirname(directory),
        core_id=core_id,
        cores=cores,
        cap_bytes=core.config.retention.cap_bytes,
        target_bytes=core.config.segment.target_bytes,
        clock=runtime.clock,
    )
