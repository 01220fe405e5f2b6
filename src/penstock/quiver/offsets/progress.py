"""The progress of one subscriber: its high-water mark, and the bundles resolved out of order beyond it.

The high-water mark is a segment number: everything in it and before it is resolved. Bundles that were
resolved beyond the mark, out of order, are kept in the gaps until the mark reaches them. Progress never goes
back (I9): a resolved bundle stays resolved, and the mark only rises. Segment numbers are kept as ranges.
There are few of them while the numbers are contiguous.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.errors import InvalidInput
from penstock.quiver.model import BundleRef

BUNDLES_MAX: Final = 10_000_000
"""The maximum number of bundles in a segment, which also limits the size of a bitmap."""


class Ranges:
    """A set of numbers as ascending, separate ranges with both ends included."""

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
        """Return the number of ranges, not of numbers."""
        return len(self._firsts)

    def count(self) -> int:
        """Return how many numbers the set contains."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def add(self, first: int, last: int | None = None) -> None:
        """Add the range from `first` to `last`, or only `first`."""
        last = first if last is None else last
        # Merge adjacent ranges: those that end just before `first` and begin just after `last`.
        low = bisect.bisect_left(self._lasts, first - 1)
        high = bisect.bisect_right(self._firsts, last + 1)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]

    def discard_through(self, number: int) -> None:
        """Remove everything up to `number`."""
        place = bisect.bisect_right(self._lasts, number)
        del self._firsts[:place], self._lasts[:place]
        if self._firsts and self._firsts[0] <= number:
            self._firsts[0] = number + 1

    def discard(self, number: int) -> None:
        """Remove one number."""
        place = bisect.bisect_right(self._firsts, number) - 1
        if place < 0 or number > self._lasts[place]:
            return
        first, last = self._firsts[place], self._lasts[place]
        rest = [(low, high) for low, high in ((first, number - 1), (number + 1, last)) if low <= high]
        self._firsts[place : place + 1] = [low for low, _ in rest]
        self._lasts[place : place + 1] = [high for _, high in rest]

    def next_outside(self, number: int) -> int:
        """Return the lowest number that is not in the set, from `number` upwards."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._lasts[place] + 1 if place >= 0 and number <= self._lasts[place] else number

    def last_outside(self, number: int) -> int:
        """Return the highest number that is not in the set, from `number` downwards."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return self._firsts[place] - 1 if place >= 0 and number <= self._lasts[place] else number

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of `first` to `last` that are not in the set."""
        gaps = []
        while (first := self.next_outside(first)) <= last:
            place = bisect.bisect_right(self._firsts, first)
            end = min(last, self._firsts[place] - 1 if place < len(self._firsts) else last)
            gaps.append((first, end))
            first = end + 1
        return gaps


class Bitmap:
    """The resolved bundles of one segment. The cost of setting a bit does not depend on their number."""

    __slots__ = ("_bits", "count")

    def __init__(self, bits: bytes = b"") -> None:
        self._bits = bytearray(bits)
        self.count = int.from_bytes(bits, "little").bit_count()

    def __contains__(self, bundle: int) -> bool:
        place = bundle >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (bundle & 7) & 1)

    def add(self, bundle: int) -> bool:
        """Set a bit. Return False if it was already set. Raise `InvalidInput` above `BUNDLES_MAX`."""
        if not 0 <= bundle < BUNDLES_MAX:
            raise InvalidInput(f"bundle {bundle} does not exist: a segment has at most {BUNDLES_MAX}")
        if bundle in self:
            return False
        place = bundle >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << (bundle & 7)
        self.count += 1
        return True

    def next_clear(self, start: int, end: int) -> int | None:
        """Return the first clear bundle in the range from `start` to before `end`."""
        bundle = start
        while bundle < end:
            place = bundle >> 3
            if place >= len(self._bits) or not self._bits[place] >> (bundle & 7) & 1:
                return bundle
            bundle += 8 if self._bits[place] == 0xFF and not bundle & 7 else 1
        return None

    def to_bytes(self) -> bytes:
        return bytes(self._bits)


class Progress:
    """One subscriber's high-water mark and gaps.

    The caller passes the existing segments as ascending numbers. A number that is not among them stays
    absent, because segments are added in ascending order.
    """

    __slots__ = ("_complete", "_gaps", "_hwm")

    def __init__(
        self,
        hwm: int = 0,
        *,
        gaps: dict[int, Bitmap] | None = None,
        complete: Ranges | None = None,
    ) -> None:
        self._hwm = hwm
        self._gaps = {} if gaps is None else gaps
        self._complete = Ranges() if complete is None else complete

    @property
    def hwm(self) -> int:
        """The highest segment up to which everything is resolved."""
        return self._hwm

    @property
    def gaps(self) -> dict[int, Bitmap]:
        """The partly resolved segments beyond the mark."""
        return self._gaps

    @property
    def complete(self) -> Ranges:
        """The fully resolved segments beyond the mark."""
        return self._complete

    def is_complete(self, seq: int) -> bool:
        return seq <= self._hwm or seq in self._complete

    def is_resolved(self, ref: BundleRef) -> bool:
        if self.is_complete(ref.segment_seq):
            return True
        gap = self._gaps.get(ref.segment_seq)
        return gap is not None and ref.bundle in gap

    def resolved_in(self, seq: int) -> int:
        """Return the number of resolved bundles in an incomplete segment."""
        gap = self._gaps.get(seq)
        return gap.count if gap is not None else 0

    def next_pending(self, seq: int, start: int, bundle_count: int) -> int | None:
        """Return the first unresolved bundle of this segment from `start` on."""
        if self.is_complete(seq) or start >= bundle_count:
            return None
        gap = self._gaps.get(seq)
        return start if gap is None else gap.next_clear(start, bundle_count)

    def resolve(self, ref: BundleRef, bundle_count: int | None) -> bool:
        """Resolve a bundle. Return False if it was already resolved.

        Without a `bundle_count` it is unknown whether the segment is complete. `settle` decides this later.
        """
        if self.is_resolved(ref):
            return False
        gap = self._gaps.get(ref.segment_seq)
        if gap is None:
            gap = self._gaps[ref.segment_seq] = Bitmap()
        gap.add(ref.bundle)
        if bundle_count is not None:
            self.settle(ref.segment_seq, bundle_count)
        return True

    def resolve_segment(self, seq: int) -> bool:
        """Resolve a whole segment. Return False if it was already resolved."""
        if self.is_complete(seq):
            return False
        self._gaps.pop(seq, None)
        self._complete.add(seq)
        return True

    def settle(self, seq: int, bundle_count: int) -> bool:
        """Mark a segment complete if all of its bundles are resolved, and return whether it is complete."""
        if self.is_complete(seq):
            return True
        if self.resolved_in(seq) < bundle_count:
            return False
        return self.resolve_segment(seq)

    def raise_to(self, hwm: int) -> None:
        """Raise the mark to `hwm`. A lower value changes nothing."""
        if hwm > self._hwm:
            self._move(hwm)

    def advance(self, known: Sequence[int], highest: int) -> bool:
        """Raise the mark past complete and absent segments, and return whether it rose.

        `known` are the existing segments, ascending. `highest` is the highest number ever assigned.
        """
        place = bisect.bisect_right(known, self._hwm)
        while place < len(known) and known[place] in self._complete:
            # Skip to the first segment after the range, so that a long run of complete ones costs one step.
            place = bisect.bisect_left(known, self._complete.next_outside(known[place]), place)
        mark = known[place] - 1 if place < len(known) else highest
        if mark <= self._hwm:
            return False
        self._move(mark)
        return True

    def _move(self, mark: int) -> None:
        self._hwm = mark
        self._complete.discard_through(mark)
        for seq in [seq for seq in self._gaps if seq <= mark]:
            del self._gaps[seq]
