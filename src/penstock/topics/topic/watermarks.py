"""Low watermarks: records that a topic lost without a deletion, and the tombstones that report them.

Two watermarks answer every reader. `earliest_seq` is the first live record; deletion moves it too. The floor
is the first sequence number that was not lost to a cap, to age, to a trimmed source or to damage; deletion
never moves it. A reader before the floor gets a tombstone; one before `earliest_seq` only skips a deleted gap
in silence.

Records that a router never copied, because its source had lost them first, have sequence numbers in the
destination, so that a reader that passes them is told. At the front of a topic they are what its floor says;
after live records they are ranges of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from penstock.topics.model import Tombstone, TombstoneReason
from penstock.topics.topic.index import Removed


@dataclass(slots=True)
class LowWatermarks:
    """Per cause, the first sequence number that was not lost to it. They only rise."""

    cap: int = 1
    ttl: int = 1
    trim: int = 1
    lost: list[tuple[int, int]] = field(default_factory=list)
    """What was lost with damaged files of the log: first, and the number after the last. It is told as its
    own reason, wherever a reader meets it."""

    @property
    def floor(self) -> int:
        """The first sequence number that was not lost to anything; never above `earliest_seq`."""
        return max(self.cap, self.ttl, self.trim)

    def raise_cap(self, removed: Removed) -> bool:
        """Takes note of what a cap evicted; whether that moved anything."""
        return self.merge(cap=removed.end_seq)

    def raise_ttl(self, removed: Removed) -> bool:
        """Takes note of what expired; whether that moved anything."""
        return self.merge(ttl=removed.end_seq)

    def merge(self, *, cap: int = 0, ttl: int = 0, trim: int = 0) -> bool:
        """Raises each floor to at least this; whether one moved."""
        before = (self.cap, self.ttl, self.trim)
        self.cap, self.ttl, self.trim = max(self.cap, cap), max(self.ttl, ttl), max(self.trim, trim)
        return before != (self.cap, self.ttl, self.trim)

    def reason(self, gap_from: int) -> TombstoneReason:
        """Why the records from `gap_from` on are missing."""
        if self.is_lost(gap_from, self.floor):
            return "lost"
        cap, ttl = self.cap > gap_from, self.ttl > gap_from
        if cap and ttl:
            return "mixed"
        if cap:
            return "cap"
        return "ttl" if ttl else "source_trim"

    def is_lost(self, first: int, end: int) -> bool:
        """Whether some of these numbers, `end` not included, were lost with files of the log."""
        return any(low < end and first < high for low, high in self.lost)


def tombstone_for(floors: LowWatermarks, from_seq: int, earliest_seq: int, head_seq: int) -> Tombstone | None:
    """The tombstone for a reader that has seen everything up to `from_seq`, before it continues."""
    if from_seq > head_seq:
        return Tombstone(
            gap_from=1,
            gap_to=head_seq,
            reason="recreated",
            missed_estimate=max(head_seq, 1),
            earliest_seq=earliest_seq,
            head_seq=head_seq,
        )
    floor = floors.floor
    if from_seq + 1 >= floor:
        return None
    return Tombstone(
        gap_from=from_seq + 1,
        gap_to=floor - 1,
        reason=floors.reason(from_seq + 1),
        missed_estimate=floor - from_seq - 1,
        earliest_seq=floor,
        head_seq=head_seq,
    )


_RANGES_KEPT: Final = 64


class LostRanges:
    """Ranges of lost sequence numbers, ascending and apart; none is below the floor."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges = [(first, end) for first, end in ranges]
        """First, and the number after the last."""

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def add(self, first: int, end: int) -> None:
        """The newest sequence numbers of the topic are lost."""
        if self.ranges and self.ranges[-1][1] >= first:
            first = self.ranges.pop()[0]
        self.ranges.append((first, end))

    def fold(self, floors: LowWatermarks, earliest_seq: int) -> None:
        """Keep few ranges that have nothing live before them any more; the floor stands for the others.

        A reader that comes past is then told of what was deleted between them too, as with every floor.
        """
        while len(self.ranges) > _RANGES_KEPT and self.ranges[0][1] <= earliest_seq:
            floors.merge(trim=self.ranges.pop(0)[1])

    def settle(self, floors: LowWatermarks) -> None:
        """Hand over to the floor what begins at it."""
        while self.ranges and self.ranges[0][0] <= floors.floor:
            floors.merge(trim=self.ranges.pop(0)[1])

    def after(self, seq: int) -> tuple[int, int] | None:
        """The first range that a reader at `seq` has not been told of in full."""
        place = bisect_right(self.ranges, seq + 1, key=itemgetter(1))
        return self.ranges[place] if place < len(self.ranges) else None


class HopCounts:
    """How many routers the records of a topic went through, so that copies in a cycle come to an end.

    Ranges of sequence numbers have one count each; what no range covers was written directly.
    """

    __slots__ = ("_ends", "_hops", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._hops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, first: int, count: int, hops: int) -> None:
        """The newest records of the topic."""
        if self._ends and self._ends[-1] == first and self._hops[-1] == hops:
            self._ends[-1] += count
            return
        self._starts.append(first)
        self._ends.append(first + count)
        self._hops.append(hops)

    def of(self, seq: int) -> int:
        """Return the hop count of a record."""
        place = bisect_right(self._starts, seq) - 1
        return self._hops[place] if place >= 0 and seq < self._ends[place] else 0

    def forget_below(self, seq: int) -> None:
        """Drop the counts below this number."""
        keep = bisect_right(self._ends, seq)
        if keep:
            self._starts, self._ends, self._hops = self._starts[keep:], self._ends[keep:], self._hops[keep:]
