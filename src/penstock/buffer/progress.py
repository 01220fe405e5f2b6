"""Where a consumer stands: what it handed out, what was acknowledged, and what it has seen before.

No I/O. Acks follow the order of delivery, so a hole in the numbering does not wedge the queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from penstock.buffer.errors import OutOfOrderAck
from penstock.buffer.fetch import BatchDescriptor
from penstock.buffer.manifest import Entry

__all__ = ["Progress", "RecentLocations"]

RECENT_LOCATIONS = 10_000
"""How many locations are remembered to notice one that comes twice."""


class RecentLocations:
    """A bounded memory of location to sequence."""

    def __init__(self, known: dict[int, str]) -> None:
        self._sequences: OrderedDict[str, int] = OrderedDict()
        for sequence, location in known.items():
            self.see(location, sequence)

    def see(self, location: str, sequence: int) -> int | None:
        """Remember; returns the earlier sequence if the location is known under another number."""
        earlier = self._sequences.get(location)
        if earlier is None:
            self._sequences[location] = sequence
            if len(self._sequences) > RECENT_LOCATIONS:
                self._sequences.popitem(last=False)
        return None if earlier == sequence else earlier


class Progress:
    """The read position and the ack frontier of one consumer."""

    def __init__(self, last_acked: int | None) -> None:
        self.acked = last_acked
        self.handed_out = last_acked
        self._unacked: deque[int] = deque()
        self._skipped: set[int] = set()

    def describe(self, entry: Entry, seen: RecentLocations) -> BatchDescriptor:
        """The entry as it is about to be handed out, with what is odd about it."""
        expected = None if self.handed_out is None else self.handed_out + 1
        return BatchDescriptor(
            sequence=entry.sequence,
            location=entry.location,
            metadata=entry.metadata,
            duplicate_of=seen.see(entry.location, entry.sequence),
            gap_from=expected if expected is not None and entry.sequence > expected else None,
        )

    def is_past(self, sequence: int) -> bool:
        """Whether `sequence` has been handed out or acknowledged already."""
        return self.handed_out is not None and sequence <= self.handed_out

    def hand_out(self, sequence: int) -> None:
        self.handed_out = sequence
        self._unacked.append(sequence)

    def skip(self, sequence: int) -> None:
        """Move past a batch that was set aside: it counts as acknowledged once everything before it is."""
        self.hand_out(sequence)
        self._skipped.add(sequence)
        self._advance()

    def _advance(self) -> None:
        while self._unacked and self._unacked[0] in self._skipped:
            self.acked = self._unacked.popleft()
            self._skipped.discard(self.acked)

    def check_ack(self, sequence: int) -> None:
        """Raise `OutOfOrderAck` unless `sequence` is the oldest delivered one without an ack."""
        if not self._unacked:
            raise OutOfOrderAck(f"out-of-order ack of {sequence}: no delivered batch waits for an ack")
        if sequence != self._unacked[0]:
            raise OutOfOrderAck(
                f"out-of-order ack of {sequence}: the next to acknowledge is {self._unacked[0]}"
            )

    def ack(self, sequence: int) -> None:
        self.check_ack(sequence)
        self._unacked.popleft()
        self.acked = sequence
        self._advance()

    def check_ack_through(self, sequence: int) -> None:
        if self.acked is not None and sequence <= self.acked:
            raise OutOfOrderAck(
                f"out-of-order ack through {sequence}: acknowledged through {self.acked} already"
            )
        if self.acked is None and self._unacked and sequence < self._unacked[0]:
            raise OutOfOrderAck(
                f"out-of-order ack through {sequence}: the first that was delivered is {self._unacked[0]}"
            )

    def ack_through(self, sequence: int) -> int:
        """Move the frontier; returns by how far, counted from the first delivered sequence."""
        self.check_ack_through(sequence)
        before = self.acked
        if before is None:
            before = (self._unacked[0] if self._unacked else sequence) - 1
        while self._unacked and self._unacked[0] <= sequence:
            self._skipped.discard(self._unacked.popleft())
        self.acked = sequence
        if self.handed_out is None or self.handed_out < sequence:
            self.handed_out = sequence
        self._advance()
        return sequence - before
