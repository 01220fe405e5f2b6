"""Steps of the wall clock change the timestamps of a topic and nothing else."""

from __future__ import annotations

import pytest
from tests.unit.topics.engine_doubles import World, recs, seqs
from tests.unit.topics.topic.test_leases import jobs

from penstock.topics import Engine, TopicConfig
from penstock.topics.topic.leases import JobState, LeaseTable
from penstock.topics.topic.retention import Ages

HOUR_MS = 3_600_000
STEPS = [-HOUR_MS, HOUR_MS]
TTL = TopicConfig(durable=True, ttl_ms=600_000)


def queue(**fields: object) -> TopicConfig:
    return TopicConfig(type="queue", lease_ms=10_000, durable=True, **fields)  # type: ignore[arg-type]


async def claimed(engine: Engine) -> list[int]:
    return (await engine.claim("q", "w", max=100)).seqs


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("step_ms", STEPS)
async def test_a_lease_ends_after_its_length_whatever_the_wall_clock_says(world: World, step_ms: int) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue())
    await engine.write("q", recs(1, 2))
    assert await claimed(engine) == [1, 2]
    world.clock.jump_wall(step_ms)
    await world.clock.advance(9.9)
    assert await claimed(engine) == []
    await world.clock.advance(0.2)
    assert await claimed(engine) == [1, 2]


@pytest.mark.parametrize("step_ms", STEPS)
async def test_deadlines_are_shown_in_the_wall_time_of_the_answer(world: World, step_ms: int) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue())
    await engine.write("q", recs(1))
    world.clock.jump_wall(step_ms)
    (job,) = (await engine.claim("q", "w")).jobs()
    assert job.deadline_ms == world.clock.now_ms() + 10_000
    extended = await engine.extend("q", "w", [1], lease_ms=5000)
    assert extended.deadlines_ms == {1: world.clock.now_ms() + 5000}


@pytest.mark.parametrize("step_ms", STEPS)
async def test_a_delay_after_a_nack_has_the_requested_length(world: World, step_ms: int) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue())
    await engine.write("q", recs(1))
    await claimed(engine)
    await engine.nack("q", "w", [1], delay_ms=5000)
    world.clock.jump_wall(step_ms)
    await world.clock.advance(4.9)
    assert await claimed(engine) == []
    await world.clock.advance(0.2)
    assert await claimed(engine) == [1]


@pytest.mark.parametrize("stop", ["restart", "kill", "crash"])
@pytest.mark.parametrize("delayed", [False, True])
async def test_a_restart_with_the_clock_set_back_extends_a_lease_by_at_most_its_own_length(
    world: World, stop: str, delayed: bool
) -> None:
    engine = await world.open()
    await engine.put_topic("q", queue(leases_durable=True))
    await engine.write("q", recs(1))
    await claimed(engine)
    if delayed:
        await engine.nack("q", "w", [1], delay_ms=10_000)
    world.clock.jump_wall(-HOUR_MS)
    engine = await getattr(world, stop)()
    await world.clock.advance(9.9)
    assert await claimed(engine) == []
    await world.clock.advance(0.2)
    assert await claimed(engine) == [1]


@pytest.mark.parametrize("stop", ["restart", "kill"])
@pytest.mark.parametrize("step_ms", STEPS)
async def test_a_lease_from_before_a_clock_step_is_stored_with_its_true_end(
    world: World, stop: str, step_ms: int
) -> None:
    """The clock is set, then the lease is stored. The next start finds the new wall time in it."""
    engine = await world.open()
    await engine.put_topic("q", queue(leases_durable=True))
    await engine.write("q", recs(1))
    world.clock.jump_wall(step_ms)
    await claimed(engine)
    await world.clock.advance(4.0)
    engine = await getattr(world, stop)()
    await world.clock.advance(5.9)
    assert await claimed(engine) == []
    await world.clock.advance(0.2)
    assert await claimed(engine) == [1]


def test_a_lease_of_an_older_snapshot_has_the_longest_length_there_is() -> None:
    table = LeaseTable()
    table.put(JobState(1, 1, 1, 10**15, "w"))
    table.settle(jobs(1), 0, with_leases=True)
    (job,) = table.entry(with_leases=True).jobs
    assert job.until_ms == 86_400_000


@pytest.mark.parametrize("step_ms", STEPS)
async def test_an_idempotency_key_is_known_for_its_window_whatever_the_wall_clock_says(
    world: World, step_ms: int
) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(idempotency_window_ms=60_000))
    await engine.write("t", recs(1), idempotency_key="k")
    world.clock.jump_wall(step_ms)
    await world.clock.advance(59.0)
    assert (await engine.write("t", recs(1), idempotency_key="k")).deduped
    await world.clock.advance(1.5)
    assert not (await engine.write("t", recs(1), idempotency_key="k")).deduped


@pytest.mark.parametrize("step_ms", STEPS)
async def test_a_record_lives_for_its_ttl_whatever_the_wall_clock_says(world: World, step_ms: int) -> None:
    engine = await world.open()
    await engine.put_topic("t", TTL)
    await engine.write("t", recs(1))
    await world.clock.advance(300.0)
    world.clock.jump_wall(step_ms)
    await engine.write("t", recs(2))
    await world.clock.advance(299.0)
    assert seqs(await engine.diff("t")) == [1, 2]
    await engine.write("t", recs(3))
    await world.clock.advance(2.0)
    assert seqs(await engine.diff("t")) == [2, 3]
    await world.clock.advance(310.0)
    assert seqs(await engine.diff("t")) == [3]
    await world.clock.advance(300.0)
    assert seqs(await engine.diff("t")) == []


async def test_after_a_restart_a_future_timestamp_counts_as_the_time_of_the_start(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TTL)
    await engine.write("t", recs(1))
    world.clock.jump_wall(-HOUR_MS)
    engine = await world.restart()
    await world.clock.advance(300.0)
    await engine.write("t", recs(2))
    await world.clock.advance(299.0)
    assert seqs(await engine.diff("t")) == [1, 2]
    await world.clock.advance(2.0)
    assert seqs(await engine.diff("t")) == [2]
    await world.clock.advance(320.0)
    assert seqs(await engine.diff("t")) == []


def test_the_parts_of_a_topic_whose_timestamps_stand_still_are_bounded() -> None:
    ages = Ages()
    for number in range(100_000):
        ages.stamped(number + 1, 10_000_000, number * 1000, ttl_ms=1000)
    assert len(ages._parts) <= 256


def test_reassigned_numbers_belong_to_the_part_of_their_last_timestamp() -> None:
    ages = Ages()
    ages.stamped(1, 0, 0, ttl_ms=1000)
    ages.stamped(11, HOUR_MS, 0, ttl_ms=1000)
    ages.stamped(5, HOUR_MS, 0, ttl_ms=1000)
    assert [part.end_seq for part in ages._parts] == [4]
