"""Events with rising ids: a client that reconnects gets the events that it missed, or a gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.console.live import RingBuffer


def ring(
    events_max: int = 3, bytes_max: int = 1000, start_ms: int = 1, apart: tuple[str, ...] = ()
) -> RingBuffer:
    return RingBuffer(start_ms, events_max=events_max, bytes_max=bytes_max, apart=apart)


def test_a_client_gets_the_events_after_its_last_id() -> None:
    events = ring()
    first = events.push("a", b"1")
    events.push("b", b"2")
    missed = events.after(first.ident)
    assert (missed.gap, [event.name for event in missed.events]) == (None, ["b"])
    assert events.after(events.last).events == []


def test_evicted_events_are_a_gap_with_both_ends() -> None:
    events = ring()
    first = events.push("a", b"")
    for _ in range(5):
        events.push("b", b"")
    missed = events.after(first.ident)
    assert missed.gap == (first.ident + 1, first.ident + 2)
    assert [event.ident for event in missed.events] == [first.ident + 3, first.ident + 4, first.ident + 5]


def test_large_events_evict_others_but_the_last_stays() -> None:
    events = ring(events_max=100, bytes_max=10)
    events.push("a", b"x" * 8)
    events.push("b", b"x" * 50)
    assert [event.name for event in events.after(0).events] == ["b"]


def test_ids_rise_over_a_restart_and_the_time_between_is_a_gap() -> None:
    before = ring(start_ms=1_000)
    last = before.push("a", b"").ident
    after = ring(start_ms=2_000)
    fresh = after.push("b", b"").ident
    assert fresh > last
    assert after.after(last).gap == (last + 1, fresh - 1)


def test_an_unassigned_id_gets_all_events_after_a_gap() -> None:
    events = ring()
    event = events.push("a", b"")
    missed = events.after(event.ident + 1000)
    assert missed.gap is not None
    assert missed.events == [event]


def test_the_newest_events_of_a_name_are_returned_oldest_first() -> None:
    events = ring(events_max=10)
    for number in range(4):
        events.push("log", b"%d" % number)
        events.push("other", b"")
    assert [event.data for event in events.newest("log", 2)] == [b"2", b"3"]


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_client_that_follows_gets_every_event_once_or_a_gap(pushes: list[int]) -> None:
    events = ring(events_max=5)
    at, seen, missing, pushed = events.last, 0, 0, 0
    for count in pushes:
        for _ in range(count * 3):
            events.push("x", b"")
            pushed += 1
        missed = events.after(at)
        if missed.gap is not None:
            missing += missed.gap[1] - missed.gap[0] + 1
        seen += len(missed.events)
        at = events.last
    assert seen + missing == pushed


def test_names_with_their_own_lane_are_not_evicted_by_others() -> None:
    events = ring(apart=("log",))
    line = events.push("log", b"kept")
    for _ in range(10):
        events.push("part", b"")
    assert events.newest("log", 5) == [line]
    missed = events.after(line.ident - 1)
    assert missed.gap == (line.ident, line.ident + 7)
    assert [event.name for event in missed.events] == ["log", "part", "part", "part"]
    assert missed.gap_ident == line.ident - 1, "whoever goes on behind the gap gets the line"
    assert events.after(line.ident + 7).gap is None


@given(st.lists(st.tuples(st.sampled_from(["log", "part"]), st.booleans()), max_size=80))
def test_ids_rise_over_all_lanes_and_nothing_is_lost_without_a_gap(pushes: list[tuple[str, bool]]) -> None:
    events = ring(events_max=4, apart=("log",))
    at, told, unseen = events.last, [], set[int]()
    for name, is_read in pushes:
        unseen.add(events.push(name, b"").ident)
        if not is_read:
            continue
        missed = events.after(at)
        if missed.gap is not None:
            assert at <= missed.gap_ident < min(event.ident for event in missed.events)
            unseen -= set(range(missed.gap[0], missed.gap[1] + 1))
        told += [event.ident for event in missed.events]
        unseen -= set(told)
        at = events.last
        assert not unseen
    assert told == sorted(set(told))
