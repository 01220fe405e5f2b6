"""Creation, change and deletion of topics."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.unit.topics.engine_doubles import (
    FSYNC,
    World,
    gather_outcomes,
    read_all,
    recs,
    seqs,
    settle,
    values,
)

from penstock.errors import PenstockError
from penstock.topics import (
    Durability,
    IncompatibleTopic,
    InvalidRequest,
    Throttled,
    TopicConfig,
    TopicNotEmpty,
    TopicNotFound,
)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_put_replaces_the_whole_config(world: World) -> None:
    engine = await world.open()
    made = await engine.put_topic("t", TopicConfig(ttl_ms=5, cap_records=7, priority=3))
    assert (made.created, made.config.durability, made.config.durable) == (True, Durability.DISK, False)
    same = await engine.put_topic("t", TopicConfig(ttl_ms=5, cap_records=7, priority=3))
    assert not same.created
    changed = await engine.put_topic("t", TopicConfig(durable=True))
    assert not changed.created
    config = engine.state("t").config
    assert (config.ttl_ms, config.cap_records, config.priority) == (0, 0, None)
    assert config.durability is Durability.FSYNC
    for stop in ("kill", "restart"):
        engine = await getattr(world, stop)()
        assert engine.state("t").config == config


async def test_a_fresh_topic_is_empty_and_starts_at_one(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    state = engine.state("t")
    assert (state.head_seq, state.earliest_seq, state.count, state.bytes) == (0, 1, 0, 0)
    assert (state.last_write_ms, state.last_read_ms) == (None, world.clock.now_ms())


async def test_a_topic_keeps_its_type(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    with pytest.raises(IncompatibleTopic) as caught:
        await engine.put_topic("t", TopicConfig(type="queue"))
    assert caught.value.detail == {"topic": "t", "existing_type": "log", "requested_type": "queue"}


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "x" * 256, "é", "."])
async def test_an_invalid_name_is_refused_for_a_new_topic(world: World, name: str) -> None:
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        await engine.put_topic(name, TopicConfig())
    with pytest.raises(TopicNotFound):
        engine.state(name)
    with pytest.raises(TopicNotFound):
        await engine.diff(name)
    assert not (await engine.remove_topic(name)).deleted


async def test_the_number_of_topics_is_limited(world: World) -> None:
    engine = await world.open(max_topics=2)
    calls = [engine.put_topic(name, FSYNC) for name in ("a", "b", "c")]
    outcomes = await gather_outcomes([asyncio.ensure_future(call) for call in calls])
    assert [isinstance(outcome, Throttled) for outcome in outcomes] == [False, False, True]
    with pytest.raises(Throttled) as caught:
        await engine.write("d", recs(1))
    assert caught.value.detail == {"limit": "max_topics", "max": 2}
    assert not (await engine.put_topic("a", TopicConfig())).created
    await engine.remove_topic("a")
    assert (await engine.put_topic("c", FSYNC)).created


async def test_topics_are_listed_by_name_in_pages(world: World) -> None:
    engine = await world.open()
    for name in ("b", "a:2", "a:1", "C", "a:3"):
        await engine.put_topic(name, FSYNC)
    names = lambda found: [state.topic for state in found]  # noqa: E731
    assert names(engine.topics()[0]) == ["C", "a:1", "a:2", "a:3", "b"]
    page, after = engine.topics(prefix="a:", limit=2)
    assert (names(page), after) == (["a:1", "a:2"], "a:2")
    page, after = engine.topics(prefix="a:", limit=2, after="a:2")
    assert (names(page), after) == (["a:3"], None)
    page, after = engine.topics(limit=2, allowed=lambda name: name in ("C", "b"))
    assert (names(page), after) == (["C", "b"], None)
    engine = await world.kill()
    assert names(engine.topics()[0]) == ["C", "a:1", "a:2", "a:3", "b"]


# ---- deleting a topic --------------------------------------------------------------------------------


async def test_a_recreated_topic_is_a_new_topic(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    old_id = engine._catalog.get("t").id
    assert (await engine.remove_topic("t")).deleted
    assert not (await engine.remove_topic("t")).deleted
    assert not engine.exists("t")
    assert (await engine.write("t", recs("new"))).first_seq == 1
    assert engine._catalog.get("t").id > old_id
    page = await engine.diff("t", 3)
    assert page.tombstone is not None
    assert (page.tombstone.reason, seqs(page)) == ("recreated", [1])
    for stop in ("kill", "restart", "kill"):
        engine = await getattr(world, stop)()
        assert await read_all(engine, "t") == {1: "new"}
        assert engine.problems == []


async def test_the_files_of_a_deleted_topic_are_removed_and_its_id_is_never_reused(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.checkpoint()
    assert any(name.startswith("topics/") for name in world.files())
    await engine.remove_topic("t")
    await settle()
    assert not any(name.startswith("topics/") for name in world.files())
    engine = await world.restart()
    engine = await world.restart()
    await engine.put_topic("u", FSYNC)
    assert engine._catalog.get("u").id == 2


async def test_files_that_a_crash_left_of_a_deleted_topic_are_removed_at_the_next_start(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.checkpoint()
    world.workers.hold()
    await engine.remove_topic("t")
    engine = await world.kill()
    assert not engine.exists("t")
    assert engine.problems == []
    assert not any(name.startswith("topics/") for name in world.files())


async def test_a_topic_deleted_after_a_snapshot_is_not_damage(world: World) -> None:
    """1. a snapshot names its segments; 2. it is deleted with its files; 3. the process is killed."""
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.checkpoint()
    await engine.remove_topic("t")
    await settle()
    engine = await world.crash()
    assert (engine.problems, engine.exists("t")) == ([], False)


async def test_a_topic_with_records_is_kept_with_if_empty(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    with pytest.raises(TopicNotEmpty) as caught:
        await engine.remove_topic("t", if_empty=True)
    assert caught.value.detail == {"topic": "t", "count": 1}
    await engine.delete("t", before_seq=2)
    world.committers.hold()
    write = asyncio.create_task(engine.write("t", recs(2)))
    await settle()
    with pytest.raises(TopicNotEmpty):
        await engine.remove_topic("t", if_empty=True)
    world.committers.release()
    await write
    await engine.delete("t", before_seq=3)
    assert (await engine.remove_topic("t", if_empty=True)).deleted


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_topic_that_is_created_during_a_checkpoint_is_not_lost(world: World, when: str) -> None:
    """1. its id is assigned; 2. a snapshot is taken; 3. its creation is committed; 4. a crash."""
    engine = await world.open()
    await engine.put_topic("other", FSYNC)
    world.committers.hold()
    creating = asyncio.create_task(engine.write("t", recs(1), config=FSYNC))
    await settle()
    world.workers.hold()
    checkpoint = asyncio.create_task(engine.checkpoint())
    await settle()
    if when == "before":
        world.committers.release()
        await creating
    world.workers.release()
    await checkpoint
    world.committers.release()
    await creating
    engine = await world.crash()
    assert await read_all(engine, "t") == {1: 1}
    assert (await engine.put_topic("new", FSYNC)).created
    assert len({topic.id for topic in engine._catalog.all()}) == 3


async def test_a_topic_deleted_during_a_checkpoint_stays_deleted(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    world.workers.hold()
    checkpoint = asyncio.create_task(engine.checkpoint())
    await settle()
    await engine.remove_topic("t")
    await engine.write("t", recs("new"), config=FSYNC)
    world.workers.release()
    await checkpoint
    await settle()
    for stop in ("crash", "kill", "restart"):
        engine = await getattr(world, stop)()
        assert await read_all(engine, "t") == {1: "new"}
        assert engine.problems == []
        await engine.checkpoint()


@pytest.mark.parametrize("seed", range(6))
async def test_racing_creates_writes_and_deletes_leave_dense_sequences(world: World, seed: int) -> None:
    """In any order, each instance of the topic has its acknowledged writes at 1, 2, 3, ..."""
    rng, capped = random.Random(seed), TopicConfig(cap_records=100, durable=True)
    engine = await world.open()
    world.committers.hold()
    calls: list[asyncio.Future[object]] = []
    for n in range(40):
        call = rng.choice(
            [
                lambda n=n: engine.write("t", recs(n), config=FSYNC),
                lambda n=n: engine.write("t", recs(n), config=FSYNC, idempotency_key=f"k{n % 3}"),
                lambda: engine.put_topic("t", rng.choice([FSYNC, capped])),
                lambda: engine.remove_topic("t"),
                lambda: engine.delete("t", before_seq=2),
            ]
        )
        calls.append(asyncio.ensure_future(call()))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            world.committers.release()
            world.committers.hold()
    world.committers.release()
    outcomes = await gather_outcomes(calls)
    assert all(not isinstance(one, Exception) or isinstance(one, PenstockError) for one in outcomes)
    await engine.write("t", recs("end"))
    head = engine.state("t").head_seq
    found = await read_all(engine, "t")
    assert max(found) == head
    assert sorted(found) == list(range(min(found), head + 1))
    engine = await world.crash()
    assert await read_all(engine, "t") == found


async def test_a_recreated_topic_wakes_no_reader_with_old_records(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs("old"), config=FSYNC)
    await engine.remove_topic("t")
    await engine.put_topic("t", FSYNC)
    assert values(await engine.diff("t")) == []
