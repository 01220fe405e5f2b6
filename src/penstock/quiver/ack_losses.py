"""What a start has to give up: segments that somebody waits for and that are not there, or cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.quiver.ack_journal import AckJournal
from penstock.quiver.ack_record import WHOLE_SEGMENT, Outcome
from penstock.quiver.ack_state import AckState, Gone
from penstock.quiver.model import SegmentInfo
from penstock.quiver.ranges import Ranges

__all__ = ["Dropped", "Reconciled", "record_losses", "record_unlogged"]

_MISSING_RECORDS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What went with a segment before everybody had taken it."""

    info: SegmentInfo | None
    """None when nothing is known of it but that it was there."""
    subscribers: tuple[str, ...]
    """Who had not resolved it."""
    bundles: int
    """The most that one of them missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What a start found that did not fit."""

    missing: tuple[tuple[int, int], ...] = ()
    """Segments that somebody waited for and that are not there: first and last number of each hole."""
    corrupt: tuple[Dropped, ...] = ()
    """Segments that somebody waited for and that were set aside."""
    expired: tuple[Dropped, ...] = ()
    unlogged: int = 0
    """Bundles that were accepted and are neither in a segment nor in the log."""


def record_losses(
    state: AckState,
    journal: AckJournal,
    holes: Iterable[tuple[int, int]],
    aside: Mapping[int, SegmentInfo | None],
) -> Reconciled:
    """Record the numbers in `holes` as dropped: those in `aside` as corrupt, the others as missing.

    The caller holds the lock of the book.
    """
    set_aside = Ranges((seq, seq) for seq in aside)
    corrupt: list[Dropped] = []
    missing: list[tuple[int, int]] = []
    for first, last in holes:
        inside = [seq for seq in sorted(aside) if first <= seq <= last]
        corrupt += [_record_corrupt(state, journal, seq, aside[seq]) for seq in inside]
        missing += set_aside.missing(first, last)
    for first, last in missing:
        _record_missing(state, journal, first, last)
    return Reconciled(missing=tuple(missing), corrupt=tuple(corrupt))


def _record_corrupt(state: AckState, journal: AckJournal, seq: int, info: SegmentInfo | None) -> Dropped:
    missed: dict[str, int] = {}
    for entry in state.subscribers.values():
        done = entry.progress.resolved_in(seq)
        if entry.progress.resolve_segment(seq):
            bundles = missed[entry.name] = 0 if info is None else info.bundle_count - done
            entry.counters[Outcome.DROPPED] += bundles
            journal.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, bundles)
    journal.append_gone(seq, seq, Gone.CORRUPT)
    state.absent.add(seq)
    return Dropped(info=info, subscribers=tuple(missed), bundles=max(missed.values(), default=0))


def _record_missing(state: AckState, journal: AckJournal, first: int, last: int) -> None:
    for entry in state.subscribers.values():
        # A hole of any length is one record; the outcomes are for the audit.
        for seq in range(first, min(last, first + _MISSING_RECORDS_MAX - 1) + 1):
            if entry.progress.resolve_segment(seq):
                journal.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, 0)
    journal.append_gone(first, last, Gone.MISSING)
    state.absent.add(first, last)


def record_unlogged(state: AckState, journal: AckJournal, bundles: int) -> None:
    """Record bundles that the write-ahead log lost as dropped for every subscriber.

    They never got into a segment, so a segment number of their own stands for them. The caller holds the
    lock of the book.
    """
    seq = state.highest_seq + 1
    state.skip_through(seq)
    for entry in state.subscribers.values():
        if entry.progress.resolve_segment(seq):
            entry.counters[Outcome.DROPPED] += bundles
            journal.append_outcome(entry, seq, WHOLE_SEGMENT, Outcome.DROPPED, bundles)
    journal.append_gone(seq, seq, Gone.MISSING)
