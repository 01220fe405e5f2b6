"""Leases of one subscriber: which bundles are claimed, which come next, and how they are resolved.

A bundle is pending, claimed, or deferred. Resolved bundles are recorded in `Progress` and not kept here.
Bundles that were never handed out are not stored one by one: the table keeps a position in every partly
visited segment, and ranges of the fully visited segments. Memory therefore grows with the bundles in flight,
not with the pending ones.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Final, Protocol

import pyarrow as pa

from penstock.quiver.model import BundleRef, SegmentInfo, Signal
from penstock.quiver.offsets.progress import Progress, Ranges
from penstock.units import DurationLike, parse_duration

_READY: Final = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One bundle claimed by one consumer until `expires_s`, on the monotonic clock."""

    subscriber: str
    ref: BundleRef
    token: int
    attempt: int
    """The attempt, starting with 1. Nacks and expired leases count."""
    again: bool
    """Whether the bundle was handed out before."""
    expires_s: float
    info: SegmentInfo


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A bundle that was handed out before and is due again at `due_s`."""

    attempts: int
    due_s: float


class LeaseTable:
    """The leases of one subscriber. It does no I/O: the caller holds a lock and passes the time.

    Heap entries stay in place when their bundle changes state. They are recognised as stale when they are
    popped.
    """

    __slots__ = (
        "_deferred",
        "_held",
        "_newest_first",
        "_positions",
        "_ready",
        "_visited",
        "_waiting",
    )

    def __init__(self, *, newest_first: bool = False) -> None:
        self._newest_first = newest_first
        # In the order of claiming, which is also the order of expiry because all leases have the same length.
        self._held: OrderedDict[BundleRef, Lease] = OrderedDict()
        self._waiting: dict[BundleRef, _Waiting] = {}
        self._deferred: list[tuple[float, BundleRef]] = []
        self._ready: list[tuple[int, int, BundleRef]] = []
        self._visited = Ranges()
        self._positions: dict[int, int] = {}

    @property
    def in_flight(self) -> int:
        return len(self._held)

    @property
    def deferred(self) -> int:
        """The number of bundles that were handed out and are now neither resolved nor claimed."""
        return len(self._waiting)

    def held_segments(self) -> Iterator[int]:
        return (ref.segment_seq for ref in self._held)

    def next_event_s(self) -> float | None:
        """Return the earliest time at which a lease expires or something becomes due."""
        times = [self._deferred[0][0]] if self._deferred else []
        times += [claim.expires_s for claim in islice(self._held.values(), 1)]
        return min(times, default=None)

    # ---- handing out ---------------------------------------------------------------------------------

    def choose(
        self, progress: Progress, known: Sequence[int], infos: Mapping[int, SegmentInfo]
    ) -> tuple[BundleRef, int, bool] | None:
        """Return the next bundle, its number of attempts, and whether it was handed out before."""
        again = self._choose_again(progress, infos)
        if again is not None:
            return again
        fresh = self._choose_fresh(progress, known, infos)
        return (fresh, 0, False) if fresh is not None else None

    def _choose_again(
        self, progress: Progress, infos: Mapping[int, SegmentInfo]
    ) -> tuple[BundleRef, int, bool] | None:
        while self._ready:
            ref = heapq.heappop(self._ready)[2]
            waiting = self._waiting.get(ref)
            if waiting is None or waiting.due_s != _READY:
                continue
            del self._waiting[ref]
            if ref.segment_seq in infos and not progress.is_resolved(ref):
                return ref, waiting.attempts, True
        return None

    def _choose_fresh(
        self, progress: Progress, known: Sequence[int], infos: Mapping[int, SegmentInfo]
    ) -> BundleRef | None:
        self._forget_through(progress.hwm)
        while (seq := self._next_segment(progress, known)) is not None:
            bundle = self._next_in(seq, progress, infos[seq].bundle_count)
            if bundle is not None:
                self._positions[seq] = bundle + 1
                return BundleRef(seq, bundle)
            self._positions.pop(seq, None)
            self._visited.add(seq)
        return None

    def _forget_through(self, hwm: int) -> None:
        """Forget positions in segments that were resolved before they were fully visited."""
        self._visited.discard_through(hwm)
        for seq in [seq for seq in self._positions if seq <= hwm]:
            del self._positions[seq]

    def _next_segment(self, progress: Progress, known: Sequence[int]) -> int | None:
        """Return the first segment in delivery order that is not fully visited."""
        if self._newest_first:
            place = len(known) - 1
            while place >= 0 and known[place] > progress.hwm:
                if (outside := self._visited.last_outside(known[place])) == known[place]:
                    return known[place]
                place = bisect.bisect_right(known, outside) - 1
            return None
        place = bisect.bisect_right(known, progress.hwm)
        while place < len(known):
            if (outside := self._visited.next_outside(known[place])) == known[place]:
                return known[place]
            place = bisect.bisect_left(known, outside)
        return None

    def _next_in(self, seq: int, progress: Progress, bundle_count: int) -> int | None:
        bundle = progress.next_pending(seq, self._positions.get(seq, 0), bundle_count)
        while bundle is not None:
            ref = BundleRef(seq, bundle)
            if ref not in self._held and ref not in self._waiting:
                return bundle
            bundle = progress.next_pending(seq, bundle + 1, bundle_count)
        return None

    def attempts(self, ref: BundleRef) -> tuple[int, bool] | None:
        """Return the attempts of a bundle and whether it was handed out, or None while it is claimed."""
        if ref in self._held:
            return None
        waiting = self._waiting.get(ref)
        return (0, False) if waiting is None else (waiting.attempts, True)

    def hold(self, claim: Lease) -> None:
        """Record that the bundle is claimed."""
        self._waiting.pop(claim.ref, None)
        self._held[claim.ref] = claim

    # ---- taking back ---------------------------------------------------------------------------------

    def end(self, claim: Lease, now_s: float) -> bool:
        """Remove a lease. Return False if it had already ended."""
        held = self._held.get(claim.ref)
        if held is None or held.token != claim.token or now_s >= held.expires_s:
            return False
        del self._held[claim.ref]
        return True

    def put_off(self, ref: BundleRef, attempts: int, due_s: float) -> None:
        """Make the bundle available again from `due_s` on."""
        self._waiting[ref] = _Waiting(attempts, due_s)
        heapq.heappush(self._deferred, (due_s, ref))

    def put_back(self, ref: BundleRef, attempts: int) -> None:
        """Make the bundle available to the next request."""
        self._waiting[ref] = _Waiting(attempts, _READY)
        # Newest first applies to segments. Within one, bundles keep their order.
        seq = -ref.segment_seq if self._newest_first else ref.segment_seq
        heapq.heappush(self._ready, (seq, ref.bundle, ref))

    def expire(self, now_s: float) -> int:
        """Take back expired leases and release due bundles. Return the number of bundles made available."""
        back = 0
        while self._held and next(iter(self._held.values())).expires_s <= now_s:
            ref, held = self._held.popitem(last=False)
            self.put_back(ref, held.attempt)
            back += 1
        while self._deferred and self._deferred[0][0] <= now_s:
            due_s, ref = heapq.heappop(self._deferred)
            waiting = self._waiting.get(ref)
            if waiting is not None and waiting.due_s == due_s:
                self.put_back(ref, waiting.attempts)
                back += 1
        return back

    def forget_segment(self, seq: int) -> None:
        """Void the leases on a segment that was resolved as a whole."""
        for ref in [ref for ref in self._held if ref.segment_seq == seq]:
            del self._held[ref]
        for ref in [ref for ref in self._waiting if ref.segment_seq == seq]:
            del self._waiting[ref]
        self._positions.pop(seq, None)


class Resolver(Protocol):
    """The receiver of acks and nacks; `Deliveries` is one."""

    def ack(self, claim: Lease) -> bool: ...
    def nack(self, claim: Lease, reason: str = "", *, retry_after_s: float | None = None) -> bool: ...
    def reject(self, claim: Lease, reason: str = "", *, items: int = 0) -> bool: ...
    def defer(self, claim: Lease, delay_s: float | None = None) -> bool: ...
    def abandon(self, claim: Lease) -> None: ...


class Bundle:
    """One accepted batch of one stream, claimed by one consumer.

    Resolve it with `ack`, `nack`, `reject` or `defer`; the first call counts. Each returns False and records
    nothing if it comes too late: the lease has expired and another consumer may have the bundle, or it was
    resolved before. Leaving the context manager without such a call defers the bundle, and so does garbage
    collection.

    These calls change only memory and never wait. Acks are synced every `ack.flush_interval`. After a crash
    before the sync the bundle is delivered again.
    """

    __slots__ = ("__weakref__", "_claim", "_lease", "_resolver", "batch", "items")

    def __init__(self, claim: Lease, batch: pa.RecordBatch, *, items: int, resolver: Resolver) -> None:
        self._claim: Lease | None = claim
        self._lease = claim
        self._resolver = resolver
        self.batch = batch
        """The rows, without a copy. They stay valid while referenced, even after the file is deleted."""
        self.items = items
        """The number of spans, data points or log records in the batch."""

    @property
    def ref(self) -> BundleRef:
        """The segment and the index in it. It is unique within the core and stays the same on redelivery."""
        return self._lease.ref

    @property
    def signal(self) -> Signal:
        return self._lease.info.signal

    @property
    def slot(self) -> int:
        """The kind of payload, as a slot number."""
        return self._lease.info.slot

    @property
    def attempt(self) -> int:
        return self._lease.attempt

    @property
    def subscriber(self) -> str:
        return self._lease.subscriber

    @property
    def is_resolved(self) -> bool:
        """Whether this object has resolved the bundle."""
        return self._claim is None

    def ack(self) -> bool:
        """Acknowledge the bundle: it need not be kept for this subscriber."""
        claim = self._answer()
        return claim is not None and self._resolver.ack(claim)

    def nack(self, reason: str = "", retry_after: DurationLike | None = None) -> bool:
        """Return the bundle for a retry. It is delivered again after a growing wait of at least
        `retry_after`.
        """
        wait_s = None if retry_after is None else parse_duration(retry_after)
        claim = self._answer()
        return claim is not None and self._resolver.nack(claim, reason, retry_after_s=wait_s)

    def reject(self, reason: str = "") -> bool:
        """Refuse the bundle. It is not delivered again and counts as lost to this subscriber."""
        claim = self._answer()
        return claim is not None and self._resolver.reject(claim, reason, items=self.items)

    def defer(self, delay: DurationLike | None = None) -> bool:
        """Postpone the bundle. It is delivered again after `delay`; this does not count as an attempt."""
        wait_s = None if delay is None else parse_duration(delay)
        claim = self._answer()
        return claim is not None and self._resolver.defer(claim, wait_s)

    def _answer(self) -> Lease | None:
        claim, self._claim = self._claim, None
        return claim

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claim is not None:
            self.defer()

    def __del__(self) -> None:
        # This may run in any thread at any point, so it must not take a lock.
        claim = getattr(self, "_claim", None)
        if claim is not None:
            self._resolver.abandon(claim)

    def __repr__(self) -> str:
        place = f"{self.ref.segment_seq}/{self.ref.bundle}"
        return f"<Bundle {place} {self.signal} items={self.items} attempt={self.attempt}>"
