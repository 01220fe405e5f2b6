"""Disk and memory limits of one core: counting usage, admitting bundles, and freeing space for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock, SteadyClock
from penstock.errors import LimitExceeded, PenstockError
from penstock.quiver.append import Appender, Flusher
from penstock.quiver.config import QuiverConfig
from penstock.quiver.errors import AtCapacity, Closed
from penstock.quiver.metrics import RetentionMetrics
from penstock.quiver.model import Trigger
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.quota import FRAME_BYTES, Quota, footprint
from penstock.quiver.retention.reaper import Reaper, RemovableSegments
from penstock.quiver.segments.memtable import Memtable
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.wal.layout import HEADER_BYTES
from penstock.quiver.wal.log import Wal
from penstock.units import format_size

_LOGGER = logging.getLogger(__name__)
_SLICE_S: Final = 0.01
_WARN_EVERY_S: Final = 10.0
_RESERVED: Final = "reserved"
_SEALED_TARGETS_MAX: Final = 4
"""The maximum data in memory while segments cannot be written, as a multiple of the target size."""
_RELIEF_S: Final = 30.0


class CloseGuard:
    """Coordinates closing with threads that change files: closing waits for them and admits no more."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._idle = threading.Condition()
        self._busy: list[int] = []

    def check_open(self) -> None:
        """Raise `Closed` once closing has started, because the directory may belong to another process."""
        if self._stopping.is_set():
            raise Closed("this Quiver is closed; open it again")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Guard a block that changes files, so that `wait_idle` waits for its end. Raise `Closed`."""
        here = threading.get_ident()
        with self._idle:
            self.check_open()
            self._busy.append(here)
        try:
            yield
        finally:
            with self._idle:
                self._busy.remove(here)
                self._idle.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait this long, or until closing starts. Return whether it has started."""
        return self._stopping.wait(seconds)

    def begin(self) -> None:
        """Start closing."""
        self._stopping.set()

    def wait_idle(self) -> None:
        """Return when no thread is at work."""
        with self._idle:
            # Ignore our own thread: a signal handler may run while this thread is at work.
            self._idle.wait_for(lambda: all(one == threading.get_ident() for one in self._busy))


