"""Copies of committed segments in an object store.

The data is uploaded first, then the sidecar, under the same names as on disk. A copy counts once its sidecar
exists, as for a segment, and repeating an upload changes nothing. One listing at the start finds the existing
copies. An unreachable store is retried indefinitely. Only the removal of segments waits for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Final

from penstock.blocking import loop_thread
from penstock.clock import Clock
from penstock.errors import Corrupt, NotFound, PenstockError
from penstock.metrics import Registry
from penstock.objects import ObjectStore
from penstock.quiver.model import SegmentInfo
from penstock.quiver.segments.metadata import arrow_name, meta_name, seq_of
from penstock.quiver.segments.source import segment_key
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.writer import OrderedQueue
from penstock.retry import RetryPolicy

_RETRY: Final = RetryPolicy(floor_s=0.5, ceiling_s=60.0)


class Uploader:
    """Uploads segments in order, on a thread after `start`; without the thread, `step` does the work.

    A segment may be removed from the disk once `is_uploaded` returns True; call `forget` then. A damaged
    segment is not uploaded but passed to `on_corrupt`.
    """

    def __init__(
        self,
        segments: SegmentStore,
        objects: ObjectStore,
        *,
        prefix: str,
        core_id: int,
        clock: Clock,
        rng: random.Random,
        registry: Registry,
        on_corrupt: Callable[[SegmentInfo, Corrupt], None],
        policy: RetryPolicy = _RETRY,
    ) -> None:
        self._segments = segments
        self._objects = objects
        self._prefix = prefix
        self._core_id = core_id
        self._on_corrupt = on_corrupt
        self._lock = threading.Lock()
        self._uploaded: set[int] = set()
        self._is_listed = False
        self._work: OrderedQueue[SegmentInfo] = OrderedQueue(
            self._upload,
            what="uploading a segment",
            clock=clock,
            rng=rng,
            policy=policy,
            on_failure=self._count_failure,
        )
        self._total = registry.counter("quiver.upload.segments_total", "Segments uploaded to the store.")
        self._bytes = registry.counter("quiver.upload.bytes_total", "Bytes uploaded to the store.")
        self._failures = registry.counter("quiver.upload.failures_total", "Failed upload attempts.")
        self._pending = registry.gauge("quiver.upload.pending", "Segments waiting for upload.")

    @property
    def last_error(self) -> PenstockError | None:
        """The error of the last attempt, or None if it succeeded."""
        return self._work.last_error

    @property
    def pending(self) -> int:
        """The number of segments that wait for upload."""
        return len(self._work)

    def submit(self, infos: Iterable[SegmentInfo]) -> None:
        """Queue these segments. Never wait for the store."""
        for info in infos:
            self._work.submit(info)
        self._pending.set(len(self._work))

    def is_uploaded(self, seq: int) -> bool:
        """Return whether the store is known to have this segment."""
        with self._lock:
            return seq in self._uploaded

    def forget(self, seq: int) -> None:
        """Forget a segment that was removed from the disk. Its copy stays."""
        with self._lock:
            self._uploaded.discard(seq)

    def step(self) -> bool:
        """Upload the first segment if it is due, and return whether the store has it now."""
        return self._work.step()

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when the store has every segment submitted before. Raise as `OrderedQueue.drain`."""
        self._work.drain(timeout_s)

    def start(self) -> None:
        """Start the upload thread."""
        self._work.start()

    def stop(self) -> None:
        """End the thread after the current attempt. The next start finds the remaining segments."""
        self._work.stop()

    def _upload(self, info: SegmentInfo) -> None:
        self._list_once()
        if not self.is_uploaded(info.seq) and self._put(info):
            self._total.inc()
            self._bytes.inc(info.file_size)
        self._pending.set(len(self._work) - 1)

    def _put(self, info: SegmentInfo) -> bool:
        """Upload a segment and return whether it was uploaded. A removed segment is skipped."""
        try:
            data, sidecar = self._segments.view(info.seq), self._segments.sidecar(info.seq)
        except NotFound:
            return False
        except Corrupt as error:
            # Skip it: the segments after it are intact, and the owner decides what happens to this one.
            self._on_corrupt(info, error)
            return False
        for name, content in ((arrow_name(info.seq), data), (meta_name(info.seq), sidecar)):
            loop_thread().run(self._objects.put(segment_key(self._prefix, self._core_id, name), content))
        with self._lock:
            self._uploaded.add(info.seq)
        return True

    def _list_once(self) -> None:
        """Find the copies of an earlier run. A sidecar that differs belongs to another directory and is
        replaced.
        """
        if self._is_listed:
            return
        folder = segment_key(self._prefix, self._core_id, "x").removesuffix("/x")
        found_by_name = {
            found.key.rpartition("/")[2]: found for found in loop_thread().run(self._objects.list(folder))
        }
        for info in self._segments.infos():
            name = meta_name(info.seq)
            if name in found_by_name and self._is_same(found_by_name[name].key, info):
                with self._lock:
                    self._uploaded.add(info.seq)
        self._is_listed = True

    def _is_same(self, key: str, info: SegmentInfo) -> bool:
        assert seq_of(key.rpartition("/")[2]) == info.seq
        return bytes(loop_thread().run(self._objects.get(key)).data) == self._segments.sidecar(info.seq)

    def _count_failure(self, info: SegmentInfo, error: PenstockError) -> None:
        self._failures.inc()
