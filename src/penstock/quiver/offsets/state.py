"""The state that results from all acknowledgements: subscribers, segments, and what each has resolved.

    registered ──► active ◄──► inactive          orphaned: known, but no longer in the configuration

A subscriber in any state keeps the data that it has not resolved. Only `unregister` releases it. This module
does no I/O.
"""

from __future__ import annotations

import bisect
import enum
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import InvalidInput
from penstock.quiver.errors import UnknownSubscriber
from penstock.quiver.model import BundleRef, SegmentInfo
from penstock.quiver.offsets.checkpoint import CheckpointEntry, CheckpointState
from penstock.quiver.offsets.progress import BUNDLES_MAX, Bitmap, Progress, Ranges
from penstock.quiver.offsets.records import WHOLE_SEGMENT, NamePart, OffsetRecord, Outcome, Record, RecordKind

SUBSCRIBERS_MAX: Final = 65_536
"""The maximum number of subscribers, because an index has two bytes."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_RESERVED: Final = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{kind}{digit}" for kind in ("com", "lpt") for digit in range(1, 10)}
)


class SubscriberState(enum.IntEnum):
    """The states of a subscriber. Numbers are stable on disk."""

    REGISTERED = 0
    ACTIVE = 1
    INACTIVE = 2
    ORPHANED = 3


def check_name(name: str) -> str:
    """Return the name. Raise `InvalidInput` if it is not a valid subscriber name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"{str(name)[:80]!r} is not a subscriber name: up to 64 letters, digits, '_' and '-'"
        )
    if name.lower() in _RESERVED:
        raise InvalidInput(f"{name!r} is not a subscriber name: Windows reserves it for a device")
    return name