class LogThrottle:
    """Limits a warning that may be repeated ten times a second to one in ten seconds."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = SteadyClock(clock)
        self._warned_s: float | None = None

    def is_due(self) -> bool:
        """Return whether the next warning is due, and count it as written."""
        now_s = self._clock.monotonic()
        if self._warned_s is not None and now_s - self._warned_s < _WARN_EVERY_S:
            return False
        self._warned_s = now_s
        return True

    def warn(self, what: str, error: PenstockError) -> None:
        if self.is_due():
            _LOGGER.warning("%s: %s", what, error)


class DiskSpace:
    """The disk space of one core: counts every byte once, reserves space, and reclaims it on demand."""

    def __init__(
        self,
        quota: Quota,
        reaper: Reaper,
        segments: RemovableSegments,
        *,
        config: QuiverConfig,
        memtable: Memtable,
        store: SegmentStore,
        wal: Wal | None,
        offsets: SubscriptionStore,
        appender: Appender,
        flusher: Flusher,
        guard: CloseGuard,
        throttle: LogThrottle,
        clock: Clock,
    ) -> None:
        self._quota = quota
        self._reaper = reaper
        self._segments = segments
        self._has_wal = config.has_wal
        self._drops = config.retention.size_cap_policy == "drop_oldest"
        self._memtable = memtable
        self._store = store
        self._wal = wal
        self._offsets = offsets
        self._appender = appender
        self._flusher = flusher
        self._guard = guard
        self._throttle = throttle
        self._clock = SteadyClock(clock)
        self._counting = threading.RLock()

    # ---- counting ------------------------------------------------------------------------------------

    @property
    def cap_bytes(self) -> int:
        """The bytes that this core may use at present."""
        return self._quota.hard_bytes

    def used_bytes(self) -> int:
        """Return the bytes that this core uses, including those in memory that are about to be written."""
        with self._counting:
            self._count()
            return self._quota.used

    def _footprint(self, byte_count: int) -> int:
        return footprint(byte_count, has_wal=self._has_wal)

    def _count(self) -> None:
        """Count every byte once: first waiting data, then stored data, which may include some of it."""
        with self._counting:
            waiting = self._memtable.waiting()
            stored_bytes, stored = self._store.usage(seq for seq, _ in waiting.sealed)
            sealed = [byte_count for seq, byte_count in waiting.sealed if seq not in stored]
            frames = FRAME_BYTES * (waiting.stream_count + len(sealed))
            in_log = 0 if self._wal is None else max(0, waiting.end - self._wal.oldest)
            self._quota.put(
                segments=stored_bytes,
                open=waiting.open_bytes + sum(sealed) + waiting.expected_bytes + frames,
                ack=self._offsets.log.byte_count,
                wal=in_log + waiting.expected_bytes,
            )

    @property
    def _log_bytes(self) -> int:
        """The size of all entries in the log, needed or not, or 0 while more are being written."""
        if self._wal is None or self._memtable.expected_bytes:
            return 0
        return max(0, self._memtable.end - self._wal.oldest)

    @property
    def _is_log_covered(self) -> bool:
        """Whether segments hold every entry of the log."""
        return self._memtable.needed() >= self._memtable.end

    # ---- reserving -----------------------------------------------------------------------------------

    def has_space(self, byte_count: int) -> bool:
        """Return whether a bundle of this size stays below the soft cap and leaves enough free space."""
        with self._counting:
            self._count()
            return not self._quota.excess(self._footprint(byte_count))

    def reserve(self, byte_count: int) -> bool:
        """Reserve space for a bundle until `release`. Return False if there is not enough."""
        with self._counting:
            if not self.has_space(byte_count):
                return False
            self._quota.charge(_RESERVED, self._footprint(byte_count))
            return True

    def release(self, byte_count: int) -> None:
        """Release the space reserved for a bundle: it is counted itself now, or was not accepted."""
        with self._counting:
            self._quota.release(_RESERVED, self._footprint(byte_count))

    # ---- reclaiming ----------------------------------------------------------------------------------

    def reap(self) -> None:
        """Delete the segments that retention releases. Raise errors of an offset log sync."""
        self._count()
        self._reaper.reap()

    def remove_delivered_log(self) -> None:
        """Start a new log file when every bundle in this one is delivered, so that no payload stays."""
        is_delivered = not self._store.infos() and self._is_log_covered
        if is_delivered and self._log_bytes > 0 and self._wal is not None and self._wal.has_entries:
            self._appender.rotate()
            self._flusher.cut_log()

    def reclaim(self, byte_count: int, wait_s: float = 0.0) -> None:
        """Return when a bundle of this size fits. Delete what retention allows, and wait at most `wait_s`.

        Raise `AtCapacity`, `Closed`, and errors of the disk.
        """
        self._guard.check_open()
        if self._reclaim(byte_count):
            return
        deadline_s = self._clock.monotonic() + wait_s
        slices = int(wait_s / _SLICE_S)
        while slices > 0 and self._clock.monotonic() < deadline_s:
            slices -= 1
            self._guard.wait(_SLICE_S)
            self._guard.check_open()
            if self._reclaim(byte_count):
                return
        raise AtCapacity(
            f"{format_size(self._quota.used)} of {format_size(self._quota.hard_bytes)} are in use, or the "
            "device is nearly full, and nothing may be deleted; retry when subscribers have caught up",
            retry_after_s=1.0,
        )

    def _reclaim(self, byte_count: int) -> bool:
        needed_bytes = self._footprint(byte_count)
        with self._guard.at_work(), self._segments.ignoring_log():
            self._count()
            if self._reaper.reclaim(needed_bytes, may_drop=False):
                return True
            # Free space without data loss first.
            self._free_log(needed_bytes)
            if self._reaper.reclaim(needed_bytes):
                return True
            if not self._drops or not self._memtable.memory_bytes:
                return False
            self._flusher.flush(Trigger.PRESSURE)
            self._cut_active_log(needed_bytes)
            return self._reaper.reclaim(needed_bytes)

    def _free_log(self, needed_bytes: int) -> None:
        """Seal open segments if they or the bundle are large, or hold much of the log. Truncate the log."""
        target = self._quota.target_bytes
        if self._memtable.open_bytes >= target // 2 or max(needed_bytes, self._log_bytes) >= target:
            try:
                self._flusher.flush(Trigger.PRESSURE)
            except PenstockError as error:
                # On a full disk nothing can be written before something is deleted.
                self._throttle.warn("cannot write open segments to free log space", error)
        self._cut_active_log(needed_bytes)

    def _cut_active_log(self, needed_bytes: int) -> None:
        """Also truncate the active log file, if none of it is needed and that frees enough."""
        self._count()
        worth = min(self._quota.target_bytes, self._quota.excess(needed_bytes))
        if self._log_bytes >= max(1, worth) and self._is_log_covered:
            try:
                self._appender.rotate()
                self._flusher.cut_log()
            except PenstockError as error:
                self._throttle.warn("cannot truncate the log to free space", error)
            self._count()


class Admission:
    """Admission control of one core: a bundle passes without waiting if every cap has room for it.

    Reserved space is kept until `release`. By then the bundle itself is counted, so concurrent writers never
    use the same space.
    """

    def __init__(
        self,
        config: QuiverConfig,
        *,
        appender: Appender,
        memtable: Memtable,
        flusher: Flusher,
        space: DiskSpace,
        guard: CloseGuard,
        metrics: RetentionMetrics,
        cores: int,
    ) -> None:
        most = config.largest_bundle(cores)
        self._bundle_max = min(most, config.wal_bytes - HEADER_BYTES) if config.has_wal else most
        self._memory_max = _SEALED_TARGETS_MAX * config.segment.target_bytes
        self._block_s = config.ingest.block_s
        self._wal_max = config.wal.max_bytes
        self._appender = appender
        self._memtable = memtable
        self._flusher = flusher
        self._space = space
        self._guard = guard
        self._metrics = metrics

    def reserve(self, byte_count: int) -> bool:
        """Reserve space for a bundle without waiting. Return False if there is not enough."""
        return byte_count <= self._bundle_max and self._fits(byte_count) and self._space.reserve(byte_count)

    def release(self, byte_count: int) -> None:
        """Release the space that `reserve` or `admit` reserved."""
        self._space.release(byte_count)

    def admit(self, byte_count: int) -> None:
        """Return when space for a bundle is reserved. Wait as configured. Raise as `wait_for_quota`."""
        while not self.reserve(byte_count):
            self.wait_for_quota(byte_count, wait_s=self._block_s)

    def wait_for_quota(self, byte_count: int, *, wait_s: float = 0.0) -> None:
        """Return when there is space for a bundle. Write segments and delete files if necessary.

        Raise `AtCapacity` if no space can be freed now, and `LimitExceeded` if the bundle can never fit.
        """
        if byte_count > self._bundle_max:
            raise LimitExceeded(
                f"a bundle of {format_size(byte_count)} is larger than the {format_size(self._bundle_max)} "
                "that wal.max_size and retention.size_cap leave room for; split it, or raise them"
            )
        if not self._fits(byte_count):
            if not self._space.has_space(byte_count):
                # Reclaim first: on a full disk no segment can be written before something is deleted.
                self._space.reclaim(byte_count, wait_s)
            self._flush_to_free(byte_count)
        if not self._space.has_space(byte_count):
            self._space.reclaim(byte_count, wait_s)

    def _fits(self, byte_count: int) -> bool:
        return self._appender.has_room(byte_count) and self._memtable.memory_bytes < self._memory_max

    def _flush_to_free(self, byte_count: int) -> None:
        """Write open segments once, so that the log can be truncated."""
        try:
            with self._guard.at_work():
                self._flusher.flush(Trigger.WAL_CAP, _RELIEF_S)
                if not self._appender.has_room(byte_count):
                    self._appender.rotate()
                    self._flusher.cut_log()
        except Closed:
            raise
        except PenstockError as error:
            raise self._full(f"segments cannot be written: {error}") from error
        if not self._appender.has_room(byte_count):
            raise self._full("the log is full")

    def _full(self, why: str) -> AtCapacity:
        self._metrics.throttles.inc()
        return AtCapacity(
            f"{why}; wal.max_size is {format_size(self._wal_max)}; retry in a moment", retry_after_s=1.0
        )
