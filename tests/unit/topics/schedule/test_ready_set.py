"""The choice of the topic that is served next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.topics.schedule.ready_set import BANDS, ReadySet, band_of, effective_priority


def drain(ready: ReadySet[str], now_ms: int = 0) -> list[str]:
    taken: list[str] = []
    while (found := ready.take(now_ms)) is not None:
        taken.append(found[0])
    return taken


@pytest.mark.parametrize(
    ("priority", "band"),
    [(1000, 0), (750, 0), (749, 1), (500, 1), (499, 2), (250, 2), (249, 3), (0, 3), (-1, 4)],
)
def test_the_bands_begin_where_the_contract_says(priority: int, band: int) -> None:
    assert band_of(priority) == band


def test_a_topic_is_in_the_set_once_and_keeps_its_place() -> None:
    ready: ReadySet[str] = ReadySet()
    assert ready.mark("a", 0, 0)
    assert ready.mark("b", 0, 1)
    assert not ready.mark("a", 900, 2)
    assert len(ready) == 2
    assert drain(ready) == ["a", "b"]
    assert len(ready) == 0


def test_bands_are_served_in_proportion_to_their_weights() -> None:
    ready: ReadySet[str] = ReadySet()
    for band, (least, _) in enumerate(BANDS):
        for number in range(40):
            ready.mark(f"{band}-{number}", max(least, -1000), 0)
    first = Counter(int(name[0]) for name in drain(ready)[:16])
    assert first == {band: weight for band, (_, weight) in enumerate(BANDS)}


def test_an_empty_band_leaves_its_share_to_the_others() -> None:
    ready: ReadySet[str] = ReadySet()
    for number in range(20):
        ready.mark(f"low-{number}", 0, 0)
    assert drain(ready) == [f"low-{number}" for number in range(20)]


def test_low_priority_is_served_during_endless_high_priority() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("low", 0, 0)
    ready.mark("high", 1000, 0)
    taken: list[str] = []
    for _ in range(20):
        found = ready.take(0)
        assert found is not None
        taken.append(found[0])
        ready.mark("high", 1000, 0)
    assert "low" in taken


def test_a_waiting_topic_rises_band_by_band_until_it_is_served() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("old", -1000, 0)
    ready.is_lowest_paused = True
    assert ready.take(9_000) is None
    ready.age(9_000)
    assert ready.take(9_000) is None, "-1000 and 9 s make -100"
    ready.age(10_000)
    assert ready.take(10_000) == ("old", 10_000)


def test_a_rising_topic_precedes_those_that_arrived_later() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("low", 0, 0)
    ready.mark("high", 800, 7_400)
    ready.age(7_500)
    assert drain(ready, 7_500) == ["low", "high"]


def test_a_paused_band_waits_and_is_served_when_the_pause_ends() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("negative", -5, 0)
    ready.mark("plain", 0, 0)
    ready.is_lowest_paused = True
    assert drain(ready) == ["plain"]
    ready.is_lowest_paused = False
    assert drain(ready) == ["negative"]


def test_a_set_reports_its_members_its_paused_ones_and_the_servable_count() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("negative", -5, 0)
    ready.mark("plain", 0, 0)
    assert "plain" in ready
    assert "other" not in ready
    assert (ready.paused(), ready.servable) == ([], 2)
    ready.is_lowest_paused = True
    assert (ready.paused(), ready.servable) == (["negative"], 1)
    ready.age(100)
    assert (ready.paused(), ready.servable) == ([], 2), "it has risen"


def test_a_lowered_topic_is_served_one_band_down() -> None:
    ready: ReadySet[str] = ReadySet()
    for number in range(4):
        ready.mark(f"copy-{number}", 800, 0, lowered=True)
        ready.mark(f"own-{number}", 500, 0)
    assert drain(ready)[:4] == ["copy-0", "own-0", "copy-1", "own-1"], "they share a band now"


def test_a_discarded_topic_is_not_served() -> None:
    ready: ReadySet[str] = ReadySet()
    ready.mark("a", 0, 0)
    ready.mark("b", 0, 0)
    ready.discard("a")
    ready.discard("never there")
    assert drain(ready) == ["b"]


@given(
    marks=st.lists(
        st.tuples(st.integers(0, 30), st.integers(-1000, 1000), st.integers(0, 12_000), st.booleans()),
        max_size=80,
    )
)
def test_everything_that_is_marked_is_served_exactly_once(marks: list[tuple[int, int, int, bool]]) -> None:
    ready: ReadySet[int] = ReadySet()
    wanted: set[int] = set()
    for item, priority, now_ms, ages in sorted(marks, key=lambda mark: mark[2]):
        ready.mark(item, priority, now_ms)
        wanted.add(item)
        if ages:
            ready.age(now_ms)
    served: list[int] = []
    while (found := ready.take(20_000)) is not None:
        served.append(found[0])
    assert sorted(served) == sorted(wanted)


def test_ageing_matches_the_effective_priority() -> None:
    aged = effective_priority(
        100, auto_priority=False, now_ms=7_000, last_consumed_ms=None, enqueued_ms=1_000
    )
    assert aged == 700
    ready: ReadySet[str] = ReadySet()
    ready.mark("a", 100, 1_000)
    ready.age(7_000)
    ready.mark("b", 500, 7_000)
    assert drain(ready, 7_000) == ["a", "b"], "both are in the band of 500 to 749"
