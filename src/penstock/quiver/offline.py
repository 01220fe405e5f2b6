"""Looking at subscribers, and dropping one, without running the directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.quiver.ack_book import AckBook
from penstock.quiver.ack_replay import replay
from penstock.quiver.ack_view import view_of
from penstock.quiver.errors import Locked
from penstock.quiver.model import SegmentInfo
from penstock.quiver.segment_source import LocalSegments
from penstock.quiver.subscribers import Subscriber
from penstock.storage import DirectoryLock, FileSystem, LockHeld

__all__ = ["SubscriberLook", "drop_subscriber", "look_at_progress", "look_at_subscribers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberLook:
    """A subscriber, and what beyond its mark is resolved."""

    subscriber: Subscriber
    complete: tuple[tuple[int, int], ...]
    """Ranges of segments beyond the mark that are resolved as a whole, both ends included."""
    partial: Mapping[int, int]
    """Of segments that are resolved in part, how many bundles are."""
    highest: int
    """The highest segment there is, or was."""


def look_at_progress(fs: FileSystem, core_dir: str, infos: Iterable[SegmentInfo]) -> list[SubscriberLook]:
    """All subscribers of a core as its files tell, by name. Writes nothing and takes no lock."""
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
    """`look_at_progress` without what lies beyond the marks."""
    return [look.subscriber for look in look_at_progress(fs, core_dir, infos)]


def drop_subscriber(fs: FileSystem, core_dir: str, name: str, clock: Clock = SYSTEM_CLOCK) -> Subscriber:
    """Unregister a subscriber, durably. Returns it as it was.

    Raises `Locked` while a process has the core open, and `UnknownSubscriber`.
    """
    try:
        with DirectoryLock(fs, core_dir):
            book = AckBook.open(fs, core_dir, clock=clock)
            root, core = os.path.dirname(core_dir), int(core_dir.rpartition("_")[2])
            infos = [info for info in LocalSegments(root, fs).infos() if info.core_id == core]
            book.compare(infos)
            try:
                return book.unregister(name)
            finally:
                book.close()
    except LockHeld as error:
        raise Locked(str(error)) from error
