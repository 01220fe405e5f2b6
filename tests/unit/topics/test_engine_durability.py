"""What each durability class keeps, and what it may lose."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import FSYNC, World, read_all, recs, seqs, settle

from penstock.testing.disk import Survival
from penstock.topics import Durability, TopicConfig
from penstock.topics.topic.topic_log import RESERVE_MIN

EPHEMERAL = TopicConfig(durability=Durability.EPHEMERAL)
MEMORY = TopicConfig(durability=Durability.MEMORY)
DISK = TopicConfig(durability=Durability.DISK)


@pytest.fixture
def world() -> World:
    return World()


async def test_fsync_keeps_everything_it_acknowledged(world: World) -> None:
    engine = await world.open()
    for n in range(30):
        await engine.write("t", recs(n), config=FSYNC)
    for survival in (Survival.NOTHING, Survival.EVERYTHING):
        engine = await world.crash(survival)
        assert await read_all(engine, "t") == {n + 1: n for n in range(30)}
        assert engine.state("t").head_seq == 30


async def test_disk_keeps_everything_when_the_process_dies(world: World) -> None:
    engine = await world.open()
    for n in range(30):
        await engine.write("t", recs(n), config=DISK)
    engine = await world.kill()
    assert await read_all(engine, "t") == {n + 1: n for n in range(30)}


async def test_disk_never_reuses_a_sequence_and_its_holes_have_no_tombstone(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(0), config=DISK)
    world.committers.tend()
    for n in range(1, 5):
        await engine.write("t", recs(n))
    engine = await world.crash()
    head = engine.state("t").head_seq
    assert head == 1 + RESERVE_MIN
    page = await engine.diff("t")
    assert (seqs(page), page.tombstone, page.next_from_seq, page.caught_up) == ([1], None, head, True)
    assert (await engine.write("t", recs("x"))).first_seq == head + 1
    for stop in ("kill", "restart", "crash"):
        engine = await getattr(world, stop)()
        assert await read_all(engine, "t") == {1: 0, head + 1: "x"}
        assert engine.problems == []


async def test_disk_reserves_before_it_runs_out(world: World) -> None:
    engine = await world.open(wal_file_bytes=1 << 20)
    await engine.put_topic("t", DISK)
    acked = 0
    for _ in range(2 * RESERVE_MIN // 50 + 2):
        acked = (await engine.write("t", recs(*range(50)))).last_seq
    engine = await world.crash()
    assert (await engine.write("t", recs("x"))).first_seq > acked


async def test_a_clean_stop_leaves_no_holes(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=DISK)
    engine = await world.restart()
    assert (await engine.write("t", recs(2))).first_seq == 2


async def test_memory_recovers_the_records_that_survived(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=MEMORY)
    world.committers.tend()
    await engine.write("t", recs(2))
    engine = await world.crash()
    assert engine.state("t").head_seq == 1
    assert (await engine.write("t", recs("again"))).first_seq == 2
    engine = await world.kill()
    assert await read_all(engine, "t") == {1: 1, 2: "again"}
    assert engine.problems == []


async def test_ephemeral_writes_nothing_and_keeps_config_and_checkpointed_head(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", EPHEMERAL)
    calls = len(world.disk.calls)
    for n in range(100):
        await engine.write("t", recs(n, n))
    assert len(world.disk.calls) == calls
    assert len(await read_all(engine, "t")) == 200
    await engine.checkpoint()
    assert len(await read_all(engine, "t")) == 200
    await engine.write("t", recs("late"))
    engine = await world.kill()
    state = engine.state("t")
    assert (state.config.durability, state.head_seq, state.count) == (Durability.EPHEMERAL, 200, 0)
    page = await engine.diff("t")
    assert page.tombstone is not None
    assert page.tombstone.gap_to == 200
    assert (await engine.write("t", recs("new"))).first_seq == 201
    assert engine.problems == []


async def test_an_ephemeral_topic_with_a_cap_frees_its_memory(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL, cap_records=10))
    for n in range(1000):
        await engine.write("t", recs(n))
    assert list((await read_all(engine, "t")).values()) == list(range(990, 1000))
    assert len(engine._catalog.get("t").log._chunks) < 200


@pytest.mark.parametrize("how", ["deleted", "by the cap"])
async def test_an_ephemeral_topic_holds_no_more_memory_than_its_live_records_need(
    world: World, how: str
) -> None:
    engine = await world.open()
    cap_bytes = 1000 if how == "by the cap" else 0
    await engine.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL, cap_bytes=cap_bytes))
    for _ in range(40):
        written = await engine.write("t", recs(*["x" * 50_000] * 2))
        if how == "deleted":
            await engine.delete("t", before_seq=written.last_seq + 1)
    topic = engine._catalog.get("t")
    assert engine.state("t").bytes == 0
    assert sum(map(len, topic.log._chunks.values())) < 512 * 1024


async def test_a_topic_that_becomes_ephemeral_keeps_its_records(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.put_topic("t", EPHEMERAL)
    await engine.write("t", recs(3))
    assert list(await read_all(engine, "t")) == [1, 2, 3]
    await engine.checkpoint()
    assert list(await read_all(engine, "t")) == [1, 2, 3]
    engine = await world.crash()
    assert list(await read_all(engine, "t")) == [1, 2]
    assert engine.state("t").head_seq == 3
    assert engine.problems == []


async def test_records_evicted_while_ephemeral_do_not_come_back(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL, cap_records=2))
    await engine.write("t", recs(3, 4))
    await world.clock.advance(2)
    await engine.put_topic("t", EPHEMERAL)
    engine = await world.kill()
    page = await engine.diff("t")
    assert (seqs(page), page.tombstone is not None) == ([], True)


@pytest.mark.parametrize("config", [FSYNC, DISK, MEMORY])
async def test_a_formerly_ephemeral_topic_keeps_later_records(world: World, config: TopicConfig) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=EPHEMERAL)
    await engine.put_topic("t", config)
    assert (await engine.write("t", recs(3))).first_seq == 3
    engine = await world.kill()
    assert await read_all(engine, "t") == {3: 3}
    assert engine.problems == []
    await engine.checkpoint()
    engine = await world.kill()
    assert await read_all(engine, "t") == {3: 3}


@pytest.mark.parametrize("survival", [Survival.NOTHING, Survival.EVERYTHING])
@pytest.mark.parametrize("config", [FSYNC, DISK])
async def test_no_sequence_of_an_ephemeral_topic_is_used_again_once_it_is_durable(
    world: World, config: TopicConfig, survival: Survival
) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(100)), config=EPHEMERAL)
    await engine.put_topic("t", config)
    engine = await world.crash(survival)
    assert engine.state("t").head_seq >= 100
    written = await engine.write("t", recs("new"))
    assert written.first_seq > 100
    engine = await world.kill()
    assert await read_all(engine, "t", 100) == {written.first_seq: "new"}
    assert engine.problems == []


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("how", ["deleted", "by the cap"])
async def test_records_written_after_a_memory_loss_are_not_mistaken_for_the_lost_ones(
    world: World, how: str, checkpoint: bool
) -> None:
    """1. records in memory are deleted or evicted; 2. a crash loses them; 3. fsync records follow."""
    cap_records = 3 if how == "by the cap" else 0
    fsync = TopicConfig(durable=True, cap_records=cap_records)
    engine = await world.open()
    await engine.write("t", recs(1), config=fsync)
    await engine.put_topic("t", TopicConfig(durability=Durability.EPHEMERAL, cap_records=cap_records))
    await engine.write("t", recs(*range(2, 101)))
    if how == "deleted":
        await engine.delete("t", before_seq=101)
    await world.clock.advance(2)
    engine = await world.kill()
    await engine.put_topic("t", fsync)
    written = await engine.write("t", recs("a", "b", "c"))
    kept = dict(enumerate("abc", written.first_seq))
    if checkpoint:
        await engine.checkpoint()
    for stop in ("kill", "crash", "restart"):
        assert await read_all(engine, "t") == kept
        engine = await getattr(world, stop)()
        assert engine.problems == []


async def test_the_first_checkpoint_after_the_change_stores_the_records_of_an_ephemeral_topic(
    world: World,
) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=EPHEMERAL)
    await engine.put_topic("t", FSYNC)
    await engine.write("t", recs(3))
    await engine.checkpoint()
    engine = await world.crash()
    assert await read_all(engine, "t") == {1: 1, 2: 2, 3: 3}


async def test_writes_that_cross_a_change_to_ephemeral_stay_in_order_and_readable(world: World) -> None:
    """1. the change is submitted; 2. a write is submitted; 3. the change is applied; 4. another write."""
    engine = await world.open(wal_file_bytes=700)
    await engine.write("t", recs(1), config=DISK)
    world.committers.hold()
    change = asyncio.create_task(engine.put_topic("t", EPHEMERAL))
    await settle()
    world.committers.all[0].commit()
    second = asyncio.create_task(engine.write("t", recs(2)))
    await change
    third = asyncio.create_task(engine.write("t", recs(3)))
    await settle()
    world.committers.release()
    assert ((await second).first_seq, (await third).first_seq) == (2, 3)
    await engine.put_topic("other", FSYNC)
    for _ in range(4):
        for n in range(10):
            await engine.write("other", recs("x" * 30, n))
        await engine.checkpoint()
        assert await read_all(engine, "t") == {1: 1, 2: 2, 3: 3}


async def test_writes_in_flight_when_the_engine_closes_are_acknowledged_and_stored(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    world.committers.hold()
    writes = [asyncio.create_task(engine.write("t", recs(n))) for n in range(3)]
    await settle()
    closing = asyncio.create_task(engine.close())
    await settle()
    world.committers.release()
    await closing
    assert [(await write).first_seq for write in writes] == [1, 2, 3]
    assert await read_all(await world.open(), "t") == {1: 0, 2: 1, 3: 2}
