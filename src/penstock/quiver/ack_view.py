"""A subscriber in numbers."""

from __future__ import annotations

from penstock.quiver.ack_record import Outcome
from penstock.quiver.ack_state import AckState
from penstock.quiver.subscribers import Subscriber, SubscriberEntry

__all__ = ["view_of"]


def view_of(state: AckState, entry: SubscriberEntry) -> Subscriber:
    """A subscriber as it is now."""
    progress = entry.progress
    beyond = state.known[state.place_behind(progress.hwm) :]
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
