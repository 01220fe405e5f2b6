"""Access to subscribers and the acknowledgement history without an engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import NotFound
from penstock.quiver.errors import Locked
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.checkpoint import load_checkpoint
from penstock.quiver.offsets.log import replay
from penstock.quiver.offsets.log_files import list_logs, read_log
from penstock.quiver.offsets.records import WHOLE_SEGMENT, NamePart, OffsetRecord, Outcome, RecordKind
from penstock.quiver.offsets.state import Gone, OffsetState, Subscriber, SubscriberState, view_of
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.segments.source import LocalSegments
from penstock.storage import DirectoryLock, FileSystem, LockHeld


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberLook:
    """A subscriber with the details of its progress beyond the mark."""

    subscriber: Subscriber
    complete: tuple[tuple[int, int], ...]
    """The ranges of fully resolved segments beyond the mark, both ends included."""
    partial: Mapping[int, int]
    """The number of resolved bundles in each partly resolved segment."""
    highest: int
    """The highest existing segment, or the mark if there is none."""


def look_at_progress(fs: FileSystem, core_dir: str, infos: Iterable[SegmentInfo]) -> list[SubscriberLook]:
    """Return all subscribers of a core from its files, by name. Write nothing and take no lock."""
    state = replay(fs, core_dir, keep_evidence=False).state
    state.take_in(infos)
    for entry in state.subscribers.values():
        state.advance(entry)
    return [
        SubscriberLook(
            subscriber=view_of(state, entry),
            complete=tuple(entry.progress.complete),
            partial={seq: bitmap.count for seq, bitmap in sorted(entry.progress.gaps.items())},
            highest=state.known[-1] if len(state.known) else entry.progress.hwm,
        )
        for _, entry in sorted(state.subscribers.items())
    ]


def look_at_subscribers(fs: FileSystem, core_dir: str, infos: Iterable[SegmentInfo]) -> list[Subscriber]:
    """Return the subscribers of `look_at_progress` without the details beyond the marks."""
    return [look.subscriber for look in look_at_progress(fs, core_dir, infos)]


def drop_subscriber(fs: FileSystem, core_dir: str, name: str, clock: Clock = SYSTEM_CLOCK) -> Subscriber:
    """Unregister a subscriber durably. Return its last state.

    Raise `Locked` while a process has the core open, and `UnknownSubscriber`.
    """
    try:
        with DirectoryLock(fs, core_dir):
            offsets = SubscriptionStore(fs, core_dir, clock=clock)
            root, core = os.path.dirname(core_dir), int(core_dir.rpartition("_")[2])
            infos = [info for info in LocalSegments(root, fs).infos() if info.core_id == core]
            offsets.state.take_in(infos)
            try:
                removed = offsets.leave(name)
                offsets.confirm_leave(name)
                return removed
            finally:
                offsets.close()
    except LockHeld as error:
        raise Locked(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AckEvent:
    """One record of the history. `bundle` is None if it concerns a whole segment, or no segment."""

    number: int
    ts_ns: int
    what: str
    subscriber: str | None = None
    segment_seq: int = 0
    bundle: int | None = None
    attempt: int = 0


def read_history(fs: FileSystem, core_dir: str) -> Iterator[AckEvent]:
    """Yield every readable record of the log once, oldest first. Write nothing.

    If the writer removes a file meanwhile, that file is cut short. Repeated definitions are skipped.
    """
    names = _names(fs, core_dir)
    state, last = OffsetState(), 0
    directory = os.path.join(core_dir, "ack")
    for file in list_logs(fs, directory):
        try:
            for record in read_log(fs.open_view(os.path.join(directory, file.name))):
                if record is None or record.number <= last:
                    continue
                last = record.number
                known = set(state.subscribers)
                state.apply(record)
                if isinstance(record, NamePart):
                    for name in set(state.subscribers) - known:
                        names[record.subscriber] = name
                    continue
                event = _event(record, names.get(record.subscriber, f"#{record.subscriber}"))
                if event is not None:
                    yield event
        except NotFound:
            continue


def _names(fs: FileSystem, core_dir: str) -> dict[int, str]:
    """Return the names by index from the checkpoint, because the log may no longer have their definitions."""
    saved = load_checkpoint(fs, os.path.join(core_dir, "meta")).state
    return {} if saved is None else {entry.index: entry.name for entry in saved.subscribers}


def _event(record: OffsetRecord, name: str) -> AckEvent | None:
    if record.kind == RecordKind.OUTCOME:
        return AckEvent(
            number=record.number,
            ts_ns=record.ts_ns,
            what=_word(Outcome, record.outcome),
            subscriber=name,
            segment_seq=record.segment_seq,
            bundle=None if record.bundle == WHOLE_SEGMENT else record.bundle,
            attempt=0 if record.bundle == WHOLE_SEGMENT else record.attempt,
        )
    if record.kind == RecordKind.DELETED:
        what = _word(Gone, record.outcome)
        return AckEvent(number=record.number, ts_ns=record.ts_ns, what=what, segment_seq=record.segment_seq)
    if record.kind == RecordKind.UNREGISTER:
        return AckEvent(number=record.number, ts_ns=record.ts_ns, what="unregistered", subscriber=name)
    if record.kind == RecordKind.STATE:
        what = _word(SubscriberState, record.outcome)
        return AckEvent(number=record.number, ts_ns=record.ts_ns, what=what, subscriber=name)
    return None


def _word(kind: type[Outcome | Gone | SubscriberState], number: int) -> str:
    try:
        return kind(number).name.lower()
    except ValueError:
        return f"({number})"
