"""Low watermarks: records that a topic lost without a deletion, and the tombstones that report them.

Every read checks two watermarks. `earliest_seq` is the first live record; deletion moves it too. The floor is
the first sequence number that was not lost to a cap, to age, to a trimmed source or to damage; deletion never
moves it. A reader before the floor gets a tombstone. A reader before `earliest_seq` skips a deleted gap
without one.

Records that a source lost before a router copied them still have sequence numbers in the destination, so that
its readers get a tombstone for them. The floor covers such records at the front of a topic. Lost records
after live ones have their own ranges.
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
    """Per cause, the first sequence number that was not lost to it. The numbers only rise."""

    cap: int = 1
    ttl: int = 1
    trim: int = 1
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Ranges lost with damaged log files: the first number, and the number after the last.

    They have their own tombstone reason.
    """

    @property
    def floor(self) -> int:
        """Return the first sequence number that was not lost to any cause.

        It is never above `earliest_seq`.
        """
        return max(self.cap, self.ttl, self.trim)

    def raise_cap(self, removed: Removed) -> bool:
        """Raise the cap floor past evicted records. Return whether it moved."""
        return self.merge(cap=removed.end_seq)

    def raise_ttl(self, removed: Removed) -> bool:
        """Raise the age floor past expired records. Return whether it moved."""
        return self.merge(ttl=removed.end_seq)

    def merge(self, *, cap: int = 0, ttl: int = 0, trim: int = 0) -> bool:
        """Raise each floor to at least the given value. Return whether one moved."""
        before = (self.cap, self.ttl, self.trim)
        self.cap, self.ttl, self.trim = max(self.cap, cap), max(self.ttl, ttl), max(self.trim, trim)
        return before != (self.cap, self.ttl, self.trim)

    def reason(self, gap_from: int) -> TombstoneReason:
        """Return why the records from `gap_from` on are missing."""
        if self.is_lost(gap_from, self.floor):
            return "lost"
        cap, ttl = self.cap > gap_from, self.ttl > gap_from
        if cap and ttl:
            return "mixed"
        if cap:
            return "cap"
        return "ttl" if ttl else "source_trim"

    def is_lost(self, first: int, end: int) -> bool:
        """Return whether some of the numbers from `first` to before `end` were lost with log files."""
        return any(low < end and first < high for low, high in self.lost)


def tombstone_for(floors: LowWatermarks, from_seq: int, earliest_seq: int, head_seq: int) -> Tombstone | None:
    """Return the tombstone for a reader that has seen everything up to `from_seq`, or None."""
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
    """Ranges of lost sequence numbers, ascending and disjoint. None is below the floor."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges = [(first, end) for first, end in ranges]
        """Pairs of the first number and the number after the last."""

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def add(self, first: int, end: int) -> None:
        """Mark the newest sequence numbers of the topic as lost."""
        if self.ranges and self.ranges[-1][1] >= first:
            first = self.ranges.pop()[0]
        self.ranges.append((first, end))

    def fold(self, floors: LowWatermarks, earliest_seq: int) -> None:
        """Merge the oldest ranges without live records before them into the floor, if there are too many.

        A reader that passes them then gets a tombstone that also covers the deleted records between them.
        """
        while len(self.ranges) > _RANGES_KEPT and self.ranges[0][1] <= earliest_seq:
            floors.merge(trim=self.ranges.pop(0)[1])

    def settle(self, floors: LowWatermarks) -> None:
        """Merge ranges that start at or below the floor into it."""
        while self.ranges and self.ranges[0][0] <= floors.floor:
            floors.merge(trim=self.ranges.pop(0)[1])

    def after(self, seq: int) -> tuple[int, int] | None:
        """Return the first range that a reader at `seq` has not fully passed, or None."""
        place = bisect_right(self.ranges, seq + 1, key=itemgetter(1))
        return self.ranges[place] if place < len(self.ranges) else None


class HopCounts:
    """Hop counts of a topic's records, which stop copies in a cycle of routers.

    Each range of sequence numbers has one count. A record outside all ranges was written directly.
    """

    __slots__ = ("_ends", "_hops", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._hops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, first: int, count: int, hops: int) -> None:
        """Add the hop count of the newest records of the topic."""
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
