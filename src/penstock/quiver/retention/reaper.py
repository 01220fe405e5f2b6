"""Deleting segments: the retention rules and the safe order of a deletion.

The rules only decide; they do not touch the disk. They apply in this order:

1. Steady state: segments that every subscriber has processed are deleted, oldest first, except for the
   headroom. No data is lost.
2. Age: segments older than the configured limit are deleted, processed or not, under any policy.
3. Size: over the cap the headroom is deleted too. After that `backpressure` delays writers and keeps every
   segment, and `drop_oldest` drops the oldest segment without a claimed bundle.

A deletion is recorded, the record is synced, and then the file is removed:

    decide ──► mark or drop (in memory) ──► sync the offset log ──► remove the file ──► release its bytes

If the sync fails, the deletion stops and the file stays. A file that cannot be removed is tried again later
and counts towards the cap until it is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock, SteadyClock
from penstock.errors import NotFound, PenstockError
from penstock.quiver.delivery.subscription import Deliveries
from penstock.quiver.metrics import RetentionMetrics
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.quota import Quota
from penstock.quiver.retention.shared_quota import SharedQuota
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.upload import Uploader
from penstock.quiver.segments.writer import SegmentWriter
from penstock.quiver.wal.log import Wal

T = TypeVar("T")

Policy: TypeAlias = Literal["backpressure", "drop_oldest"]
SEGMENT_BYTES: Final = "segments"
_AGE_EVERY_S: Final = 1.0
_WARN_EVERY_S: Final = 10.0
_PATIENCE_S: Final = 1.0
"""How long a core waits for another one to free space before it drops its own data."""
_WAIT_FIRST_S: Final = 1.0
_WAIT_MAX_S: Final = 60.0
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that might be deleted, and the bytes that its deletion frees."""

    seq: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention rules of one core."""

    policy: Policy = "backpressure"
    max_age_s: float | None = None
    headroom_bytes: int = 0
    """The size of processed segments that may stay while there is room."""

    def steady(self, finished: Sequence[Candidate]) -> list[int]:
        """Return the processed segments to delete now. `finished` is oldest first."""
        kept = sum(candidate.byte_count for candidate in finished)
        chosen: list[int] = []
        for candidate in finished:
            if kept <= self.headroom_bytes:
                break
            chosen.append(candidate.seq)
            kept -= candidate.byte_count
        return chosen

    def expiry_ns(self, now_ns: int) -> int | None:
        """Return the time before which data is too old, or None if there is no limit."""
        return None if self.max_age_s is None else now_ns - round(self.max_age_s * 1e9)

    def expired(
        self,
        infos: Iterable[SegmentInfo],
        now_ns: int,
        claimed: Collection[int],
        known_for_long: Collection[int] = (),
    ) -> list[int]:
        """Return the segments whose last bundle was ingested too long ago. File times are not used.

        Segments in `known_for_long` are too old regardless of their timestamps. A segment with a claimed
        bundle stays until the claim ends.
        """
        before_ns = self.expiry_ns(now_ns)
        if before_ns is None:
            return []
        return [
            info.seq
            for info in infos
            if (info.ingest_ns_max < before_ns or info.seq in known_for_long) and info.seq not in claimed
        ]

    def evict(self, finished: Iterable[Candidate], excess_bytes: int) -> list[int]:
        """Return processed segments to delete to meet the cap, oldest first. The headroom does not count."""
        return _enough(finished, excess_bytes, lambda seq: True)

    def drop(
        self, candidates: Iterable[Candidate], excess_bytes: int, held: Callable[[int], bool]
    ) -> list[int]:
        """Return unprocessed segments to drop, oldest first. Return none under `backpressure`.

        `held` returns whether a segment must stay because it has a claimed bundle or is not uploaded yet.
        """
        if self.policy != "drop_oldest":
            return []
        return _enough(candidates, excess_bytes, lambda seq: not held(seq))


def _enough(candidates: Iterable[Candidate], excess_bytes: int, may_go: Callable[[int], bool]) -> list[int]:
    chosen: list[int] = []
    for candidate in candidates:
        if excess_bytes <= 0:
            break
        if may_go(candidate.seq):
            chosen.append(candidate.seq)
            excess_bytes -= candidate.byte_count
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """The segments that one pass of the reaper deleted."""

    removed: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class FirstSeen(Generic[T]):
    """The times, by the monotonic clock, at which this process first saw items that expire by age.

    An item is at least as old as the time since then, regardless of its timestamp. An item that was stamped
    by a clock that was ahead therefore expires one age after the process started, not when the clock has
    caught up.
    """

    def __init__(self) -> None:
        self._seen_s: dict[T, float] = {}

    def known_for(self, age_s: float, things: Iterable[T], now_s: float) -> set[T]:
        """Return the items that were first seen at least `age_s` ago. `things` are all current items."""
        self._seen_s = {one: self._seen_s.get(one, now_s) for one in things}
        return {one for one, seen_s in self._seen_s.items() if now_s - seen_s >= age_s}


@dataclass(slots=True)
class _Failure:
    wait_s: float
    again_s: float


class RemovableSegments:
    """The files of the segments, and whether each may be removed yet."""

    def __init__(
        self, store: SegmentStore, wal: Wal | None, writer: SegmentWriter, uploader: Uploader | None
    ) -> None:
        self._store = store
        self._wal = wal
        self._writer = writer
        self._uploader = uploader
        self._lock = threading.Lock()
        self._ignoring_log = 0

    def may_remove(self, seq: int) -> bool:
        """Return whether a segment is uploaded, if required, and the log is truncated after it.

        Otherwise a restart would read its bundles from the log again. The log is ignored while space is
        needed or segments cannot be written, because it cannot be truncated then.
        """
        if self._uploader is not None and not self._uploader.is_uploaded(seq):
            return False
        if self._wal is None or self._ignoring_log or self._writer.last_error is not None:
            return True
        try:
            return self._store.get(seq).wal_end <= self._wal.cursor
        except NotFound:
            return True

    @contextlib.contextmanager
    def ignoring_log(self) -> Iterator[None]:
        """Allow segments to be removed before the log is truncated after them."""
        with self._lock:
            self._ignoring_log += 1
        try:
            yield
        finally:
            with self._lock:
                self._ignoring_log -= 1

    def bytes_of(self, seq: int) -> int:
        """Return the bytes that removing a segment frees. Raise `NotFound`."""
        return self._store.bytes_of(seq)

    def remove(self, seq: int) -> None:
        """Remove the file of a segment durably. After an error the file still counts towards the cap."""
        self._store.remove(seq)
        if self._uploader is not None:
            self._uploader.forget(seq)


class Reaper:
    """Deletes the segments that retention releases. Any thread may call it; one thread works at a time."""

    def __init__(
        self,
        offsets: SubscriptionStore,
        deliveries: Deliveries,
        segments: RemovableSegments,
        quota: Quota,
        retention: Retention,
        *,
        core_id: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        shared: SharedQuota | None = None,
        metrics: RetentionMetrics,
    ) -> None:
        self._offsets = offsets
        self._deliveries = deliveries
        self._segments = segments
        self._quota = quota
        self._retention = retention
        self._core_id = str(core_id)
        self._clock = SteadyClock(clock)
        self._first_seen = FirstSeen[int]()
        self._shared = shared
        self._metrics = metrics
        self._failures: dict[int, _Failure] = {}
        self._reasons: dict[int, str] = {}
        self._aged_s: float | None = None
        self._wanted = 0
        self._wanted_s = float("-inf")
        self._unreported = 0
        self._warned_s: float | None = None
        self._lock = threading.RLock()

    # ---- periodically ---------------------------------------------------------------------------------

    def reap(self) -> Reaped:
        """Apply steady state and age. Drop data if it is this core's turn in a shared quota.

        Raise errors of a log sync.
        """
        with self._lock:
            expired = self._expire()
            self._mark_deleted(self._retention.steady(self._finished()), "processed")
            dropped = self._take_turn()
            removed = self._remove()
            if dropped and self._shared is not None:
                self._publish(self._shared)  # publish now, or another core frees space for the same excess
            self._measure()
            return Reaped(removed=removed, expired=expired, dropped=dropped)

    def _expire(self) -> tuple[int, ...]:
        now_s = self._clock.monotonic()
        if self._aged_s is not None and now_s - self._aged_s < _AGE_EVERY_S:
            return ()
        self._aged_s = now_s
        age_s = self._retention.max_age_s
        if age_s is None:
            return ()
        now_ns = self._clock.cautious_ms(int(age_s * 1000)) * 1_000_000
        infos = self._offsets.infos()
        known_for_long = self._first_seen.known_for(age_s, (info.seq for info in infos), now_s)
        old = self._retention.expired(infos, now_ns, self._deliveries.claimed_segments(), known_for_long)
        return tuple(seq for seq in old if self._drop(seq, Outcome.EXPIRED, "age"))

    def _take_turn(self) -> tuple[int, ...]:
        if self._shared is None:
            return ()
        self._publish(self._shared)
        if self._retention.policy != "drop_oldest" or not self._shared.excess():
            return ()
        with self._shared.turn() as is_ours:
            return self._drop_oldest(self._shared.excess()) if is_ours else ()

    def _publish(self, shared: SharedQuota) -> None:
        finished = sum(candidate.byte_count for candidate in self._finished())
        claimed = self._deliveries.claimed_segments()
        oldest = next((info.ingest_ns_max for info in self._offsets.infos() if info.seq not in claimed), None)
        if self._clock.monotonic() - self._wanted_s > 2 * _PATIENCE_S:
            self._wanted = 0
        try:
            shared.publish(used=self._quota.used, reclaimable=finished, oldest_ns=oldest, wanted=self._wanted)
        except PenstockError as error:
            _LOGGER.warning("cannot publish the usage of this core: %s", error)

    # ---- when a writer needs room -----------------------------------------------------------------------

    def reclaim(self, more_bytes: int, *, may_drop: bool = True) -> bool:
        """Delete segments until `more_bytes` fit, and return whether they do.

        Without `may_drop` only processed segments are deleted. Count a writer that must wait. Raise errors of
        a log sync.
        """
        excess = self._quota.excess(more_bytes)
        if not excess:
            self._wanted = 0
            return True
        with self._lock:
            self._mark_deleted(self._retention.evict(self._finished(), excess), "size")
            self._remove()
            excess = self._quota.excess(more_bytes)
            if excess and may_drop and self._may_drop_own(more_bytes) and self._drop_oldest(excess):
                self._remove()
                excess = self._quota.excess(more_bytes)
            if not excess:
                self._wanted = 0
        if excess and may_drop:
            self._metrics.throttles.inc()
        return not excess

    def _may_drop_own(self, more_bytes: int) -> bool:
        """Return whether this core may drop its own data: it has the oldest data, or the others took too
        long.

        Otherwise publish how much is needed and give the other cores a moment to free it.
        """
        if self._shared is None or self._retention.policy != "drop_oldest":
            return True
        now_s = self._clock.monotonic()
        if not self._wanted:
            self._wanted_s = now_s
        self._wanted = more_bytes + self._quota.target_bytes
        self._publish(self._shared)
        is_others = self._shared.excess() > 0 and not self._shared.is_our_turn()
        return not is_others or now_s - self._wanted_s >= _PATIENCE_S

    def _drop_oldest(self, excess: int) -> tuple[int, ...]:
        claimed = self._deliveries.claimed_segments()

        def is_held(seq: int) -> bool:
            return seq in claimed or not self._segments.may_remove(seq)

        chosen = self._retention.drop(self._candidates(), excess, is_held)
        dropped = tuple(seq for seq in chosen if self._drop(seq, Outcome.DROPPED, "size"))
        if dropped:
            self._metrics.emergencies.inc()
            self._warn_of_drops(len(dropped))
        return dropped

    def _warn_of_drops(self, count: int) -> None:
        """Log drops at intervals, because every write may cause some while the cap is reached."""
        self._unreported += count
        now_s = self._clock.monotonic()
        if self._warned_s is None or now_s - self._warned_s >= _WARN_EVERY_S:
            _LOGGER.warning("dropped %d unprocessed segments to stay under the cap", self._unreported)
            self._unreported, self._warned_s = 0, now_s

    # ---- the order -----------------------------------------------------------------------------------

    def _finished(self) -> list[Candidate]:
        return [
            Candidate(seq, self._size(seq))
            for seq in self._offsets.finished()
            if self._segments.may_remove(seq)
        ]

    def _candidates(self) -> Iterable[Candidate]:
        return (Candidate(info.seq, self._size(info.seq)) for info in self._offsets.infos())

    def _size(self, seq: int) -> int:
        try:
            return self._segments.bytes_of(seq)
        except NotFound:
            return 0

    def _drop(self, seq: int, outcome: Outcome, reason: str) -> bool:
        if self._deliveries.drop(seq, outcome, reason=reason) is None:
            return False  # a bundle was claimed in the meantime
        self._reasons[seq] = reason
        return True

    def _mark_deleted(self, seqs: list[int], reason: str) -> None:
        for seq in self._offsets.mark_deleted(seqs):
            self._reasons[seq] = reason

    def _remove(self) -> tuple[int, ...]:
        """Remove every file that may be removed, after making its deletion record durable."""
        if self._offsets.state.tombstoned:
            self._offsets.sync()
        return tuple(seq for seq in self._offsets.removable() if self._is_due(seq) and self._remove_one(seq))

    def _is_due(self, seq: int) -> bool:
        failure = self._failures.get(seq)
        return self._segments.may_remove(seq) and (
            failure is None or failure.again_s <= self._clock.monotonic()
        )

    def _remove_one(self, seq: int) -> bool:
        size = self._size(seq)
        try:
            self._segments.remove(seq)
        except NotFound:
            pass
        except PenstockError as error:
            self._postpone(seq, error)
            return False
        self._quota.release(SEGMENT_BYTES, size)
        self._offsets.forget_segment(seq)
        self._failures.pop(seq, None)
        self._metrics.evictions.inc(reason=self._reasons.pop(seq, "processed"))
        return True

    def _postpone(self, seq: int, error: PenstockError) -> None:
        failure = self._failures.get(seq)
        wait_s = _WAIT_FIRST_S if failure is None else min(failure.wait_s * 2, _WAIT_MAX_S)
        self._failures[seq] = _Failure(wait_s, self._clock.monotonic() + wait_s)
        _LOGGER.warning("cannot remove segment %d; retrying in %g s: %s", seq, wait_s, error)

    def _measure(self) -> None:
        self._metrics.core_bytes.set(self._quota.used, core_id=self._core_id)
        self._metrics.cap_fraction.set(self._quota.fraction, core_id=self._core_id)
