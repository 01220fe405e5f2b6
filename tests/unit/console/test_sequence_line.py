"""The sequence line of a topic: every sequence from 1 to the head is in exactly one range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.console.topics_panel import sequence_line
from penstock.topics.model import Tombstone


def gone(first: int, last: int, head: int, reason: str = "cap") -> Tombstone:
    return Tombstone(
        gap_from=first,
        gap_to=last,
        reason=reason,  # type: ignore[arg-type]
        missed_estimate=last - first + 1,
        earliest_seq=last + 1,
        head_seq=head,
    )


def kinds(**facts: object) -> list[tuple[int, int, str]]:
    line = sequence_line(**facts)  # type: ignore[arg-type]
    return [(stretch.first, stretch.last, stretch.kind) for stretch in line]


def test_a_whole_topic_is_one_stretch() -> None:
    assert kinds(earliest=1, head=10, count=10, tombstone=None) == [(1, 10, "live")]


def test_an_empty_topic_has_no_stretch() -> None:
    assert kinds(earliest=1, head=0, count=0, tombstone=None) == []


def test_all_deleted_is_one_deleted_stretch() -> None:
    assert kinds(earliest=11, head=10, count=0, tombstone=None) == [(1, 10, "deleted")]


def test_lost_then_deleted_then_live() -> None:
    line = kinds(earliest=8, head=10, count=3, tombstone=gone(1, 5, 10, "ttl"))
    assert line == [(1, 5, "expired"), (6, 7, "deleted"), (8, 10, "live")]


def test_two_causes_are_a_tombstone() -> None:
    assert kinds(earliest=4, head=4, count=1, tombstone=gone(1, 3, 4, "mixed"))[0] == (1, 3, "tombstone")


def test_gaps_that_were_not_scanned_are_counted() -> None:
    (stretch,) = sequence_line(earliest=1, head=100, count=90, tombstone=None)
    assert (stretch.kind, stretch.live) == ("live", 90)
    assert "10 of them" in stretch.reason


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.integers(0, 20),
    st.integers(1, 60),
)
def test_every_number_is_in_one_stretch_and_live_ones_are_live(
    live: set[int], lost: int, scanned_from: int
) -> None:
    numbers = sorted(number for number in live if number > lost)
    head = 60
    scanned = [number for number in numbers if number >= scanned_from]
    line = sequence_line(
        earliest=numbers[0] if numbers else head + 1,
        head=head,
        count=len(numbers),
        tombstone=gone(1, lost, head) if lost else None,
        scanned=scanned,
        scanned_from=scanned_from,
    )
    covered = [number for stretch in line for number in range(stretch.first, stretch.last + 1)]
    assert covered == list(range(1, head + 1))
    assert sum(stretch.live for stretch in line) == len(numbers)
    dead = {n for s in line if s.kind != "live" for n in range(s.first, s.last + 1)}
    assert not dead & set(numbers)
