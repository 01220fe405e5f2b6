"""The acknowledgement log as a story: who said what about which bundle, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import NotFound
from penstock.quiver.ack_log import list_logs, read_log
from penstock.quiver.ack_record import WHOLE_SEGMENT, AckRecord, NamePart, Outcome, RecordKind
from penstock.quiver.ack_state import AckState, Gone
from penstock.quiver.checkpoint_file import load_checkpoint
from penstock.quiver.subscribers import SubscriberState
from penstock.storage import FileSystem

__all__ = ["AckEvent", "read_history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AckEvent:
    """One record. `bundle` is None when it is about a whole segment, or about none."""

    number: int
    ts_ns: int
    what: str
    subscriber: str | None = None
    segment_seq: int = 0
    bundle: int | None = None
    attempt: int = 0


def read_history(fs: FileSystem, core_dir: str) -> Iterator[AckEvent]:
    """Every readable record of the log, oldest first and each once. Writes nothing.

    A file that the writer removes meanwhile ends there. Definitions that are repeated are left out.
    """
    names = _names(fs, core_dir)
    state, last = AckState(), 0
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
    """Names by index, from the checkpoint: older records than the log has may have defined them."""
    saved = load_checkpoint(fs, os.path.join(core_dir, "meta")).state
    return {} if saved is None else {entry.index: entry.name for entry in saved.subscribers}


def _event(record: AckRecord, name: str) -> AckEvent | None:
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
