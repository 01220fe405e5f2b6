"""Ranges and progress against plain sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.progress import Bitmap, Progress, Ranges

NUMBERS = st.integers(0, 30)
SPANS = st.tuples(NUMBERS, NUMBERS).map(lambda pair: (min(pair), max(pair)))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "through"]), SPANS), max_size=20)


@given(STEPS, NUMBERS, SPANS)
def test_ranges_are_a_set(
    steps: list[tuple[str, tuple[int, int]]], asked: int, span: tuple[int, int]
) -> None:
    ranges, plain = Ranges(), set[int]()
    for what, (first, last) in steps:
        if what == "add":
            ranges.add(first, last)
            plain |= set(range(first, last + 1))
        elif what == "discard":
            ranges.discard(first)
            plain.discard(first)
        else:
            ranges.discard_through(first)
            plain -= set(range(first + 1))
    assert {number for first, last in ranges for number in range(first, last + 1)} == plain
    assert ranges.count() == len(plain)
    assert (asked in ranges) == (asked in plain)
    assert ranges.next_outside(asked) == next(n for n in range(asked, 99) if n not in plain)
    assert ranges.last_outside(asked) == next(n for n in range(asked, -99, -1) if n not in plain)
    gaps = {number for first, last in ranges.missing(*span) for number in range(first, last + 1)}
    assert gaps == set(range(span[0], span[1] + 1)) - plain
    spans = list(ranges)
    assert all(low[1] + 1 < high[0] for low, high in itertools.pairwise(spans)), "touching"


@given(st.sets(st.integers(0, 60)), st.integers(0, 70))
def test_a_bitmap_is_a_set(bundles: set[int], start: int) -> None:
    bitmap = Bitmap()
    for bundle in bundles:
        assert bitmap.add(bundle)
        assert not bitmap.add(bundle)
    assert bitmap.count == len(bundles)
    assert {bundle for bundle in range(99) if bundle in bitmap} == bundles
    clear = next((bundle for bundle in range(start, 65) if bundle not in bundles), None)
    assert bitmap.next_clear(start, 65) == clear
    assert Bitmap(bitmap.to_bytes()).count == len(bundles)


@given(
    st.sets(st.integers(1, 12), min_size=1),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), max_size=40),
)
def test_the_mark_is_where_everything_before_it_is_resolved(
    existing: set[int], resolved: list[tuple[int, int]]
) -> None:
    known, highest = sorted(existing), max(existing)
    progress, plain = Progress(), set[tuple[int, int]]()
    before = 0
    for seq, bundle in resolved:
        if seq not in existing:
            continue
        assert progress.resolve(BundleRef(seq, bundle), 3) == ((seq, bundle) not in plain)
        plain.add((seq, bundle))
        progress.advance(known, highest)
        pending = [seq for seq in known if any((seq, bundle) not in plain for bundle in range(3))]
        assert progress.hwm == (min(pending) - 1 if pending else highest)
        assert progress.hwm >= before
        before = progress.hwm
        for seq in known:
            for bundle in range(3):
                assert progress.is_resolved(BundleRef(seq, bundle)) == ((seq, bundle) in plain)
