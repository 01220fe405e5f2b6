"""Deletion of records: which records, for how long, and what stays unaffected."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import FSYNC, World, read_all, rec, recs, seqs, settle

from penstock.topics import Durability, InvalidRequest, NewRecord, Predicate, TopicConfig, TopicNotFound
from penstock.topics.segments.reader import Segment
from penstock.topics.segments.tags import TagTable

TAGGED = ["a", "ab", "b", None, "a", "abc"]


@pytest.fixture
def world() -> World:
    return World()


def tagged() -> list[NewRecord]:
    return [rec(n, tag=tag) for n, tag in enumerate(TAGGED, 1)]


async def test_a_prefix_covers_everything_below_and_stops_at_the_head(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3))
    result = await engine.delete("t", before_seq=3)
    assert (result.deleted, result.earliest_seq, result.head_seq, result.count, result.bytes) == (
        2,
        3,
        3,
        1,
        1,
    )
    assert (await engine.delete("t", before_seq=2)).deleted == 0
    assert (await engine.delete("t", before_seq=10**18)).deleted == 1
    assert (await engine.write("t", recs(4))).first_seq == 4
    assert seqs(await engine.diff("t")) == [4]


@pytest.mark.parametrize(
    ("match", "before_seq", "left"),
    [
        (Predicate(value="a"), None, [2, 3, 4, 6]),
        (Predicate(value="a", is_prefix=True), None, [3, 4]),
        (Predicate(value="", is_prefix=True), None, [4]),
        (Predicate(value=""), None, [1, 2, 3, 4, 5, 6]),
        (Predicate(value="a", is_prefix=True), 5, [3, 4, 5, 6]),
        (Predicate(value="a"), 10**18, [2, 3, 4, 6]),
        (None, 5, [5, 6]),
        (None, 0, [1, 2, 3, 4, 5, 6]),
    ],
)
@pytest.mark.parametrize("where", ["log", "active segment", "sealed segments"])
async def test_a_delete_selects_the_same_records_in_every_tier(
    world: World, match: Predicate | None, before_seq: int | None, left: list[int], where: str
) -> None:
    engine = await world.open(segment_max_events=2 if where == "sealed segments" else 1000)
    await engine.write("t", tagged(), config=FSYNC)
    if where != "log":
        await engine.checkpoint()
    result = await engine.delete("t", match=match, before_seq=before_seq)
    assert result.deleted == 6 - len(left)
    assert result.count == len(left)
    assert seqs(await engine.diff("t")) == left
    assert (await engine.delete("t", match=match, before_seq=before_seq)).deleted == 0
    assert (await engine.diff("t")).tombstone is None
    for stop in ("kill", "restart", "crash"):
        engine = await getattr(world, stop)()
        assert seqs(await engine.diff("t")) == left
        await engine.checkpoint()
        assert seqs(await engine.diff("t")) == left
        assert engine.problems == []


async def test_a_prefix_with_a_match_moves_no_watermark(world: World) -> None:
    engine = await world.open()
    await engine.write("t", tagged(), config=FSYNC)
    await engine.delete("t", before_seq=3, match=Predicate(value="b"))
    assert engine.state("t").earliest_seq == 1
    engine = await world.crash()
    assert seqs(await engine.diff("t")) == [1, 2, 3, 4, 5, 6]


async def test_a_delete_covers_only_records_that_existed_at_the_call(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, tag="x"), config=FSYNC)
    world.committers.hold()
    before = asyncio.create_task(engine.write("t", recs(2, tag="x")))
    await settle()
    by_tag = asyncio.create_task(engine.delete("t", match=Predicate(value="x")))
    prefix = asyncio.create_task(engine.delete("t", before_seq=100))
    await settle()
    after = asyncio.create_task(engine.write("t", recs(3, tag="x")))
    await settle()
    world.committers.release()
    await asyncio.gather(before, after)
    assert ((await by_tag).deleted, (await prefix).deleted) == (1, 0)
    assert seqs(await engine.diff("t")) == [2, 3]
    engine = await world.crash()
    assert seqs(await engine.diff("t")) == [2, 3]


async def test_a_delete_needs_a_selector_before_it_needs_a_topic(world: World) -> None:
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        await engine.delete("absent")
    with pytest.raises(TopicNotFound):
        await engine.delete("absent", before_seq=1)


async def test_deletes_during_a_checkpoint_are_not_undone_by_it(world: World) -> None:
    engine = await world.open(segment_max_events=3)
    await engine.write("t", tagged(), config=FSYNC)
    world.workers.hold()
    checkpoint = asyncio.create_task(engine.checkpoint())
    await settle()
    await engine.delete("t", before_seq=2)
    deleting = asyncio.create_task(engine.delete("t", match=Predicate(value="ab", is_prefix=True)))
    await settle()
    await engine.write("t", recs(7))
    world.workers.release()
    await checkpoint
    await deleting
    assert seqs(await engine.diff("t")) == [3, 4, 5, 7]
    for stop in ("kill", "crash", "restart", "kill"):
        engine = await getattr(world, stop)()
        assert seqs(await engine.diff("t")) == [3, 4, 5, 7]
        assert engine.problems == []


async def test_the_tags_of_every_segment_are_read_by_the_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers read them, once and before the delete is applied, so the event loop is not blocked."""
    engine = await world.open(segment_max_events=4)
    await engine.write("t", tagged(), config=FSYNC)
    await engine.checkpoint()
    assert [segment.sealed for segment in engine._catalog.get("t").log.segments] == [True, False]
    read: list[int] = []
    tags = Segment.tags

    def noted(segment: Segment) -> TagTable:
        read.append(segment.first_seq)
        return tags(segment)

    monkeypatch.setattr(Segment, "tags", noted)
    world.workers.hold()
    world.committers.hold()
    deleting = asyncio.create_task(engine.delete("t", match=Predicate(value="a")))
    await settle()
    assert (read, world.workers.waiting) == ([], 1)
    world.workers.release()
    await settle()
    assert (read, deleting.done()) == ([1, 5], False)
    world.committers.release()
    assert (await deleting).deleted == 2
    assert read == [1, 5]


async def test_a_delete_by_tag_covers_a_segment_that_grows_while_its_tags_are_read(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, tag="x"), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(3, tag="x"))
    world.committers.hold()
    deleting = asyncio.create_task(engine.delete("t", match=Predicate(value="x")))
    await settle()
    await engine.checkpoint()
    assert [segment.count for segment in engine._catalog.get("t").log.segments] == [3]
    world.committers.release()
    assert (await deleting).deleted == 3
    for stop in ("kill", "restart"):
        assert await read_all(engine, "t") == {}
        engine = await getattr(world, stop)()


async def test_deleting_everything_keeps_the_head(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.delete("t", before_seq=100)
    for stop in ("kill", "restart", "crash", "kill"):
        engine = await getattr(world, stop)()
        state = engine.state("t")
        assert (state.head_seq, state.earliest_seq, state.count) == (3, 4, 0)
        await engine.checkpoint()
    assert (await engine.write("t", recs(4))).first_seq == 4


async def test_deletes_of_records_stored_before_the_topic_became_ephemeral_are_durable(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, tag="x"), config=FSYNC)
    await engine.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL))
    await engine.delete("t", match=Predicate(value="x"), before_seq=2)
    engine = await world.kill()
    assert await read_all(engine, "t") == {2: 2}