@dataclass(slots=True, eq=False)
class SubscriberEntry:
    """The stored form of a subscriber."""

    index: int
    name: str
    state: SubscriberState
    progress: Progress
    counters: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    """The number of bundles by outcome."""
    orphaned_ns: int = 0
    """When the subscriber was orphaned, or 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """A snapshot of one subscriber."""

    name: str
    state: SubscriberState
    hwm: int
    """The segment up to which everything is resolved."""
    pending_segments: int
    gap_segments: int
    """The number of segments beyond the mark that are partly or fully resolved."""
    acked: int
    nacked: int
    dropped: int
    expired: int
    rejected: int
    in_flight: int = 0
    deferred: int = 0
    oldest_pending_ns: int | None = None
    """When its oldest unresolved data was ingested."""


class Gone(enum.IntEnum):
    """Why a segment number has no segment; stored as `outcome` of a record of kind 3."""

    DELETED = 0
    NEVER_WRITTEN = 1
    MISSING = 2
    CORRUPT = 3


@dataclass(slots=True)
class _Definition:
    """A subscriber whose name is not completely read yet."""

    record: OffsetRecord
    name: bytes = b""


class OffsetState:
    """The state of all subscribers of one core.

    `known` are the numbers of the existing segments, ascending. Segments are added in ascending order, so a
    missing lower number never appears later.
    """

    def __init__(self) -> None:
        self.subscribers: dict[str, SubscriberEntry] = {}
        self.known: list[int] = []
        self.infos: dict[int, SegmentInfo] = {}
        self.absent = Ranges()
        self.tombstoned: dict[int, int] = {}
        """Segments to be removed, with the number of the record of their deletion."""
        self.highest_seq = 0
        self.next_wal_seq = 0
        self.logged_end = self.logged_seq = 0
        """The position and the bundle number up to which the write-ahead log was durable."""
        self.abandoned_through = 0
        self.unknown_subscribers = 0
        """Outcomes in the log for subscribers whose definition was lost."""
        self._by_index: dict[int, SubscriberEntry] = {}
        self._highest_index = -1
        self._definition: _Definition | None = None

    # ---- out of a checkpoint, into a checkpoint ------------------------------------------------------

    @classmethod
    def restore(cls, saved: CheckpointState) -> OffsetState:
        state = cls()
        state.highest_seq = saved.next_segment_seq - 1
        state.next_wal_seq = saved.next_wal_seq
        state.logged_end, state.logged_seq = saved.logged_end, saved.logged_seq
        state.abandoned_through = saved.abandoned_through
        state.absent = Ranges(saved.absent)
        state.tombstoned = dict.fromkeys(saved.tombstoned, saved.last_number)
        for entry in saved.subscribers:
            progress = Progress(
                entry.hwm,
                gaps={seq: Bitmap(bits) for seq, bits in entry.gaps.items()},
                complete=Ranges(entry.complete),
            )
            known = SubscriberEntry(
                entry.index,
                entry.name,
                _state(entry.state),
                progress,
                list(entry.counters),
                entry.orphaned_ns,
            )
            state._enter(known)
        return state

    def save(
        self, *, generation: int, last_number: int, next_segment_seq: int, next_wal_seq: int
    ) -> CheckpointState:
        """Return the state that a checkpoint stores."""
        return CheckpointState(
            generation=generation,
            last_number=last_number,
            next_segment_seq=max(next_segment_seq, self.highest_seq + 1),
            next_wal_seq=max(next_wal_seq, self.next_wal_seq),
            logged_end=self.logged_end,
            logged_seq=self.logged_seq,
            abandoned_through=self.abandoned_through,
            absent=tuple(self.absent),
            tombstoned=tuple(sorted(self.tombstoned)),
            subscribers=tuple(_saved(entry) for entry in self.subscribers.values()),
        )

    # ---- replay --------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Apply one record of the log. Records may be repeated."""
        if isinstance(record, NamePart):
            self._apply_name(record)
            return
        self.highest_seq = max(self.highest_seq, _segment_of(record))
        if record.kind == RecordKind.OUTCOME:
            self._apply_outcome(record)
        elif record.kind == RecordKind.SUBSCRIBER:
            self._definition = _Definition(record)
            self._highest_index = max(self._highest_index, record.subscriber)
        elif record.kind == RecordKind.STATE and record.subscriber in self._by_index:
            entry = self._by_index[record.subscriber]
            entry.state = _state(record.outcome)
            entry.orphaned_ns = record.ts_ns if entry.state is SubscriberState.ORPHANED else 0
        elif record.kind == RecordKind.UNREGISTER:
            self._leave(self._by_index.get(record.subscriber), record.segment_seq)
        elif record.kind == RecordKind.DELETED:
            self._apply_deleted(record)
        elif record.kind == RecordKind.LOGGED:
            self.note_logged(record.segment_seq, (record.attempt << 32) + record.bundle)
            self.highest_seq = max(self.highest_seq, record.ts_ns)

    def note_logged(self, end: int, seq: int) -> None:
        """Raise the recorded durable end of the log to `end`, with bundles up to number `seq`."""
        self.logged_end = max(self.logged_end, end)
        self.logged_seq = max(self.logged_seq, seq)
        self.next_wal_seq = max(self.next_wal_seq, seq + 1)

    def _apply_outcome(self, record: OffsetRecord) -> None:
        entry = self._by_index.get(record.subscriber)
        if entry is None or record.outcome not in _OUTCOMES:
            self.unknown_subscribers += entry is None
            self._highest_index = max(self._highest_index, record.subscriber)
            return
        if record.outcome == Outcome.NACK:
            entry.counters[Outcome.NACK] += 1
        elif record.bundle == WHOLE_SEGMENT:
            if entry.progress.resolve_segment(record.segment_seq):
                entry.counters[record.outcome] += record.attempt
        elif record.bundle < BUNDLES_MAX:
            ref = BundleRef(record.segment_seq, record.bundle)
            entry.counters[record.outcome] += entry.progress.resolve(ref, None)

    def _apply_name(self, part: NamePart) -> None:
        defined = self._definition
        if defined is None:
            return
        record = defined.record
        # A piece in between may be lost. The pieces of a name directly follow their definition.
        if (part.subscriber, part.number) != (record.subscriber, record.number + 1 + part.part):
            self._definition = None
            return
        defined.name += part.text
        if len(defined.name) >= record.bundle:
            self._definition = None
            entry = self.define(
                defined.name.decode("ascii", "replace"),
                record.subscriber,
                _state(record.outcome),
                hwm=record.segment_seq,
            )
            if entry.state is SubscriberState.ORPHANED and not entry.orphaned_ns:
                # No other record has the time, so use that of the first definition.
                entry.orphaned_ns = record.ts_ns

    def _apply_deleted(self, record: OffsetRecord) -> None:
        self.absent.add(record.segment_seq, _segment_of(record))
        if record.outcome == Gone.DELETED:
            self.tombstoned[record.segment_seq] = record.number

    # ---- subscribers ---------------------------------------------------------------------------------

    def free_index(self) -> int:
        """Return an index for a new subscriber. Reuse an index only when every index was used before."""
        if self._highest_index + 1 < SUBSCRIBERS_MAX:
            return self._highest_index + 1
        index = next((index for index in range(SUBSCRIBERS_MAX) if index not in self._by_index), None)
        if index is None:
            raise InvalidInput(f"there are {SUBSCRIBERS_MAX} subscribers; unregister one first")
        return index

    def define(self, name: str, index: int, state: SubscriberState, *, hwm: int) -> SubscriberEntry:
        """Define a subscriber as recorded in the log. A known subscriber keeps its progress."""
        entry = self.subscribers.get(name)
        if entry is not None and entry.index == index:
            entry.state = state
            entry.progress.raise_to(hwm)
            return entry
        for stale in (entry, self._by_index.get(index)):
            self._leave(stale, 0)
        entry = SubscriberEntry(index, name, state, Progress(hwm))
        self._enter(entry)
        return entry

    def _enter(self, entry: SubscriberEntry) -> None:
        self.subscribers[entry.name] = entry
        self._by_index[entry.index] = entry
        self._highest_index = max(self._highest_index, entry.index)

    def leave(self, entry: SubscriberEntry) -> int:
        """Remove a subscriber. Return the segment up to which no subscriber is left to need data, or 0."""
        last_one = len(self.subscribers) == 1
        through = self.highest_seq if last_one else 0
        self._leave(entry, through)
        return through

    def _leave(self, entry: SubscriberEntry | None, abandoned_through: int) -> None:
        if entry is None:
            return
        del self.subscribers[entry.name], self._by_index[entry.index]
        self.abandoned_through = max(self.abandoned_through, abandoned_through)

    def earliest_hwm(self) -> int:
        """Return the mark of a subscriber that receives all existing data."""
        return self.known[0] - 1 if self.known else self.highest_seq

    # ---- segments ------------------------------------------------------------------------------------

    def take_in(self, infos: Iterable[SegmentInfo], lost: Collection[int] = ()) -> list[tuple[int, int]]:
        """Set the segments that a start found. Return the missing ranges that a subscriber needs.

        Segments that were being deleted do not count, because their files may be removed. `lost` are numbers
        of segments that existed, whether or not the log mentions them.
        """
        found = {info.seq: info for info in infos}
        self.tombstoned = {seq: number for seq, number in self.tombstoned.items() if seq in found}
        self.infos = {seq: info for seq, info in found.items() if seq not in self.tombstoned}
        self.known = sorted(self.infos)
        self.highest_seq = max(self.highest_seq, *found, *lost, *self.marks(), 0)
        for seq in self.known:
            self.absent.discard(seq)
        for entry in self.subscribers.values():
            for seq in [seq for seq in entry.progress.gaps if seq in self.infos]:
                entry.progress.settle(seq, self.infos[seq].bundle_count)
        missing = self._missing()
        self.trim()
        return missing

    def _missing(self) -> list[tuple[int, int]]:
        """Return the numbers above the lowest mark that have no segment and no recorded reason, as ranges."""
        if not self.subscribers and not self.known:
            return []
        holes: list[tuple[int, int]] = []
        # Without a subscriber, `absent` keeps nothing below the first segment, so holes there are unknown.
        before = min(self.marks()) if self.subscribers else max(self.known[0], self.abandoned_through)
        for seq in [seq for seq in self.known if seq > before] + [self.highest_seq + 1]:
            for first, last in self.absent.missing(before + 1, seq - 1):
                holes += self._waited_for(first, last)
            before = seq
        return holes

    def _waited_for(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of a hole that a subscriber has not resolved, or all of it without subscribers."""
        if not self.subscribers:
            return [(first, last)]
        needed = Ranges()
        for entry in self.subscribers.values():
            start = max(first, entry.progress.hwm + 1)
            for span in entry.progress.complete.missing(start, last) if start <= last else ():
                needed.add(*span)
        return list(needed)

    def is_awaited(self, seq: int, bundle_count: int) -> bool:
        """Return whether a subscriber, or a future first one, needs this segment, which may be missing."""
        if seq in self.absent or seq in self.tombstoned:
            return False
        if not self.subscribers:
            return seq > self.abandoned_through
        return any(
            not entry.progress.is_complete(seq) and entry.progress.resolved_in(seq) < bundle_count
            for entry in self.subscribers.values()
        )

    def add(self, info: SegmentInfo) -> tuple[int, int] | None:
        """Add a new segment. Return the numbers between it and the previous one, which never existed.

        Raise `InvalidInput` unless its number is higher than all before: marks may have passed it.
        """
        if info.seq <= self.highest_seq:
            raise InvalidInput(
                f"segment {info.seq} comes too late: segment {self.highest_seq} was added before it"
            )
        skipped = (self.highest_seq + 1, info.seq - 1)
        self.highest_seq = info.seq
        self.known.append(info.seq)
        self.infos[info.seq] = info
        if skipped[0] > skipped[1]:
            return None
        self.absent.add(*skipped)
        return skipped

    def skip_through(self, seq: int) -> None:
        """Record that unused numbers up to this one are never used."""
        self.absent.add(self.highest_seq + 1, seq)
        self.highest_seq = seq

    def index_after(self, seq: int) -> int:
        """Return the index in `known` of the first segment with a higher number."""
        return bisect.bisect_right(self.known, seq)

    def outstanding(self, seq: int) -> int:
        """Count the subscribers that have not resolved all of this segment."""
        return sum(not entry.progress.is_complete(seq) for entry in self.subscribers.values())

    def is_finished(self, seq: int) -> bool:
        """Return whether no subscriber needs the segment: all have resolved it, and there is or was one."""
        if seq not in self.infos or (not self.subscribers and seq > self.abandoned_through):
            return False
        return not self.outstanding(seq)

    def mark_deleted(self, seq: int, number: int) -> None:
        """Record that the segment will be removed. It counts as absent from now on."""
        del self.infos[seq]
        del self.known[bisect.bisect_left(self.known, seq)]
        self.absent.add(seq)
        self.tombstoned[seq] = number
        for entry in self.subscribers.values():
            entry.progress.advance(self.known, self.highest_seq)
        self.trim()

    def advance(self, entry: SubscriberEntry) -> bool:
        """Raise a subscriber's mark as far as possible. Return whether it rose."""
        if not entry.progress.advance(self.known, self.highest_seq):
            return False
        self.trim()
        return True

    def trim(self) -> None:
        """Forget absent numbers that every mark has passed."""
        lowest = self.known[0] - 1 if self.known else self.highest_seq
        self.absent.discard_through(min(lowest, *self.marks(), self.highest_seq))

    @property
    def next_segment_seq(self) -> int:
        """The lowest number for the next segment. No file, log, mark or checkpoint ever used it."""
        return max(self.highest_seq, *self.marks(), 0) + 1

    @property
    def logged(self) -> tuple[int, int]:
        """The position and the bundle number up to which the write-ahead log was durable."""
        return self.logged_end, self.logged_seq

    def entry(self, name: str) -> SubscriberEntry:
        """Return a subscriber's entry. Raise `UnknownSubscriber`."""
        entry = self.subscribers.get(name)
        if entry is None:
            known = ", ".join(sorted(self.subscribers)) or "none"
            raise UnknownSubscriber(f"no subscriber is named {name!r}; registered: {known}")
        return entry

    def marks(self) -> list[int]:
        return [entry.progress.hwm for entry in self.subscribers.values()]


_OUTCOMES = frozenset(Outcome)


def _segment_of(record: OffsetRecord) -> int:
    """Return the highest segment number in a record."""
    if record.kind == RecordKind.DELETED:
        return record.segment_seq + max((record.attempt << 32) + record.bundle, 1) - 1
    return record.segment_seq if record.kind in _NUMBERED else 0


_NUMBERED = frozenset({RecordKind.OUTCOME, RecordKind.SUBSCRIBER, RecordKind.UNREGISTER})


def _state(number: int) -> SubscriberState:
    try:
        return SubscriberState(number)
    except ValueError:
        return SubscriberState.INACTIVE


def _saved(entry: SubscriberEntry) -> CheckpointEntry:
    return CheckpointEntry(
        index=entry.index,
        name=entry.name,
        state=entry.state,
        hwm=entry.progress.hwm,
        orphaned_ns=entry.orphaned_ns,
        counters=tuple(entry.counters),
        gaps={seq: gap.to_bytes() for seq, gap in entry.progress.gaps.items()},
        complete=tuple(entry.progress.complete),
    )


def view_of(state: OffsetState, entry: SubscriberEntry) -> Subscriber:
    """Return a snapshot of a subscriber."""
    progress = entry.progress
    beyond = state.known[state.index_after(progress.hwm) :]
    pending = [seq for seq in beyond if not progress.is_complete(seq)]
    return Subscriber(
        name=entry.name,
        state=entry.state,
        hwm=progress.hwm,
        pending_segments=len(pending),
        gap_segments=len(progress.gaps) + progress.complete.count(),
        acked=entry.counters[Outcome.ACK],
        nacked=entry.counters[Outcome.NACK],
        dropped=entry.counters[Outcome.DROPPED],
        expired=entry.counters[Outcome.EXPIRED],
        rejected=entry.counters[Outcome.REJECTED],
        oldest_pending_ns=min((state.infos[seq].ingest_ns_min for seq in pending), default=None),
    )
