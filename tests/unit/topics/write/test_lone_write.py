"""A synced write that is alone in its commit, on a fast disk, is decided when it is submitted."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import FSYNC, World, read_all, recs, settle, values

from penstock.errors import PenstockError
from penstock.testing.disk import DiskFault, PlannedFault
from penstock.topics import CommitFailed, Durability, Engine, TopicConfig, WriteResult


@pytest.fixture
def world() -> World:
    return World(is_quick=True)


async def quiet(world: World) -> Engine:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    await settle()
    return engine


async def test_a_lone_write_is_answered_before_the_call_returns(world: World) -> None:
    engine = await quiet(world)
    told: list[WriteResult | PenstockError] = []
    assert engine.begin_write("t", recs("a"), told.append)
    assert [one.last_seq for one in told if isinstance(one, WriteResult)] == [1]
    assert values(await engine.diff("t")) == ["a"]
    assert await read_all(await world.crash(), "t") == {1: "a"}


async def test_a_second_write_of_the_same_turn_waits_for_the_others(world: World) -> None:
    engine = await quiet(world)
    told: list[WriteResult | PenstockError] = []
    before = engine.stats().wal.batches
    for value in "abc":
        assert engine.begin_write("t", recs(value), told.append)
    assert len(told) == 1
    await settle()
    assert [one.first_seq for one in told if isinstance(one, WriteResult)] == [1, 2, 3]
    assert engine.stats().wal.batches == before + 2
    # If the last turn had several writes, the first write of the next turn waits for others.
    for value in "de":
        assert engine.begin_write("t", recs(value), told.append)
    assert len(told) == 3
    await settle()
    assert engine.stats().wal.batches == before + 3
    assert await read_all(await world.crash(), "t") == dict(enumerate("abcde", 1))


async def test_no_write_overtakes_one_that_waits_for_its_commit(world: World) -> None:
    engine = await quiet(world)
    world.committers.hold()
    told: list[WriteResult | PenstockError] = []
    for value in "ab":
        assert engine.begin_write("t", recs(value), told.append)
        await settle()
    assert told == []
    world.committers.release()
    await settle()
    assert [one.first_seq for one in told if isinstance(one, WriteResult)] == [1, 2]


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
async def test_writes_that_need_no_sync_are_gathered(world: World, durability: Durability) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=durability))
    await engine.write("t", recs("reserves"))
    await settle()
    told: list[WriteResult | PenstockError] = []
    assert engine.begin_write("t", recs("a"), told.append)
    assert told == []
    await settle()
    assert len(told) == 1


async def test_a_lone_write_that_fails_is_reported_immediately_and_leaves_no_gap(world: World) -> None:
    engine = await quiet(world)
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    told: list[WriteResult | PenstockError] = []
    assert engine.begin_write("t", recs("lost"), told.append)
    assert [type(one) for one in told] == [CommitFailed]
    world.disk.plan = None
    await settle()
    assert engine.begin_write("t", recs("kept"), told.append)
    await settle()
    assert await read_all(engine, "t") == {1: "kept"}
    assert engine.state("t").head_seq == 1
    assert await read_all(await world.crash(), "t") == {1: "kept"}


async def test_a_write_made_in_a_callback_follows_the_reported_write(world: World) -> None:
    engine = await quiet(world)
    told: list[str] = []

    def and_one_more(result: WriteResult | PenstockError) -> None:
        told.append("first")
        assert engine.begin_write("t", recs("b"), lambda _: told.append("second"))

    assert engine.begin_write("t", recs("a"), and_one_more)
    await settle()
    assert told == ["first", "second"]
    assert await read_all(engine, "t") == {1: "a", 2: "b"}


async def test_a_write_made_during_other_callbacks_does_not_overtake_their_writes(world: World) -> None:
    engine = await quiet(world)
    world.committers.hold()
    told: list[WriteResult | PenstockError] = []

    def and_one_more(result: WriteResult | PenstockError) -> None:
        told.append(result)
        assert engine.begin_write("t", recs("c"), told.append)

    # 1. Two entries of one turn each wait; 2. both are committed together; 3. the first callback writes.
    assert engine.begin_write("t", recs("a"), and_one_more)
    await settle()
    assert engine.begin_write("t", recs("b"), told.append)
    await settle()
    world.committers.release()
    await settle()
    assert [one.first_seq for one in told if isinstance(one, WriteResult)] == [1, 2, 3]
    assert await read_all(engine, "t") == {1: "a", 2: "b", 3: "c"}


async def test_a_writer_of_consecutive_writes_yields_to_others(world: World) -> None:
    engine = await quiet(world)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    for value in range(40):
        await engine.write("t", recs(value))
    counting.cancel()
    assert turns >= 20
