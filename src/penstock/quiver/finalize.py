"""From sealed segments to files, one after the other, for as long as it takes.

A segment that cannot be written stays in memory and is tried again. Until it is on disk it holds back the
log, because `lowest_wal_start` counts it, and it holds back the segments behind it, so that segments appear
in the order in which they were sealed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.quiver.model import SegmentInfo
from penstock.quiver.open_segment import SealedSegment
from penstock.quiver.ordered_work import OrderedWork
from penstock.quiver.segment_store import SegmentStore
from penstock.retry import RetryPolicy

__all__ = ["Finalizer"]

_LOGGER = logging.getLogger(__name__)
_RETRY: Final = RetryPolicy(floor_s=0.1, ceiling_s=30.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Numbered:
    sealed: SealedSegment
    seq: int


class Finalizer:
    """Writes sealed segments in order, on a thread of its own once `start` was called.

    Without the thread, `step` does the work. `on_written` is called after each segment, when it no longer
    holds back the log; what it raises is logged.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        next_seq: int,
        on_written: Callable[[SegmentInfo], None],
        clock: Clock,
        rng: random.Random,
        registry: Registry,
        policy: RetryPolicy = _RETRY,
    ) -> None:
        self._store = store
        self._next_seq = next_seq
        self._on_written = on_written
        self._clock = clock
        self._numbering = threading.Lock()
        self._work: OrderedWork[_Numbered] = OrderedWork(
            self._write,
            what="finalizing a segment",
            clock=clock,
            rng=rng,
            policy=policy,
            on_failure=self._count_failure,
        )
        self._seconds = registry.histogram("quiver.finalize.seconds", "Time to write one segment.")
        self._failures = registry.counter(
            "quiver.finalize.failures_total", "Segments that could not be written and are tried again."
        )
        self._triggers = registry.counter(
            "quiver.finalize.trigger", "Sealed segments by what sealed them.", ["trigger"]
        )

    @property
    def last_error(self) -> PenstockError | None:
        """Why the first segment could not be written at the last attempt; None when it has not failed."""
        return self._work.last_error

    @property
    def next_seq(self) -> int:
        """The number that the next sealed segment gets."""
        return self._next_seq

    @property
    def first_unwritten_seq(self) -> int:
        """The lowest number that is not on disk. A checkpoint says this one: no number is left out then."""
        with self._numbering:
            waiting = self._work.items()
            return waiting[0].seq if waiting else self._next_seq

    def waiting(self) -> list[tuple[int, int]]:
        """The number and the bytes of every segment that is sealed; one that was just written may be."""
        return [(each.seq, each.sealed.byte_count) for each in self._work.items()]

    @property
    def byte_count(self) -> int:
        """What is sealed and not yet on disk, in bytes."""
        return sum(each.sealed.byte_count for each in self._work.items())

    @property
    def count(self) -> int:
        """How many segments are sealed and not yet on disk."""
        return len(self._work)

    def lowest_wal_start(self) -> int | None:
        """The lowest log position that a sealed segment still needs; None when all are on disk."""
        return min((each.sealed.wal_start for each in self._work.items()), default=None)

    def submit(self, sealed: SealedSegment) -> int:
        """Take a sealed segment and give it its number. Never blocks on the disk.

        Call it under the lock under which it was sealed: then numbers follow the order of sealing, and at no
        moment is the segment neither open nor here.
        """
        with self._numbering:
            seq = self._next_seq
            self._next_seq += 1
            self._work.submit(_Numbered(sealed, seq))
        self._triggers.inc(trigger=sealed.trigger.value)
        return seq

    def step(self) -> bool:
        """Write the first segment if its time has come. Whether it is on disk now."""
        return self._work.step()

    def drain(self, timeout_s: float | None = None) -> None:
        """Return when everything submitted before is on disk and `on_written` knows of it.

        Raises the error of an attempt that fails, and `Unavailable` when the time is over; the segments stay
        and are tried again later.
        """
        self._work.drain(timeout_s)

    def start(self) -> None:
        """Work on a thread of its own from here on."""
        self._work.start()

    def stop(self) -> None:
        """End the thread after the write that is under way. What is left stays in memory; drain before."""
        self._work.stop()

    def _write(self, numbered: _Numbered) -> None:
        started = self._clock.monotonic()
        info = self._store.write(numbered.sealed, numbered.seq)
        self._seconds.observe(self._clock.monotonic() - started)
        self._work.finish(numbered)
        try:
            self._on_written(info)
        except Exception:
            _LOGGER.exception("segment %d is on disk, but its announcement failed", info.seq)

    def _count_failure(self, numbered: _Numbered, error: PenstockError) -> None:
        self._failures.inc()
