"""Reads by tag and without data, from every tier, and feeds that are notified of changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from tests.unit.topics.engine_doubles import World, rec, recs, seqs, settle

from penstock.topics import TopicConfig
from penstock.topics.errors import TopicNotFound
from penstock.topics.model import Predicate
from penstock.topics.read.subscription import SubscriptionFilter

TAGS = ["web", "web.eu", None, "app", "webb"]
COUNT = 100


def tag(seq: int) -> str | None:
    return TAGS[seq % len(TAGS)]


def expected(predicate: Predicate) -> list[int]:
    def is_meant(name: str | None) -> bool:
        if name is None:
            return False
        return name.startswith(predicate.value) if predicate.is_prefix else name == predicate.value

    return [seq for seq in range(1, COUNT + 1) if is_meant(tag(seq))]


PREDICATES = [
    Predicate(value="web"),
    Predicate(value="web", is_prefix=True),
    Predicate(value="", is_prefix=True),
    Predicate(value="nothing"),
]


@pytest.fixture(params=["log", "segments"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(segment_max_events=30)
    await made.open()
    records = [
        rec({"n": seq}, tag=tag(seq), node="me" if seq % 2 else None, meta={"m": seq} if seq % 3 else None)
        for seq in range(1, COUNT + 1)
    ]
    await made.engine.write("x", records)
    if request.param == "segments":
        await made.engine.checkpoint()
    yield made
    await made.engine.close()


@pytest.mark.parametrize(
    "predicate", PREDICATES, ids=lambda one: f"{one.value}{'*' if one.is_prefix else ''}"
)
@pytest.mark.parametrize("limit", [1, 5, 1000])
async def test_a_diff_by_tag_gives_exactly_those_records(
    world: World, predicate: Predicate, limit: int
) -> None:
    found: list[int] = []
    from_seq = 0
    while True:
        page = await world.engine.diff("x", from_seq, limit=limit, match=predicate)
        assert len(page.fragments) <= limit
        found += seqs(page)
        from_seq = page.next_from_seq
        if page.caught_up:
            break
    assert found == expected(predicate)
    assert from_seq == COUNT


async def test_a_tag_and_a_node_are_both_respected(world: World) -> None:
    page = await world.engine.diff("x", limit=1000, node=["me"], match=Predicate(value="web"))
    assert seqs(page) == [seq for seq in expected(Predicate(value="web")) if seq % 2 == 0]


async def test_records_without_data_have_all_other_fields(world: World) -> None:
    feed = world.engine.feed("x")
    page = feed.page_at_hand(0, SubscriptionFilter.of(limit=1000, include_data=False, include_tags=True))
    assert page is not None
    shown = [json.loads(fragment) for fragment in page.fragments]
    assert [one["$seq"] for one in shown] == list(range(1, COUNT + 1))
    for one in shown:
        seq = one["$seq"]
        wanted = {"$seq", "$ts"}
        wanted |= {"$tag"} if tag(seq) else set()
        wanted |= {"$node"} if seq % 2 else set()
        wanted |= {"meta"} if seq % 3 else set()
        assert one.keys() == wanted


async def test_a_feed_is_notified_of_every_publish_and_of_the_end(world: World) -> None:
    feed = world.engine.feed("x")
    told: list[tuple[int, bool]] = []

    def tell() -> None:
        told.append((feed.head_seq, feed.is_gone))

    feed.listen(tell)
    await world.engine.write("x", recs(1, 2))
    assert told == [(COUNT + 2, False)]
    await world.engine.remove_topic("x")
    await settle()
    assert told[-1] == (COUNT + 2, True)
    with pytest.raises(TopicNotFound):
        world.engine.feed("x")
    with pytest.raises(TopicNotFound):
        await feed.page(0, SubscriptionFilter())


async def test_a_feed_that_stopped_listening_is_not_notified(world: World) -> None:
    feed = world.engine.feed("x")
    told: list[int] = []

    def tell() -> None:
        told.append(feed.head_seq)

    feed.listen(tell)
    feed.unlisten(tell)
    await world.engine.write("x", recs(1))
    assert told == []


async def test_a_topic_of_the_same_name_is_a_new_topic(world: World) -> None:
    before = world.engine.feed("x")
    await world.engine.remove_topic("x")
    appeared: list[str] = []
    world.engine.on_topic(appeared.append)
    await world.engine.put_topic("x", TopicConfig())
    assert appeared == ["x"]
    after = world.engine.feed("x")
    assert before.is_gone
    assert not after.is_gone
    assert before.epoch != after.epoch


async def test_filters_are_limited_to_the_maximum() -> None:
    assert SubscriptionFilter.of() == SubscriptionFilter()
    assert SubscriptionFilter.of(limit=5000, max_batch_bytes=2**40) == SubscriptionFilter(
        limit=1000, max_batch_bytes=8 * 1024**2
    )
    assert hash(SubscriptionFilter.of(nodes=["a", "b"])) == hash(SubscriptionFilter.of(nodes=["b", "a"]))
