"""Periodic work of one core: the thread that runs it, the steps for subscribers, and the gauges."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from penstock.clock import Clock, SteadyClock
from penstock.errors import PenstockError
from penstock.quiver.admission import CloseGuard, LogThrottle
from penstock.quiver.delivery.subscription import Deliveries
from penstock.quiver.errors import Closed
from penstock.quiver.metrics import QuiverMetrics
from penstock.quiver.offsets.external import ExternalAcks
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.retention.reaper import FirstSeen
from penstock.quiver.segments.memtable import Memtable
from penstock.quiver.wal.log import Wal
from penstock.storage import FileSystem

_LOGGER = logging.getLogger(__name__)
_MEASURE_EVERY_S: Final = 1.0


class Maintenance:
    """Runs the periodic steps of one core in order. `run` is one pass; `start` repeats it on a thread."""

    def __init__(
        self,
        steps: Sequence[Callable[[], object]],
        *,
        guard: CloseGuard,
        throttle: LogThrottle,
        interval_s: float,
    ) -> None:
        self._steps = steps
        self._guard = guard
        self._throttle = throttle
        self._interval_s = interval_s
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the steps on a thread every `maintenance_interval` until `stop`."""
        self._thread = threading.Thread(target=self._loop, name="quiver-maintenance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step. No step runs after this returns."""
        self._guard.begin()
        if self._thread is not None:
            self._thread.join()
        with self._running:
            pass  # another thread may be in `run`
        self._guard.wait_idle()

    def _loop(self) -> None:
        while not self._guard.wait(self._interval_s):
            try:
                self.run()
            except Closed:
                return
            except PenstockError as error:
                self._throttle.warn("maintenance", error)
            except Exception:
                if self._throttle.is_due():
                    _LOGGER.exception("maintenance")

    def run(self) -> None:
        """Run every step, even if an earlier one fails. A step that fails runs again in the next pass.

        Raise errors of the disk, and `Closed` after `stop`: the directory may belong to another process.
        """
        with self._running, contextlib.ExitStack() as stack:
            self._guard.check_open()
            for step in reversed(self._steps):
                stack.callback(step)


class SubscriberUpkeep:
    """The periodic steps for subscribers: applying external acks and removing expired orphans."""

    def __init__(
        self,
        offsets: SubscriptionStore,
        deliveries: Deliveries,
        external: ExternalAcks,
        *,
        orphan_timeout_s: float | None,
        clock: Clock,
    ) -> None:
        self._offsets = offsets
        self._deliveries = deliveries
        self._external = external
        self._orphan_timeout_s = orphan_timeout_s
        self._orphans_seen = FirstSeen[tuple[str, int]]()
        self._clock = SteadyClock(clock)

    def apply_external_acks(self) -> None:
        """Apply acks of processes that only read. Each ack covers every segment up to a number."""
        for ack in self._external.take():
            if ack.subscriber not in self._offsets.names():
                self._offsets.register(ack.subscriber)
                self._offsets.activate(ack.subscriber)
            self._deliveries.ack_through(ack.subscriber, ack.through)

    def drop_orphans(self) -> None:
        """Unregister subscribers that have been orphaned for longer than the timeout."""
        if self._orphan_timeout_s is None:
            return
        age_ms = int(self._orphan_timeout_s * 1000)
        limit_ns = (self._clock.cautious_ms(age_ms) - age_ms) * 1_000_000
        orphans = self._offsets.orphaned()
        known_for_long = self._orphans_seen.known_for(
            self._orphan_timeout_s, orphans, self._clock.monotonic()
        )
        for name, since_ns in orphans:
            if since_ns > limit_ns and (name, since_ns) not in known_for_long:
                continue
            _LOGGER.warning("dropping subscriber %r: it has been orphaned for too long", name)
            self._deliveries.unregister(name)


class Gauges:
    """Updates the gauges of one core, at most once a second."""

    def __init__(
        self,
        metrics: QuiverMetrics,
        deliveries: Deliveries,
        memtable: Memtable,
        wal: Wal | None,
        *,
        fs: FileSystem,
        directory: str,
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._deliveries = deliveries
        self._memtable = memtable
        self._wal = wal
        self._fs = fs
        self._quarantine = os.path.join(directory, "quarantine")
        self._clock = SteadyClock(clock)
        self._measured_s: float | None = None

    def update(self) -> None:
        """Set the gauges, unless they were set less than a second ago."""
        now_s = self._clock.monotonic()
        if self._measured_s is not None and now_s - self._measured_s < _MEASURE_EVERY_S:
            return
        self._measured_s = now_s
        metrics, memtable = self._metrics, self._memtable
        self._deliveries.measure()
        metrics.open_bytes.set(memtable.open_bytes)
        metrics.open_streams.set(memtable.stream_count)
        metrics.open_age.set(memtable.age_s())
        metrics.unsynced.set(memtable.expected_bytes)
        metrics.quarantined.set(len(self._fs.list_files(self._quarantine)))
        if self._wal is not None:
            metrics.wal_bytes.set(self._wal.data_bytes)
            metrics.wal_files.set(self._wal.rotated_count + 1)
