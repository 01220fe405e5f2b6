"""Delivery of bundles: claims with tokens and leases, acks and retries, and waiting for data.

Claims exist only in memory. After a restart every unresolved bundle is pending again. All state is under the
lock of the offsets, so a bundle is never claimed from a segment that is being dropped: either the claim comes
first and the segment stays, or the drop comes first and there is nothing to claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Rejected
from penstock.ids import SYSTEM_RNG
from penstock.metrics import DEFAULT_REGISTRY, Registry
from penstock.quiver.delivery.leases import Lease, LeaseTable
from penstock.quiver.errors import StaleClaim
from penstock.quiver.metrics import DeliveryMetrics
from penstock.quiver.model import BundleRef, SegmentInfo
from penstock.quiver.offsets.log import Dropped, RecoveryReport
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.state import Subscriber, SubscriberState
from penstock.quiver.offsets.store import SubscriptionStore

_READ_FAILURES_MAX: Final = 3


class Notifier:
    """Wakes threads and tasks when something changes.

    A waiting thread releases the lock atomically, so it cannot miss a change that is made under the lock and
    followed by `notify`. A task can, so it must be listening before it checks the state.
    """

    def __init__(self, lock: threading.RLock, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._changed = threading.Condition(lock)
        self._listening: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def notify(self) -> None:
        """Wake every waiting thread and task. The caller holds the lock."""
        self._changed.notify_all()
        for notified, loop in self._listening.items():
            # A closed loop has no task left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_set, notified)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the next `notify` or the timeout. The caller holds the lock."""
        self._changed.wait(timeout_s)

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Future[None]]:
        """Yield a future that completes at the next `notify` after this call."""
        loop = asyncio.get_running_loop()
        notified: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._listening[notified] = loop
        try:
            yield notified
        finally:
            with self._lock:
                self._listening.pop(notified, None)
            notified.cancel()

    async def wait_async(self, notified: asyncio.Future[None], timeout_s: float | None) -> None:
        """Wait for the future or the timeout."""
        if timeout_s is None:
            await notified
            return
        timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
        try:
            await asyncio.wait([notified, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()


def _set(notified: asyncio.Future[None]) -> None:
    if not notified.done():
        notified.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """The limits on the claims of one subscriber, and its retry schedule."""

    max_in_flight: int = 1000
    claim_timeout_s: float = 300.0
    newest_first: bool = False
    retry_initial_s: float = 1.0
    retry_max_s: float = 30.0
    retry_multiplier: float = 2.0
    max_attempts: int | None = None
    """The maximum number of attempts, or None for no limit. With a limit, a long outage loses data."""


class Deliveries:
    """Delivery to all consumers. Any thread may call any method. Only `take` and `take_async` wait."""

    def __init__(
        self,
        offsets: SubscriptionStore,
        settings: DeliverySettings | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry = DEFAULT_REGISTRY,
    ) -> None:
        self._offsets = offsets
        self._settings = settings if settings is not None else DeliverySettings()
        self._clock = clock
        self._rng = rng
        self.metrics = DeliveryMetrics(registry)
        self._tables: dict[str, LeaseTable] = {}
        self._token = 0
        self._read_failures: dict[int, int] = {}
        self._abandoned: deque[Lease] = deque()
        self._notifier = Notifier(offsets.lock, clock)
        self._is_closed = False
        offsets.on_change(self._notifier.notify)

    # ---- handing out ---------------------------------------------------------------------------------

    def next(self, name: str, now_s: float | None = None) -> Lease | None:
        """Claim the next bundle, or return None if there is none to deliver now.

        Raise `UnknownSubscriber`, and `Rejected` if the subscriber is not activated.
        """
        with self._offsets.lock:
            now_s = self._now_s() if now_s is None else now_s
            state = self._offsets.state
            entry = state.entry(name)
            if entry.state in (SubscriberState.REGISTERED, SubscriberState.ORPHANED):
                raise Rejected(f"subscriber {name!r} is {entry.state.name.lower()}; activate it first")
            if entry.state is not SubscriberState.ACTIVE or self._is_closed:
                return None
            self._expire(now_s)
            table = self._table(name)
            if table.in_flight >= self._settings.max_in_flight:
                return None
            chosen = table.choose(entry.progress, state.known, state.infos)
            return None if chosen is None else self._hold(name, *chosen, now_s)

    def claim(self, name: str, ref: BundleRef) -> Lease:
        """Claim a specific bundle out of order.

        Raise `StaleClaim` if it is resolved, claimed by another consumer or does not exist.
        """
        with self._offsets.lock:
            now_s = self._now_s()
            self._expire(now_s)
            entry, info = self._offsets.state.entry(name), self._offsets.state.infos.get(ref.segment_seq)
            before = self._table(name).attempts(ref)
            if info is None or not 0 <= ref.bundle < info.bundle_count or entry.progress.is_resolved(ref):
                raise StaleClaim(
                    f"bundle {ref.bundle} of segment {ref.segment_seq} is not pending for {name!r}"
                )
            if before is None:
                raise StaleClaim(
                    f"bundle {ref.bundle} of segment {ref.segment_seq} is claimed by another consumer"
                )
            return self._hold(name, ref, *before, now_s)

    def _hold(self, name: str, ref: BundleRef, attempts: int, again: bool, now_s: float) -> Lease:
        self._token += 1
        info = self._offsets.state.infos.get(ref.segment_seq)
        assert info is not None
        claim = Lease(
            subscriber=name,
            ref=ref,
            token=self._token,
            attempt=attempts + 1,
            again=again,
            expires_s=now_s + self._settings.claim_timeout_s,
            info=info,
        )
        self._table(name).hold(claim)
        if again:
            self.metrics.redelivered.inc(subscriber=name)
        return claim

    def _now_s(self) -> float:
        return self._clock.monotonic()

    def _table(self, name: str) -> LeaseTable:
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = LeaseTable(newest_first=self._settings.newest_first)
        return table

    # ---- resolving -----------------------------------------------------------------------------------

    def ack(self, claim: Lease) -> bool:
        """Record that the bundle was consumed. Return False and record nothing if the claim had ended."""
        return self._resolve(claim, Outcome.ACK)

    def reject(self, claim: Lease, reason: str = "", *, items: int = 0) -> bool:
        """Refuse a bundle permanently: it is not handed out again. Return False as `ack` does."""
        if not self._resolve(claim, Outcome.REJECTED):
            return False
        self._count_rejected(claim, "rejected", items)
        return True

    def nack(self, claim: Lease, reason: str = "", *, retry_after_s: float | None = None) -> bool:
        """Return a bundle, to be handed out again after at least `retry_after_s`.

        Return False as `ack` does. If the number of attempts is limited, the last one rejects the bundle.
        """
        limit = self._settings.max_attempts
        if limit is not None and claim.attempt >= limit:
            if not self._resolve(claim, Outcome.REJECTED):
                return False
            self._count_rejected(claim, "attempts", 0)
            return True
        with self._offsets.lock:
            if not self._end(claim):
                return False
            self._offsets.resolve(claim.subscriber, claim.ref, Outcome.NACK, attempt=claim.attempt)
            wait_s = max(self._backoff_s(claim.attempt), retry_after_s or 0.0)
            self._postpone(claim, claim.attempt, wait_s)
        self.metrics.nacks.inc(subscriber=claim.subscriber)
        return True

    def defer(self, claim: Lease, delay_s: float | None = None) -> bool:
        """Hand the bundle out again later, as if it had not been tried. Return False as `ack` does."""
        with self._offsets.lock:
            if not self._end(claim):
                return False
            delay_s = self._settings.retry_initial_s if delay_s is None else delay_s
            self._postpone(claim, claim.attempt - 1, delay_s)
            return True

    def read_failed(self, claim: Lease) -> bool:
        """Return a bundle that could not be read. Return True if its segment should be quarantined."""
        with self._offsets.lock:
            if not self._end(claim):
                return False
            seq = claim.ref.segment_seq
            failures = self._read_failures[seq] = self._read_failures.get(seq, 0) + 1
            self._postpone(claim, claim.attempt - 1, self._backoff_s(failures))
            return failures >= _READ_FAILURES_MAX

    def abandon(self, claim: Lease) -> None:
        """Return a bundle that its consumer no longer references. Take no lock: finalizers call this."""
        self._abandoned.append(claim)

    def ack_segment(self, name: str, seq: int) -> bool:
        """Acknowledge every bundle of a segment. Return False if all were already resolved."""
        with self._offsets.lock:
            done = self._offsets.resolve(name, seq, Outcome.ACK)
            if done:
                self._table(name).forget_segment(seq)
                self._notifier.notify()
            return done

    def ack_through(self, name: str, through: int) -> int:
        """Acknowledge every segment up to this number and return the number of segments that changed.

        Reactivate an orphaned subscriber if anything changed.
        """
        with self._offsets.lock:
            known = [info.seq for info in self._offsets.infos() if info.seq <= through]
            news = sum(self.ack_segment(name, seq) for seq in known)
            if news and self._offsets.state.entry(name).state is SubscriberState.ORPHANED:
                self._offsets.activate(name)
            return news

    def _resolve(self, claim: Lease, outcome: Outcome) -> bool:
        with self._offsets.lock:
            if not self._end(claim):
                return False
            self._offsets.resolve(claim.subscriber, claim.ref, outcome, attempt=claim.attempt)
            self._read_failures.pop(claim.ref.segment_seq, None)
            # A consumer may be waiting for the in-flight limit.
            if self._table(claim.subscriber).in_flight + 1 >= self._settings.max_in_flight:
                self._notifier.notify()
            return True

    def _end(self, claim: Lease) -> bool:
        table = self._tables.get(claim.subscriber)
        # The subscriber may have left while its table still exists.
        if (
            table is None
            or claim.subscriber not in self._offsets.state.subscribers
            or not table.end(claim, self._now_s())
        ):
            self.metrics.stale_claims.inc(subscriber=claim.subscriber)
            return False
        return True

    def _postpone(self, claim: Lease, attempts: int, delay_s: float) -> None:
        table = self._table(claim.subscriber)
        if delay_s > 0:
            table.put_off(claim.ref, attempts, self._now_s() + delay_s)
        else:
            table.put_back(claim.ref, attempts)
        self._notifier.notify()

    def _backoff_s(self, attempt: int) -> float:
        settings = self._settings
        longest = settings.retry_initial_s * settings.retry_multiplier ** min(attempt - 1, 60)
        return min(longest, settings.retry_max_s) * self._rng.uniform(0.5, 1.0)

    def _count_rejected(self, claim: Lease, reason: str, items: int) -> None:
        labels = {"reason": reason, "signal": claim.info.signal.value}
        self.metrics.lost_bundles.labels(**labels).inc()
        self.metrics.lost_items.labels(**labels).inc(items)

    # ---- time ----------------------------------------------------------------------------------------

    def expire(self, now_s: float | None = None) -> int:
        """Take back expired claims and release due bundles. Return the number of bundles."""
        with self._offsets.lock:
            back = self._expire(self._now_s() if now_s is None else now_s)
            if back:
                self._notifier.notify()
            return back

    def _expire(self, now_s: float) -> int:
        back = 0
        while self._abandoned:
            claim = self._abandoned.popleft()
            table = self._tables.get(claim.subscriber)
            if table is not None and table.end(claim, now_s):
                table.put_off(claim.ref, claim.attempt - 1, now_s + self._settings.retry_initial_s)
                back += 1  # not due yet, but it frees in-flight capacity and sets a time to wake up at
        return back + sum(table.expire(now_s) for table in self._tables.values())

    def take(self, name: str, timeout_s: float | None = None) -> Lease | None:
        """Claim as `next` does, but wait for data. Return None on a timeout or after `close`."""
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s
        with self._offsets.lock:
            while True:
                claim = self.next(name)
                wait_s = self._wait_s(name, deadline_s)
                if claim is not None or self._is_closed or (wait_s is not None and wait_s <= 0):
                    return claim
                self._notifier.wait(wait_s)

    async def take_async(self, name: str, timeout_s: float | None = None) -> Lease | None:
        """Claim as `take` does, without blocking the event loop."""
        deadline_s = None if timeout_s is None else self._now_s() + timeout_s
        while True:
            # Listen before checking, so that a change between the check and the wait is not missed.
            with self._notifier.listening() as notified:
                claim = self.next(name)
                wait_s = self._wait_s(name, deadline_s)
                if claim is not None or self._is_closed or (wait_s is not None and wait_s <= 0):
                    return claim
                await self._notifier.wait_async(notified, wait_s)

    def _wait_s(self, name: str, deadline_s: float | None) -> float | None:
        """Return the time to wait: until the deadline, the next lease expiry or the next due bundle."""
        with self._offsets.lock:
            now_s = self._now_s()
            self._expire(now_s)  # a due bundle does not wake a consumer that is at its limit
            event_s = self._table(name).next_event_s()
        if deadline_s is None:
            return None if event_s is None else max(event_s - now_s, 0.001)
        left_s = deadline_s - now_s
        return left_s if event_s is None else min(left_s, max(event_s - now_s, 0.001))

    def close(self) -> None:
        """End every current and future wait with None. Acks and nacks are still accepted."""
        with self._offsets.lock:
            self._is_closed = True
            self._notifier.notify()

    # ---- segments ------------------------------------------------------------------------------------

    def claimed_segments(self) -> set[int]:
        """Return the segments that have a claimed bundle."""
        with self._offsets.lock:
            return {seq for table in self._tables.values() for seq in table.held_segments()}

    def drop(self, seq: int, outcome: Outcome, *, reason: str, force: bool = False) -> Dropped | None:
        """Drop a segment for every subscriber that has not resolved it, and count the loss.

        Return None if the segment is unknown or has a claimed bundle. `force` voids the claims, for a file
        that cannot be read anyway.
        """
        with self._offsets.lock:
            self._expire(self._now_s())
            if self._offsets.state.infos.get(seq) is None or (not force and seq in self.claimed_segments()):
                return None
            dropped = self._offsets.drop(seq, outcome)
            self._forget(seq)
        self._count_dropped(dropped, reason)
        return dropped

    def _forget(self, seq: int) -> None:
        self._read_failures.pop(seq, None)
        for table in self._tables.values():
            table.forget_segment(seq)

    def _count_dropped(self, dropped: Dropped, reason: str) -> None:
        for name in dropped.subscribers:
            self.metrics.dropped_segments.inc(subscriber=name)
        info = dropped.info
        if info is None:
            self._count_unknown(1, reason)
        elif dropped.bundles:
            labels = {"reason": reason, "signal": info.signal.value}
            self.metrics.segments_dropped.inc()
            self.metrics.lost_segments.labels(**labels).inc()
            self.metrics.lost_bundles.labels(**labels).inc(dropped.bundles)
            self.metrics.lost_items.labels(**labels).inc(_items_of(info, dropped.bundles))
            self.metrics.lost_bytes.labels(**labels).inc(info.file_size)

    def _count_unknown(self, segments: int, reason: str) -> None:
        """Count lost segments with unknown contents."""
        self.metrics.segments_dropped.inc(segments)
        self.metrics.lost_segments.labels(reason=reason, signal="unknown").inc(segments)

    def count_losses(self, dropped: Iterable[Dropped], reason: str) -> None:
        """Count the segments that recovery gave up before any delivery."""
        for one in dropped:
            self._count_dropped(one, reason)

    def count_found(self, found: RecoveryReport) -> None:
        """Count all losses that recovery found."""
        self.count_losses(found.corrupt, "corrupt")
        self.count_losses(found.expired, "age")
        for first, last in found.missing:
            self._count_unknown(last - first + 1, "missing")
        if found.unlogged:
            self.metrics.lost_bundles.labels(reason="missing", signal="unknown").inc(found.unlogged)

    def unregister(self, name: str) -> Subscriber:
        """Remove a subscriber and its claims durably. Count what it had not resolved as dropped."""
        with self._offsets.lock:
            # In one step, because a subscriber of the same name may register before this is durable.
            removed = self._offsets.leave(name)
            self._tables.pop(name, None)
            self.metrics.clear(name)
        self._offsets.confirm_leave(name)
        self.metrics.dropped_segments.inc(removed.pending_segments, subscriber=name)
        return removed

    # ---- looking -------------------------------------------------------------------------------------

    def subscriber(self, name: str) -> Subscriber:
        """Return a snapshot of a subscriber. Raise `UnknownSubscriber`."""
        with self._offsets.lock:
            seen, table = self._offsets.subscriber(name), self._table(name)
            return replace(seen, in_flight=table.in_flight, deferred=table.deferred)

    def subscribers(self) -> list[Subscriber]:
        """Return all subscribers, by name."""
        with self._offsets.lock:
            return [self.subscriber(name) for name in self._offsets.names()]

    def measure(self) -> None:
        now_ns = self._clock.now_ms() * 1_000_000
        for one in self.subscribers():
            waited_ns = 0 if one.oldest_pending_ns is None else max(0, now_ns - one.oldest_pending_ns)
            self.metrics.hwm.set(one.hwm, subscriber=one.name)
            self.metrics.lag_segments.set(one.pending_segments, subscriber=one.name)
            self.metrics.lag_seconds.set(waited_ns / 1e9, subscriber=one.name)
            self.metrics.gap_segments.set(one.gap_segments, subscriber=one.name)
            self.metrics.in_flight.set(one.in_flight, subscriber=one.name)
            self.metrics.deferred.set(one.deferred, subscriber=one.name)
        self.metrics.log_bytes.set(self._offsets.log.byte_count)
        self.metrics.log_records.set(self._offsets.log.records)
        self.metrics.since_checkpoint.set(self._offsets.log.since_checkpoint)


def _items_of(info: SegmentInfo, bundles: int) -> int:
    """Return the items in `bundles` lost bundles: exact for a whole segment, otherwise in proportion."""
    return info.item_count * bundles // max(info.bundle_count, 1)
