"""The state of a queue after a stop, a crash and a checkpoint: leases, deliveries, numbers."""

from __future__ import annotations

import pytest
from tests.unit.topics.engine_doubles import World, recs, seqs, settle

from penstock.testing.disk import DiskFault, PlannedFault, Survival
from penstock.topics import CommitFailed, Durability, Engine, TopicConfig
from penstock.topics.model import ClaimedJob

STOPS = ["restart", "kill", "crash"]


def queue(**fields: object) -> TopicConfig:
    return TopicConfig(type="queue", lease_ms=10_000, durable=True, **fields)  # type: ignore[arg-type]


def counts(engine: Engine) -> tuple[int, int, int]:
    found = engine.state("q").queue
    assert found is not None
    return found.ready, found.in_flight, found.dead_lettered


async def claimed(engine: Engine, node: str = "w", most: int = 100) -> list[ClaimedJob]:
    return (await engine.claim("q", node, max=most)).jobs()


@pytest.fixture
def world() -> World:
    return World()


async def opened(world: World, jobs: int = 3, **fields: object) -> Engine:
    engine = await world.open()
    await engine.put_topic("q", queue(**fields))
    if jobs:
        await engine.write("q", recs(*range(1, jobs + 1)))
    return engine


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("checkpointed", [False, True])
async def test_without_durable_leases_every_job_is_claimable_and_its_deliveries_are_those_of_the_snapshot(
    world: World, stop: str, checkpointed: bool
) -> None:
    """A clean stop also takes a snapshot."""
    engine = await opened(world)
    await engine.checkpoint()
    await claimed(engine, most=2)
    await engine.nack("q", "w", [2], delay_ms=5000)
    if checkpointed:
        await engine.checkpoint()
    engine = await getattr(world, stop)()
    assert counts(engine) == (3, 0, 0)
    again = 2 if checkpointed or stop == "restart" else 1
    assert [(job.seq, job.deliveries) for job in await claimed(engine)] == [(1, again), (2, again), (3, 1)]


@pytest.mark.parametrize("leases_durable", [False, True])
async def test_the_delivery_limit_holds_across_any_restarts(world: World, leases_durable: bool) -> None:
    engine = await opened(world, 1, leases_durable=leases_durable, max_deliveries=3, dead_letter="dead")
    for delivery in (1, 2, 3):
        (job,) = await claimed(engine)
        assert job.deliveries == delivery
        engine = await world.restart()
        await world.clock.advance(10.001)
    assert await claimed(engine) == []
    assert counts(engine) == (0, 0, 1)


@pytest.mark.parametrize("stop", STOPS)
async def test_a_claim_after_a_checkpoint_is_in_the_next_snapshot(world: World, stop: str) -> None:
    engine = await opened(world, 1)
    await claimed(engine)
    await engine.nack("q", "w", [1])
    await engine.checkpoint()
    await claimed(engine)
    await engine.checkpoint()
    engine = await getattr(world, stop)()
    assert [job.deliveries for job in await claimed(engine)] == [3]


async def test_a_snapshot_stores_the_deliveries_of_existing_jobs_only(world: World) -> None:
    engine = await opened(world, 5)
    await claimed(engine, most=4)
    await engine.ack("q", "w", [1])
    await engine.delete("q", before_seq=3)
    engine.state("q")
    queue = engine._catalog.get("q").queue
    assert queue is not None
    entry = queue.entry()
    assert entry is not None
    assert [(job.seq, job.deliveries, job.lease_id, job.node) for job in entry.jobs] == [
        (3, 1, 0, ""),
        (4, 1, 0, ""),
    ]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("leases_durable", [False, True])
async def test_a_lease_number_is_never_reused(world: World, stop: str, leases_durable: bool) -> None:
    engine = await opened(world, 1, leases_durable=leases_durable)
    seen: set[str] = set()
    for _ in range(3):
        for _ in range(3):
            await world.clock.advance(10.001)
            (job,) = await claimed(engine)
            assert job.lease_id not in seen
            seen.add(job.lease_id)
        engine = await getattr(world, stop)()
        await world.clock.advance(10.001)
        for stale in seen:
            assert (await engine.ack("q", "w", [1], [stale])).skipped == [1]


