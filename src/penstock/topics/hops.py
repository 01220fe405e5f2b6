"""How many routers the records of a topic went through, so that copies in a cycle come to an end."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Hops"]


class Hops:
    """Ranges of sequence numbers with one count each; what no range covers was written directly."""

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
        """What is known of one record."""
        place = bisect_right(self._starts, seq) - 1
        return self._hops[place] if place >= 0 and seq < self._ends[place] else 0

    def forget_below(self, seq: int) -> None:
        """Nobody will ask for these any more."""
        keep = bisect_right(self._ends, seq)
        if keep:
            self._starts, self._ends, self._hops = self._starts[keep:], self._ends[keep:], self._hops[keep:]
