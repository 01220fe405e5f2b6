"""The change of an ephemeral topic to durable: no sequence is reused, and no synced record is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import World, read_all, recs, settle

from penstock.topics import Durability, TopicConfig
from penstock.topics.routers.model import RouterConfig

EPHEMERAL = TopicConfig(durability=Durability.EPHEMERAL)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
async def test_writes_during_a_change_to_durable_go_into_the_log(
    world: World, durability: Durability
) -> None:
    engine = await world.open()
    await engine.put_topic("t", EPHEMERAL)
    await engine.write("t", recs(1, 2, 3))
    world.committers.hold()
    change = asyncio.ensure_future(engine.put_topic("t", TopicConfig(durability=durability)))
    await settle()
    written = asyncio.ensure_future(engine.write("t", recs(4, 5, 6)))
    await settle()
    assert not written.done(), "its turn comes after the change"
    world.committers.release()
    await change
    assert (await written).last_seq == 6
    engine = await world.crash()
    assert engine.state("t").head_seq >= 6
    assert (await read_all(engine, "t")).items() >= {4: 4, 5: 5, 6: 6}.items()
    assert (await engine.write("t", recs("new"))).first_seq > 6


async def test_a_caller_that_leaves_does_not_stop_the_change(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", EPHEMERAL)
    world.committers.hold()
    change = asyncio.ensure_future(engine.put_topic("t", TopicConfig(durability=Durability.FSYNC)))
    await settle()
    change.cancel()
    await settle()
    written = asyncio.ensure_future(engine.write("t", recs(1)))
    await settle()
    assert not written.done()
    world.committers.release()
    await written
    assert engine.state("t").config.durability is Durability.FSYNC
    engine = await world.crash()
    assert await read_all(engine, "t") == {1: 1}


async def test_a_copy_of_only_lost_records_does_not_break_a_later_write(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("source", TopicConfig(cap_records=2))
    await engine.put_topic("dest", TopicConfig())
    await engine.put_router("r", RouterConfig(source="source", dest="dest"))
    await engine.write("source", recs(*range(10)))
    await engine.delete("source", before_seq=11)
    world.committers.hold()
    change = asyncio.ensure_future(engine.put_topic("dest", EPHEMERAL))
    await settle()
    engine.refresh("dest")
    await settle()
    (committer,) = world.committers.all
    first, behind = committer.waiting[:1], committer.waiting[1:]
    committer.waiting[:] = first
    committer.commit()
    committer.waiting[:] = behind
    await settle()
    written = asyncio.ensure_future(engine.write("dest", recs("x")))
    await settle()
    world.committers.release()
    await change
    first_seq = (await written).first_seq
    assert (await engine.write("dest", recs("y"))).first_seq == first_seq + 1
    assert engine.state("dest").head_seq == first_seq + 1