async def test_more_numbers_are_reserved_before_they_run_out(world: World) -> None:
    engine = await opened(world, 1)
    await claimed(engine)
    queue = engine._catalog.get("q").queue
    assert queue is not None
    table = queue.leases
    for _ in range(5):
        await settle()
        table.next_lease_id = table.reserved_lease_id - 1
        await engine.nack("q", "w", [1])
        (job,) = await claimed(engine)
        engine = await world.crash()
        table = engine._catalog.get("q").queue.leases
        assert table is not None
        assert table.next_lease_id > int(job.lease_id.removeprefix("lease_"), 16)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("checkpoints", [0, 1, 2])
async def test_durable_leases_outlive_the_process(world: World, stop: str, checkpoints: int) -> None:
    engine = await opened(world, 6, leases_durable=True)
    jobs = await claimed(engine, most=5)
    if checkpoints:
        await engine.checkpoint()
    await engine.ack("q", "w", [1])
    await engine.nack("q", "w", [2])
    await engine.nack("q", "w", [3], delay_ms=4000)
    extended = await engine.extend("q", "w", [4], lease_ms=20_000)
    if checkpoints > 1:
        await engine.checkpoint()
        await engine.checkpoint()
    engine = await getattr(world, stop)()
    assert engine.problems == []
    assert counts(engine) == (2, 2, 0)
    assert [(job.seq, job.deliveries) for job in await claimed(engine, "v")] == [(2, 2), (6, 1)]
    assert (await engine.ack("q", "w", [5], [jobs[4].lease_id])).acked == 1
    await world.clock.advance(4.0)
    assert [(job.seq, job.deliveries) for job in await claimed(engine, "v")] == [(3, 2)]
    assert extended.deadlines_ms[4] > world.clock.now_ms()
    assert (await engine.ack("q", "w", [4], [jobs[3].lease_id])).acked == 1
    await world.clock.advance(30.0)
    assert [job.seq for job in await claimed(engine, "v")] == [2, 3, 6]


async def test_a_durable_lease_ends_on_time_after_a_crash(world: World) -> None:
    engine = await opened(world, 1, leases_durable=True)
    (job,) = await claimed(engine)
    engine = await world.crash()
    assert await claimed(engine, "v") == []
    await world.clock.advance(10.001)
    assert (await engine.ack("q", "w", [1], [job.lease_id])).acked == 0
    assert [job.deliveries for job in await claimed(engine, "v")] == [2]


async def test_a_queue_without_durable_leases_starts_without_them(world: World) -> None:
    engine = await opened(world, 2, leases_durable=True)
    await claimed(engine)
    await engine.checkpoint()
    await engine.put_topic("q", queue())
    assert counts(engine) == (0, 2, 0)
    engine = await world.crash()
    assert [job.deliveries for job in await claimed(engine)] == [2, 2]


async def test_a_durable_claim_that_cannot_be_logged_delivers_nothing(world: World) -> None:
    engine = await opened(world, 2, leases_durable=True)
    await claimed(engine, most=1)
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ALWAYS)
    with pytest.raises(CommitFailed):
        await claimed(engine, "v")
    await settle()
    world.disk.plan = None
    assert counts(engine) == (1, 1, 0)
    assert [job.seq for job in await claimed(engine, "v")] == [2]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("leases_durable", [False, True])
async def test_dead_letters_are_counted_exactly_while_the_queue_exists(
    world: World, stop: str, checkpointed: bool, leases_durable: bool
) -> None:
    engine = await opened(world, 6, leases_durable=leases_durable, max_deliveries=1, dead_letter="dead")
    total = 0
    for _ in range(2):
        assert len(await claimed(engine, most=2)) == 2
        assert (await engine.nack("q", "w", list(range(1, 7)))).nacked == 2
        (job,) = await claimed(engine, most=1)
        assert (await engine.ack("q", "w", [job.seq])).acked == 1
        total += 2
        assert counts(engine)[2] == total
        if checkpointed:
            await engine.checkpoint()
        engine = await getattr(world, stop)()
        assert counts(engine)[2] == total
        await world.clock.advance(10.001)
        assert engine.state("dead").count == total


async def test_a_disk_queue_that_loses_its_tail_delivers_the_job_again(world: World) -> None:
    engine = await world.open()
    config = TopicConfig(type="queue", durability=Durability.DISK)
    await engine.put_topic("q", config)
    await engine.write("q", recs(1, 2))
    world.committers.tend()
    await claimed(engine)
    await engine.ack("q", "w", [1])
    engine = await world.crash(Survival.NOTHING)
    assert seqs(await engine.diff("q")) == [1, 2]
    assert len(await claimed(engine)) == 2
    await engine.ack("q", "w", [1])
    engine = await world.kill()
    assert seqs(await engine.diff("q")) == [2]
