"""Jobs that reached their delivery limit: they become dead letters, and none is lost."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from tests.unit.topics.engine_doubles import World, read_all, rec, recs, seqs, settle

from penstock.testing.disk import Survival
from penstock.topics import Durability, Engine, TopicConfig
from penstock.topics.queues.dead_letters import letter_meta


def queue(**fields: object) -> TopicConfig:
    return TopicConfig(type="queue", lease_ms=1000, **{"max_deliveries": 1, "dead_letter": "dead"} | fields)  # type: ignore[arg-type]


def counts(engine: Engine) -> tuple[int, int, int]:
    found = engine.state("q").queue
    assert found is not None
    return found.ready, found.in_flight, found.dead_lettered


@pytest.fixture
def world() -> World:
    return World()


async def spent(world: World, jobs: int = 1, **fields: object) -> Engine:
    """Return a queue whose jobs had their last delivery and were returned."""
    engine = await world.open()
    await engine.put_topic("q", queue(**fields))
    await engine.write("q", [rec({"n": n}, tag="t", node="n", meta={"m": n}) for n in range(1, jobs + 1)])
    for _ in range(queue(**fields).max_deliveries):
        await engine.claim("q", "w", max=1000)
        await engine.nack("q", "w", list(range(1, jobs + 1)))
    return engine


async def test_the_letter_contains_the_job_and_its_origin(world: World) -> None:
    engine = await spent(world, max_deliveries=3)
    assert (await engine.claim("q", "w")).seqs == []
    assert counts(engine) == (0, 0, 1)
    (record,) = (await engine.diff("dead", include_tags=True)).records()
    assert (bytes(record.data), record.tag, record.node) == (b'{"n":1}', "t", "n")
    assert record.meta is not None
    assert json.loads(bytes(record.meta)) == {
        "m": 1,
        "$dead_letter_from": "q",
        "$dead_letter_deliveries": "3",
        "$dead_letter_src_seq": "1",
    }
    assert engine.state("dead").config.type == "log"


async def test_a_claim_gets_the_jobs_after_the_dead_ones(world: World) -> None:
    engine = await spent(world, 3)
    await engine.write("q", recs(4, 5))
    assert (await engine.claim("q", "w", max=2)).seqs == [4, 5]
    assert counts(engine) == (0, 2, 3)
    assert sorted(await read_all(engine, "dead")) == [1, 2, 3]


@pytest.mark.parametrize("fields", [{"dead_letter": None}, {"max_deliveries": 0}])
async def test_without_a_dead_letter_topic_or_a_limit_redelivery_never_stops(
    world: World, fields: dict[str, object]
) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue(**fields))
    await engine.write("q", recs(1))
    for delivery in range(1, 6):
        (job,) = (await engine.claim("q", "w")).jobs()
        assert job.deliveries == delivery
        await engine.nack("q", "w", [1])


async def test_an_expired_lease_counts_as_a_delivery(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue())
    await engine.write("q", recs(1))
    await engine.claim("q", "w")
    await world.clock.advance(1.001)
    assert (await engine.claim("q", "w")).seqs == []
    assert counts(engine) == (0, 0, 1)


async def test_a_refused_letter_leaves_the_job_in_the_queue(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("dead", TopicConfig(discard="reject", cap_records=1))
    await engine.write("dead", recs("full"))
    await engine.close()
    engine = await spent(world, 2)
    assert (await engine.claim("q", "w", max=5)).seqs == []
    assert counts(engine) == (2, 0, 0)
    await engine.write("q", recs(3, 4))
    assert (await engine.claim("q", "w")).seqs == [3]  # other jobs are not blocked
    assert (await engine.claim("q", "w")).seqs == [4]
    assert counts(engine) == (2, 2, 0)
    await engine.put_topic("dead", TopicConfig())
    assert (await engine.claim("q", "w")).seqs == []
    assert counts(engine) == (0, 2, 2)
    assert sorted(await read_all(engine, "dead")) == [1, 2, 3]


async def test_stuck_jobs_are_delivered_when_the_limit_is_removed(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("dead", TopicConfig(discard="reject", cap_records=1))
    await engine.write("dead", recs("full"))
    await engine.close()
    engine = await spent(world, 2)
    assert (await engine.claim("q", "w", max=5)).seqs == []
    await engine.put_topic("q", queue(dead_letter=None))
    assert [job.deliveries for job in (await engine.claim("q", "w", max=5)).jobs()] == [2, 2]


async def test_the_move_continues_without_the_claimer(world: World) -> None:
    engine = await spent(world)
    world.committers.hold()
    claiming = asyncio.ensure_future(engine.claim("q", "w"))
    await settle()
    assert counts(engine) == (0, 0, 0)
    claiming.cancel()
    for _ in range(4):
        world.committers.release()
        await settle()
    assert counts(engine) == (0, 0, 1)
    assert len(await read_all(engine, "dead")) == 1


@pytest.mark.parametrize("commits", range(6))
@pytest.mark.parametrize("letters", [Durability.DISK, Durability.FSYNC])
async def test_after_a_power_failure_at_any_point_the_job_is_in_the_queue_or_the_dead_letters(
    commits: int, letters: Durability
) -> None:
    world = World(wal_shards=2)
    engine = await spent(world, durable=True)
    for _ in range(10):  # in another log with reserved sequences, so nothing else syncs the letter
        await engine.put_topic("dead", TopicConfig(durability=letters))
        if engine._catalog.get("dead").shard is not engine._catalog.get("q").shard:
            break
        await engine.remove_topic("dead")
    await engine.write("dead", recs("earlier"))
    world.committers.tend()
    world.committers.hold()
    claiming = asyncio.ensure_future(engine.claim("q", "w"))
    for _ in range(commits):
        await settle()
        for committer in world.committers.all:
            committer.commit()
    engine = await world.crash(Survival.NOTHING)
    claiming.cancel()
    await settle()
    left, dead = seqs(await engine.diff("q")), seqs(await engine.diff("dead"))
    assert left == [1] or dead == [1, 2]
    assert counts(engine)[2] == (not left)


@pytest.mark.parametrize(
    ("meta", "kept"),
    [
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ({str(n): n for n in range(61)}, {str(n): n for n in range(61)}),
        ({str(n): n for n in range(62)}, {"$dead_letter_meta": {str(n): n for n in range(62)}}),
        ([1, 2], {"$dead_letter_meta": [1, 2]}),
        ("text", {"$dead_letter_meta": "text"}),
        ({"$dead_letter_from": "earlier", "b": 2}, {"b": 2}),
    ],
)
def test_meta_without_room_for_the_origin_is_wrapped(meta: object, kept: dict[str, object]) -> None:
    raw = None if meta is None else msgspec.Raw(json.dumps(meta).encode())
    told = json.loads(bytes(letter_meta(raw, "q", 2, 7)))
    assert told == {
        **kept,
        "$dead_letter_from": "q",
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "7",
    }
