"""A set of whole numbers kept as ranges, which is small as long as the numbers hang together."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

__all__ = ["Ranges"]


class Ranges:
    """Numbers in rising, separate ranges with both ends in them."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._firsts, self._lasts, strict=True)))

    def __len__(self) -> int:
        """How many ranges there are, not how many numbers."""
        return len(self._firsts)

    def count(self) -> int:
        """How many numbers there are."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def add(self, first: int, last: int | None = None) -> None:
        """Take in `first` to `last`, or `first` alone."""
        last = first if last is None else last
        # Ranges that touch become one: those that end just before `first` and begin just behind `last`.
        low = bisect.bisect_left(self._lasts, first - 1)
        high = bisect.bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def discard_through(self, number: int) -> None:
        """Forget everything up to `number`."""
        place = bisect.bisect_right(self._lasts, number)
        del self._firsts[:place], self._lasts[:place]
        if self._firsts and self._firsts[0] <= number:
            self._firsts[0] = number + 1

    def discard(self, number: int) -> None:
        """Forget this one number."""
        place = bisect.bisect_right(self._firsts, number) - 1
        if place < 0 or number > self._lasts[place]:
            return
        first, last = self._firsts[place], self._lasts[place]
        rest = [(low, high) for low, high in ((first, number - 1), (number + 1, last)) if low <= high]
        self._firsts[place : place + 1] = [low for low, _ in rest]
        self._lasts[place : place + 1] = [high for _, high in rest]

    def next_outside(self, number: int) -> int:
        """The lowest number from `number` on that is not in here."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._lasts[place] + 1 if place >= 0 and number <= self._lasts[place] else number

    def last_outside(self, number: int) -> int:
        """The highest number up to `number` that is not in here."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._firsts[place] - 1 if place >= 0 and number <= self._lasts[place] else number

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of `first` to `last` that are not in here."""
        gaps = []
        while (first := self.next_outside(first)) <= last:
            place = bisect.bisect_right(self._firsts, first)
            end = min(last, self._firsts[place] - 1 if place < len(self._firsts) else last)
            gaps.append((first, end))
            first = end + 1
        return gaps
