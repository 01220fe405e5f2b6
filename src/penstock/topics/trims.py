"""Records that a router never copied, because its source had lost them first.

Each has a sequence number in the destination, so that a reader that comes past is told. At the front of a
topic they are what its floor says; behind live records they are ranges of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import Final

from penstock.topics.floors import Floors

__all__ = ["Trims"]

_RANGES_KEPT: Final = 64


class Trims:
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

    def fold(self, floors: Floors, earliest_seq: int) -> None:
        """Keep few ranges that have nothing live before them any more; the floor stands for the others.

        A reader that comes past is then told of what was deleted between them too, as with every floor.
        """
        while len(self.ranges) > _RANGES_KEPT and self.ranges[0][1] <= earliest_seq:
            floors.merge(trim=self.ranges.pop(0)[1])

    def settle(self, floors: Floors) -> None:
        """Hand over to the floor what begins at it."""
        while self.ranges and self.ranges[0][0] <= floors.floor:
            floors.merge(trim=self.ranges.pop(0)[1])

    def after(self, seq: int) -> tuple[int, int] | None:
        """The first range that a reader who knows everything up to `seq` was not told of in full."""
        place = bisect_right(self.ranges, seq + 1, key=itemgetter(1))
        return self.ranges[place] if place < len(self.ranges) else None
