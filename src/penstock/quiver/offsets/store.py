"""Consumer offsets of one core: what each subscriber has resolved, and which segments are no longer needed.

Two things become durable:

- an outcome, with the next `sync`; a crash before that only causes redelivery;
- a deletion: `mark_deleted` records it, `sync` makes the record and every outcome before it durable, and only
  then does `removable` return the segment. No other file may be removed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidInput, PenstockError
from penstock.quiver.model import BundleRef, SegmentInfo
from penstock.quiver.offsets.checkpoint import CheckpointState
from penstock.quiver.offsets.external import remove_external_ack
from penstock.quiver.offsets.log import (
    Dropped,
    OffsetLog,
    OffsetLogSettings,
    RecoveryReport,
    record_missing,
    record_unlogged,
    replay,
)
from penstock.quiver.offsets.records import WHOLE_SEGMENT, Outcome
from penstock.quiver.offsets.state import (
    Gone,
    OffsetState,
    Subscriber,
    SubscriberEntry,
    SubscriberState,
    check_name,
    view_of,
)
from penstock.storage import FileSystem

_HELD_S: Final = 300.0
_LOGGER = logging.getLogger(__name__)


class SubscriptionStore:
    """Consumer offsets of all subscribers of one core, in `ack/` and `meta/`. Safe to use from any thread.

    The constructor only reads the log; call `reconcile` next. Damage is listed in `damage` and never prevents
    a start: lost outcomes are delivered again.

    Hold `lock` to read `state`, which `apply` and the methods here change. The lock is never held during disk
    I/O.
    """

    def __init__(
        self,
        fs: FileSystem,
        core_dir: str,
        settings: OffsetLogSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._fs = fs
        self._core_dir = core_dir
        for directory in ("ack", "meta"):
            fs.make_dirs(os.path.join(core_dir, directory))
        replayed = replay(fs, core_dir)
        self.damage = replayed.damage
        """Descriptions of everything that could not be read."""
        self.replayed_records = replayed.records
        self.lock = threading.RLock()
        self.state: OffsetState = replayed.state
        self._next_segment_seq = 0
        self.log = OffsetLog(
            fs,
            core_dir,
            replayed,
            settings if settings is not None else OffsetLogSettings(),
            clock,
            save=self._save,
            repeat=self._repeat_definitions,
        )
        self._clock = clock
        self._held_until_s = clock.monotonic()
        if self.state.unknown_subscribers:
            # A subscriber whose definition was lost may register again, so nothing is deleted before that.
            self._held_until_s += _HELD_S
        self._finished: set[int] = set()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` under the lock whenever there may be new data to deliver. It must not block."""
        self._listeners.append(callback)

    def _notify(self) -> None:
        for callback in self._listeners:
            callback()

    # ---- segments ------------------------------------------------------------------------------------

    def reconcile(
        self,
        infos: Iterable[SegmentInfo],
        *,
        expired_before_ns: int | None = None,
        highest_seq: int = 0,
        quarantined: Mapping[int, SegmentInfo | None] | None = None,
        unlogged: int = 0,
    ) -> RecoveryReport:
        """Compare the state with the segments on disk. Call it once, before any other method.

        Segments that a subscriber needs are recorded as dropped if they are missing or were `quarantined`,
        and as expired if they were ingested before `expired_before_ns`. `highest_seq` is the highest number
        among files of any kind. `unlogged` is the number of accepted bundles that are neither in a segment
        nor in the log.
        """
        quarantined_infos = quarantined if quarantined is not None else {}
        with self.lock:
            holes = self.state.take_in(infos, quarantined_infos)
            if highest_seq > self.state.highest_seq:
                # These files never counted, or no longer count, so no mark has to wait for their numbers.
                self.log.append_gone(self.state.highest_seq + 1, highest_seq, Gone.NEVER_WRITTEN)
                self.state.skip_through(highest_seq)
            lost = record_missing(self.state, self.log, holes, quarantined_infos)
            if unlogged:
                record_unlogged(self.state, self.log, unlogged)
            for entry in self.state.subscribers.values():
                self.state.advance(entry)
            expired = self._expire(expired_before_ns) if expired_before_ns is not None else ()
            self._look_for_finished()
            self._notify()
        self._confirm()
        self.log.keep_reserve()
        return replace(lost, expired=expired, unlogged=unlogged)

    def _expire(self, before_ns: int) -> tuple[Dropped, ...]:
        old = [seq for seq in self.state.known if self.state.infos[seq].ingest_ns_max < before_ns]
        return tuple(self.drop(seq, Outcome.EXPIRED) for seq in old)

    def _look_for_finished(self) -> None:
        self._finished = {seq for seq in self.state.known if self.state.is_finished(seq)}

    def _confirm(self) -> None:
        """Write the replayed state to a checkpoint of this process. If that fails, `tend` tries again."""
        if self.log.has_changes:
            try:
                self.log.checkpoint()
            except PenstockError as error:
                _LOGGER.warning("no segment is deleted until a checkpoint can be written: %s", error)

    def add_segment(self, info: SegmentInfo) -> None:
        """Add a committed segment that every subscriber has to consume.

        Raise `InvalidInput` unless its number is higher than all before.
        """
        with self.lock:
            skipped = self.state.add(info)
            if skipped is not None:
                self.log.append_gone(*skipped, Gone.NEVER_WRITTEN)
                for entry in self.state.subscribers.values():
                    self.state.advance(entry)
            self._notify()

    def forget_segment(self, seq: int) -> None:
        """Forget a removable segment whose files are gone."""
        with self.lock:
            self.state.tombstoned.pop(seq, None)

    def infos(self) -> list[SegmentInfo]:
        """Return the existing segments, oldest first, without those marked deleted."""
        with self.lock:
            return [self.state.infos[seq] for seq in self.state.known]

    # ---- subscribers ---------------------------------------------------------------------------------

    def register(self, name: str, start: str | int = "earliest") -> Subscriber:
        """Register a subscriber durably. A registered one keeps its position, regardless of `start`.

        A new one starts at the earliest existing segment ("earliest"), after the existing segments
        ("latest"), or at a segment number. Raise `InvalidInput` for a wrong name or start, and errors of the
        disk. After a disk error the subscriber is registered, and becomes durable with the next successful
        sync.
        """
        check_name(name)
        with self.lock:
            entry = self.state.subscribers.get(name)
            if entry is None:
                hwm = self._start_hwm(start)
                entry = self.state.define(name, self.state.free_index(), SubscriberState.REGISTERED, hwm=hwm)
                self.state.advance(entry)
                self.log.append_definition(entry)
                self._look_for_finished()
                self._notify()
            elif entry.state is SubscriberState.ORPHANED:
                self._set_state(entry, SubscriberState.REGISTERED)
        self.sync()
        return self.subscriber(name)

    def _start_hwm(self, start: str | int) -> int:
        if start == "earliest":
            return self.state.earliest_hwm()
        if start == "latest":
            return self.state.highest_seq
        if isinstance(start, int) and 1 <= start <= self.state.highest_seq + 1:
            return start - 1
        raise InvalidInput(
            f"a subscriber starts at 'earliest', 'latest' or a segment from 1 to "
            f"{self.state.highest_seq + 1}, not {start!r}"
        )

    def activate(self, name: str) -> None:
        """Start delivering bundles to a subscriber."""
        with self.lock:
            self._set_state(self.state.entry(name), SubscriberState.ACTIVE)
            self._notify()

    def deactivate(self, name: str) -> None:
        """Stop delivering bundles to a subscriber until it is activated again. Its data stays."""
        with self.lock:
            self._set_state(self.state.entry(name), SubscriberState.INACTIVE)

    def confirm_leave(self, name: str) -> None:
        """Make a `leave` durable, and remove the external ack that would register the subscriber again."""
        remove_external_ack(self._fs, self._core_dir, name)
        self.sync()

    def leave(self, name: str) -> Subscriber:
        """Remove a subscriber and return its last state. Durable after `confirm_leave`."""
        with self.lock:
            entry = self.state.entry(name)
            removed = view_of(self.state, entry)
            through = self.state.leave(entry)
            self.log.append_unregister(entry, through)
            self._look_for_finished()
            self.state.trim()
            self._notify()
            return removed

    def orphans(self, configured: Iterable[str]) -> list[str]:
        """Mark every subscriber that is not in `configured` as orphaned and return their names."""
        wanted = set(configured)
        with self.lock:
            found = [entry for name, entry in self.state.subscribers.items() if name not in wanted]
            for entry in found:
                if entry.state is not SubscriberState.ORPHANED:
                    self._set_state(entry, SubscriberState.ORPHANED)
            return sorted(entry.name for entry in found)

    def orphaned(self) -> list[tuple[str, int]]:
        """Return the orphaned subscribers, each with the time at which it was orphaned."""
        with self.lock:
            return [
                (entry.name, entry.orphaned_ns)
                for entry in self.state.subscribers.values()
                if entry.state is SubscriberState.ORPHANED and entry.orphaned_ns > 0
            ]

    def _set_state(self, entry: SubscriberEntry, state: SubscriberState) -> None:
        if entry.state is state:
            return
        entry.state = state
        entry.orphaned_ns = self.log.now_ns() if state is SubscriberState.ORPHANED else 0
        self.log.append_state(entry)

    def names(self) -> list[str]:
        with self.lock:
            return sorted(self.state.subscribers)

    def subscriber(self, name: str) -> Subscriber:
        """Return a snapshot of a subscriber. Raise `UnknownSubscriber`."""
        with self.lock:
            return view_of(self.state, self.state.entry(name))

    # ---- outcomes ------------------------------------------------------------------------------------

    def resolve(self, name: str, what: BundleRef | int, outcome: Outcome, *, attempt: int = 0) -> bool:
        """Record the outcome of a bundle, or of a whole segment, for one subscriber.

        Return False if there is nothing to record: it was already resolved, or there is no such bundle. The
        record becomes durable with the next `sync`.
        """
        with self.lock:
            entry = self.state.entry(name)
            if isinstance(what, int):
                return self._resolve_segment(entry, what, outcome, attempt) is not None
            info = self.state.infos.get(what.segment_seq)
            if info is None or not 0 <= what.bundle < info.bundle_count or entry.progress.is_resolved(what):
                return False
            if outcome.resolves:
                entry.progress.resolve(what, info.bundle_count)
            entry.counters[outcome] += 1
            self.log.append_outcome(entry, what.segment_seq, what.bundle, outcome, attempt)
            self._note_complete(entry, what.segment_seq)
            return True

    def _resolve_segment(
        self, entry: SubscriberEntry, seq: int, outcome: Outcome, attempt: int
    ) -> int | None:
        """Return the number of bundles that this resolved, or None if there was nothing to record."""
        info = self.state.infos.get(seq)
        if info is None or entry.progress.is_complete(seq):
            return None
        bundles = info.bundle_count - entry.progress.resolved_in(seq)
        if outcome.resolves:
            entry.progress.resolve_segment(seq)
        entry.counters[outcome] += bundles if outcome.resolves else 1
        # For a whole segment, the attempt field holds the number of bundles that the outcome applies to.
        count = bundles if outcome.resolves else attempt
        self.log.append_outcome(entry, seq, WHOLE_SEGMENT, outcome, count)
        self._note_complete(entry, seq)
        return bundles

    def _note_complete(self, entry: SubscriberEntry, seq: int) -> None:
        if entry.progress.is_complete(seq):
            if self.state.is_finished(seq):
                self._finished.add(seq)
            self.state.advance(entry)

    def drop(self, seq: int, outcome: Outcome) -> Dropped:
        """Drop a segment for all subscribers that have not resolved it. It is removable after the next sync.

        Raise `InvalidInput` if there is no such segment.
        """
        with self.lock:
            info = self.state.infos.get(seq)
            if info is None:
                raise InvalidInput(f"there is no segment {seq} to drop")
            missed: dict[str, int] = {}
            for entry in self.state.subscribers.values():
                bundles = self._resolve_segment(entry, seq, outcome, 0)
                if bundles is not None:
                    missed[entry.name] = bundles
            self._mark_deleted(seq)
            bundles = max(missed.values(), default=0 if self.state.subscribers else info.bundle_count)
            return Dropped(info=info, subscribers=tuple(missed), bundles=bundles)

    # ---- deletion ------------------------------------------------------------------------------------

    def finished(self) -> list[int]:
        """Return the segments that every subscriber has resolved, oldest first."""
        with self.lock:
            return sorted(self._finished)

    def mark_deleted(self, seqs: Iterable[int]) -> list[int]:
        """Mark segments as deleted and return those that were marked. They are removable after the next sync.

        Leave out a segment that is needed after all, for example by a subscriber that registered meanwhile.
        """
        with self.lock:
            if self._clock.monotonic() < self._held_until_s:
                return []
            chosen = [seq for seq in seqs if self.state.is_finished(seq)]
            for seq in chosen:
                self._mark_deleted(seq)
            return chosen

    def _mark_deleted(self, seq: int) -> None:
        self.state.mark_deleted(seq, self.log.append_gone(seq, seq, Gone.DELETED))
        self._finished.discard(seq)

    def removable(self) -> list[int]:
        """Return the segments whose files may be removed, because their deletion is durable."""
        with self.lock:
            tombstoned = self.state.tombstoned.items()
            return sorted(seq for seq, number in tombstoned if self.log.is_durable(number))

    # ---- the disk ------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when every outcome so far is durable. Raise errors of the disk; nothing is lost then."""
        self.log.sync()

    def checkpoint(self, next_segment_seq: int = 0, next_wal_seq: int = 0) -> None:
        """Write a checkpoint durably, so that a start need not read the log before it.

        The two numbers are the next that will be assigned; a lower one than before changes nothing. Raise
        errors of the disk; then the previous checkpoint and the whole log stay valid.
        """
        self._note_next(next_segment_seq, next_wal_seq)
        self.log.checkpoint()

    def tend(
        self, next_segment_seq: int = 0, next_wal_seq: int = 0, *, logged: tuple[int, int] = (0, 0)
    ) -> None:
        """Sync and checkpoint if they are due. Call it periodically. Raise as they do.

        `logged` is the durable end of the write-ahead log. It is recorded together with the last written
        segment, so that a start notices if either is missing.
        """
        self._note_next(next_segment_seq, next_wal_seq)
        self._note_logged(logged)
        self.log.tend()

    def close(
        self, next_segment_seq: int = 0, next_wal_seq: int = 0, *, logged: tuple[int, int] = (0, 0)
    ) -> None:
        """Checkpoint changes and close the file. Raise errors of the disk; the store is closed even then."""
        self._note_next(next_segment_seq, next_wal_seq)
        self._note_logged(logged)
        self.log.close()

    def _note_next(self, next_segment_seq: int, next_wal_seq: int) -> None:
        with self.lock:
            self._next_segment_seq = max(self._next_segment_seq, next_segment_seq)
            self.state.next_wal_seq = max(self.state.next_wal_seq, next_wal_seq)

    def _note_logged(self, logged: tuple[int, int]) -> None:
        with self.lock:
            state = self.state
            if logged[0] > state.logged_end:
                state.note_logged(*logged)
                self.log.append_logged(*logged, max(0, self._next_segment_seq - 1))

    def _save(self, generation: int, last_number: Callable[[], int]) -> CheckpointState:
        with self.lock:
            return self.state.save(
                generation=generation,
                last_number=last_number(),
                next_segment_seq=self._next_segment_seq,
                next_wal_seq=self.state.next_wal_seq,
            )

    def _repeat_definitions(self) -> None:
        """Repeat all names and marks in each new file, because without a checkpoint only the log has them."""
        with self.lock:
            for entry in self.state.subscribers.values():
                self.log.append_definition(entry)
            self.log.repeated()
