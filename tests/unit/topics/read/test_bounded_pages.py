"""Pages that end at a given record, whatever follows it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.topics.engine_doubles import World, rec, seqs

from penstock.topics import TopicConfig
from penstock.topics.model import Page, Predicate
from penstock.topics.read.subscription import SubscriptionFilter

COUNT = 40


@pytest.fixture(params=["log", "segments", "both"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Some records are deleted, some evicted, and some were lost by the source of a copy."""
    made = World(segment_max_events=7)
    await made.open()
    await made.engine.put_topic("x", TopicConfig(cap_records=30))
    await _write(made, 20)
    if request.param == "both":
        await made.engine.checkpoint()
    topic = made.engine._catalog.get("x")
    topic.mark_lost(4)
    topic.log.forget_in_flight()
    await _write(made, 16)
    await made.engine.delete("x", match=Predicate(value="doomed"))
    if request.param == "segments":
        await made.engine.checkpoint()
    yield made
    await made.engine.close()


async def _write(world: World, count: int) -> None:
    for number in range(count):
        tag = "doomed" if number % 5 == 4 else "web" if number % 2 else None
        await world.engine.write("x", [rec(number, tag=tag, node="me" if number % 3 == 0 else None)])


async def page(world: World, from_seq: int, want: SubscriptionFilter, until_seq: int, at_hand: bool) -> Page:
    feed = world.engine.feed("x")
    if not at_hand:
        return await feed.page(from_seq, want, until_seq=until_seq)
    found = feed.page_at_hand(from_seq, want, until_seq=until_seq)
    assert found is not None
    return found


async def told(
    world: World, want: SubscriptionFilter, until_seq: int, at_hand: bool
) -> tuple[list[int], list[int], int]:
    """Read page by page up to the bound. Return the records, the numbers in gaps, and the last position."""
    found: list[int] = []
    lost: list[int] = []
    from_seq = 0
    while True:
        got = await page(world, from_seq, want, until_seq, at_hand)
        if got.tombstone is not None:
            lost += range(got.tombstone.gap_from, got.tombstone.gap_to + 1)
            assert got.tombstone.missed_estimate == got.tombstone.gap_to - got.tombstone.gap_from + 1
        found += seqs(got)
        assert not until_seq or got.next_from_seq <= until_seq
        if got.next_from_seq == (until_seq or got.head_seq):
            return found, lost, got.next_from_seq
        assert got.next_from_seq > from_seq
        from_seq = got.next_from_seq


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize(
    "want", [{}, {"nodes": ["me"]}, {"match": Predicate(value="web")}], ids=["all", "nodes", "tag"]
)
async def test_pages_up_to_a_bound_equal_unbounded_pages_cut_off_there(
    world: World, limit: int, want: dict[str, object], at_hand: bool
) -> None:
    wanted = SubscriptionFilter.of(limit=limit, **want)  # type: ignore[arg-type]
    everything, lost, end = await told(world, wanted, 0, at_hand)
    assert end == COUNT
    assert lost, "the setting has gaps"
    for until_seq in range(1, COUNT + 1):
        some, some_lost, _ = await told(world, wanted, until_seq, at_hand)
        assert some == [seq for seq in everything if seq <= until_seq]
        assert some_lost == [seq for seq in lost if seq <= until_seq]


async def test_a_bound_beyond_the_head_has_no_effect(world: World) -> None:
    want = SubscriptionFilter.of(limit=1000)
    assert await told(world, want, 0, True) == (await told(world, want, COUNT, True))
    got = await page(world, 0, want, COUNT + 5, True)
    assert got.next_from_seq == (await page(world, 0, want, 0, True)).next_from_seq


async def test_a_reader_at_the_bound_gets_nothing_and_stays_there(world: World) -> None:
    for until_seq in (3, 12, 22, 30):
        got = await page(world, until_seq, SubscriptionFilter.of(), until_seq, True)
        assert (got.fragments, got.tombstone, got.next_from_seq) == ([], None, until_seq)


async def test_a_reader_of_a_recreated_topic_starts_over_up_to_the_bound(world: World) -> None:
    got = await page(world, 10**6, SubscriptionFilter.of(limit=1000), 30, True)
    assert got.tombstone is not None
    assert got.tombstone.reason == "recreated"
    assert got.next_from_seq <= 30
    assert max(seqs(got)) <= 30
