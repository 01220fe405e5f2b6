"""Copies and cursors after a power cut, by the rules of `penstock.topics.routers.routing`."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import COLD, DATA, World, flip_bit, read_all, rec, recs, settle, values

from penstock.storage.log_layout import file_name
from penstock.testing.disk import Survival
from penstock.testing.topics_kit import InlineCommitter
from penstock.topics import Durability, Engine, Predicate, RouterConfig, TopicConfig

AB = RouterConfig(source="a", dest="b")
DISK = TopicConfig(durability=Durability.DISK)
FSYNC = TopicConfig(durability=Durability.FSYNC)
MEMORY = TopicConfig(durability=Durability.MEMORY)


async def apart(world: World, source: TopicConfig, dest: TopicConfig) -> Engine:
    """Return a router between two topics whose frames go to different logs."""
    engine = await world.open(wal_shards=2)
    await engine.put_topic("a", source)
    for number in range(20):
        await engine.put_topic("b", dest)
        if shard(world, "b") is not shard(world, "a"):
            break
        await engine.remove_topic("b")
        assert number < 19
    await engine.put_router("a->b", AB)
    return engine


def shard(world: World, topic: str) -> InlineCommitter:
    found = world.engine._catalog.get(topic).shard
    return next(committer for committer in world.committers.all if committer.log is found.log)


async def test_a_checkpoint_waits_for_copies_in_flight() -> None:
    """1. copies are submitted; 2. their originals are evicted; 3. a cut is taken; 4. the copies commit."""
    world = World()
    engine = await apart(world, TopicConfig(durability=Durability.FSYNC, cap_records=1), FSYNC)
    await engine.write("a", recs(1))
    shard(world, "b").held = True
    reading = asyncio.ensure_future(read_all(engine, "b"))
    await settle()
    await engine.write("a", recs(2))
    checkpoint = asyncio.ensure_future(engine.checkpoint())
    await settle()
    shard(world, "b").held = False
    shard(world, "b").commit()
    await checkpoint
    seen = await reading
    assert seen[1] == 1
    engine = await world.crash()
    assert engine.problems == []
    assert (await read_all(engine, "b"))[1] == 1
    await engine.close()


async def test_a_durable_copy_of_a_less_durable_source_is_stored_by_value() -> None:
    world = World()
    engine = await apart(world, DISK, FSYNC)
    await engine.write("a", recs(1))
    await engine.write("a", recs(2))  # the first one reserves numbers with a sync
    assert await read_all(engine, "b") == {1: 1, 2: 2}
    engine = await world.crash()
    assert await read_all(engine, "b") == {1: 1, 2: 2}
    await engine.close()


async def test_a_cursor_that_is_ahead_of_its_source_goes_back_permanently() -> None:
    """1. copies are durable and their originals are not; 2. the power fails; 3. new records, and a kill."""
    world = World()
    engine = await apart(world, MEMORY, FSYNC)
    await engine.write("a", recs(1, 2, 3, 4, 5))
    await engine.drain("b")
    engine = await world.crash()
    assert engine.state("a").head_seq == 0
    await engine.write("a", recs("x", "y"))
    engine = await world.kill()
    assert list((await read_all(engine, "b")).values()) == [1, 2, 3, 4, 5, "x", "y"]
    await engine.close()


async def test_a_cursor_is_truncated_together_with_its_incomplete_copies() -> None:
    world = World()
    engine = await apart(world, MEMORY, DISK)
    await engine.write("a", recs("first"))
    await engine.drain("b")
    world.committers.tend()
    await engine.write("a", recs("second"))
    await engine.drain("b")
    log = shard(world, "b").log
    path, end = f"{log._directory}/{file_name(log.end.file)}", log.end.offset
    world.unplug(Survival.EVERYTHING)
    flip_bit(world.disk, path, (end - 12) * 8)
    engine = await world.open()
    assert list((await read_all(engine, "b")).values()) == ["first", "second"]
    assert (await engine.router("a->b")).forwarded_total == 2
    await engine.close()


async def test_copies_made_again_are_byte_identical() -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", [rec("\u00e9/\u2028", tag="t", node="n", meta={"k": ["x", 1]}), rec(None)])
    await engine.checkpoint()
    await engine.write("a", [rec({"d": 1, "m": 2}, tag="ü")])
    await engine.drain("b")
    await world.clock.advance(60)
    before = await engine.diff("b", include_tags=True)
    state = engine.state("b")
    engine = await world.crash()
    after = await engine.diff("b", include_tags=True)
    assert after.fragments == before.fragments
    assert (engine.state("b").count, engine.state("b").bytes) == (state.count, state.bytes)
    assert (await engine.delete("b", match=Predicate(value="ü"))).deleted == 1
    await engine.close()


async def test_deletions_at_the_destination_are_not_undone_by_copies_made_again() -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", [rec(1, tag="x"), rec(2), rec(3, tag="x")])
    await engine.drain("b")
    await engine.delete("b", match=Predicate(value="x"))
    await engine.write("a", [rec(4, tag="x")])
    assert await read_all(engine, "b") == {2: 2, 4: 4}
    for _ in range(2):
        engine = await world.crash()
        assert await read_all(engine, "b") == {2: 2, 4: 4}
    await engine.close()


async def test_a_deleted_router_does_not_come_back_and_its_copies_do() -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", recs(1))
    await engine.remove_router("a->b")
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(2))
    assert await read_all(engine, "b") == {1: 1, 2: 2}
    engine = await world.crash()
    assert await read_all(engine, "b") == {1: 1, 2: 2}
    assert (await engine.router("a->b")).forwarded_total == 1
    await engine.remove_router("a->b")
    engine = await world.crash()
    assert engine.routers() == ([], None)
    assert await read_all(engine, "b") == {1: 1, 2: 2}
    await engine.close()


async def test_a_changed_filter_does_not_affect_earlier_copies() -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    only_x = RouterConfig(source="a", dest="b", filter=Predicate(value="x"))
    await engine.put_router("a->b", only_x)
    await engine.write("a", [rec(1), rec(2, tag="x")])
    await engine.write("a", [rec(3)])
    await engine.drain("b")
    await engine.put_router("a->b", AB)
    engine = await world.crash()
    assert list((await read_all(engine, "b")).values()) == [2]
    assert (await engine.router("a->b")).config == AB
    await engine.close()


@pytest.mark.parametrize("shards", [1, 3])
async def test_routers_survive_another_number_of_logs(shards: int) -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", recs(1, 2))
    await engine.drain("b")
    engine = await world.crash(wal_shards=shards)
    await engine.write("a", recs(3))
    assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    engine = await world.crash(wal_shards=2)
    assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    assert (await engine.router("a->b")).forwarded_total == 3
    await engine.close()


async def test_an_unreadable_snapshot_loses_no_copy() -> None:
    world = World()
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", recs(1))
    await engine.drain("b")
    await engine.checkpoint()
    await engine.write("a", recs(2))
    await engine.drain("b")
    await engine.checkpoint()
    await engine.write("a", recs(3))
    await engine.drain("b")
    world.unplug(Survival.NOTHING)
    newest = max(name for name, _ in world.disk.list_files(f"{DATA}/meta") if name.startswith("snapshot"))
    flip_bit(world.disk, f"{DATA}/meta/{newest}", 500)
    engine = await world.open()
    assert len(engine.problems) == 1
    assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    await engine.close()


async def test_records_in_the_cold_tier_are_copied() -> None:
    world = World(cold_dir=COLD, segment_max_events=2, hot_retain_segments=0)
    engine = await apart(world, FSYNC, TopicConfig(durable=True, cap_records=1, discard="reject"))
    await engine.write("a", recs(*range(7)))
    await engine.checkpoint()
    await engine.put_topic("b", FSYNC)
    assert list((await read_all(engine, "b")).values()) == list(range(7))
    await engine.write("a", recs(7))
    assert list((await read_all(engine, "b")).values()) == list(range(8))
    engine = await world.crash()
    assert list((await read_all(engine, "b")).values()) == list(range(8))
    await engine.close()


async def test_copies_wait_in_memory_no_longer_than_records_in_the_log() -> None:
    world = World(checkpoint_bytes=20_000, wal_file_bytes=1 << 20)
    engine = await apart(world, FSYNC, FSYNC)
    for place in range(30):
        await engine.put_router(f"more{place}", RouterConfig(source="a", dest=f"b{place}"))
    await engine.write("a", recs("x" * 1000))
    for place in range(30):
        await engine.drain(f"b{place}")
    await world.clock.advance(1)
    await settle()
    assert engine._catalog.get("b0").log.segments
    assert values(await engine.diff("b0")) == ["x" * 1000]
    await engine.close()
