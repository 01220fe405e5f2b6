"""Queues on an engine: which worker gets which job, for how long, and with what result."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.topics.engine_doubles import World, read_all, rec, recs, seqs, settle

from penstock.testing.disk import DiskFault, PlannedFault
from penstock.topics import (
    BatchTooLarge,
    CommitFailed,
    Damaged,
    Engine,
    InvalidRequest,
    NotAQueue,
    ShuttingDown,
    TopicConfig,
    TopicNotFound,
)
from penstock.topics.model import ClaimResult
from penstock.topics.segments.columns import DAMAGED

QUEUE = TopicConfig(type="queue", lease_ms=1000)


def taken(result: ClaimResult) -> list[int]:
    return [job.seq for job in result.jobs()]


def counts(engine: Engine, name: str = "q") -> tuple[int, int, int]:
    queue = engine.state(name).queue
    assert queue is not None
    return queue.ready, queue.in_flight, queue.dead_lettered


@pytest.fixture
def world() -> World:
    return World()


async def opened(world: World, jobs: int = 3, config: TopicConfig = QUEUE) -> Engine:
    engine = await world.open()
    await engine.put_topic("q", config)
    if jobs:
        await engine.write("q", recs(*range(1, jobs + 1)))
    return engine


async def test_a_claim_returns_the_oldest_jobs_with_all_their_fields(world: World) -> None:
    engine = await opened(world, 0)
    await engine.write("q", [rec({"a": 1}, tag="t", node="n", meta={"m": 2}), rec(None), rec("x")])
    result = await engine.claim("q", "w", max=2)
    first, second = result.jobs()
    now_ms = world.clock.now_ms()
    assert json.loads(result.fragments[0]) == {
        "$seq": 1,
        "$ts": now_ms,
        "$tag": "t",
        "lease_id": "lease_1",
        "deadline": now_ms + 1000,
        "deliveries": 1,
        "data": {"a": 1},
        "meta": {"m": 2},
    }
    assert (first.seq, second.seq, second.lease_id, second.tag, second.meta) == (1, 2, "lease_2", None, None)
    assert bytes(second.data) == b"null"
    assert result.ready == 1
    assert counts(engine) == (1, 2, 0)


async def test_no_other_worker_gets_a_leased_job(world: World) -> None:
    engine = await opened(world)
    assert taken(await engine.claim("q", "a", max=2)) == [1, 2]
    assert taken(await engine.claim("q", "b", max=5)) == [3]
    assert taken(await engine.claim("q", "c", max=5)) == []


async def test_an_ack_permanently_deletes_only_jobs_that_the_node_holds(world: World) -> None:
    engine = await opened(world)
    await engine.claim("q", "a", max=2)
    result = await engine.ack("q", "b", [1])
    assert (result.acked, result.skipped, result.in_flight) == (0, [1], 2)
    result = await engine.ack("q", "a", [1, 3, 1, 99])
    assert (result.acked, result.skipped, result.ready, result.in_flight) == (1, [3, 1, 99], 1, 1)
    assert (await engine.ack("q", "a", [1])).acked == 0
    assert seqs(await engine.diff("q")) == [2, 3]
    for stop in ("kill", "restart"):
        engine = await getattr(world, stop)()
        assert seqs(await engine.diff("q")) == [2, 3]
        assert counts(engine) == (2, 0, 0)


async def test_an_empty_ack_is_valid(world: World) -> None:
    engine = await opened(world)
    result = await engine.ack("q", "a", [])
    assert (result.acked, result.skipped, result.ready, result.in_flight) == (0, [], 3, 0)


async def test_a_stale_lease_id_acks_nothing(world: World) -> None:
    engine = await opened(world, 1)
    (stale,) = (await engine.claim("q", "w")).jobs()
    await world.clock.advance(1.001)
    (current,) = (await engine.claim("q", "w")).jobs()
    assert (current.lease_id, current.deliveries) == ("lease_2", 2)
    assert (await engine.ack("q", "w", [1], [stale.lease_id])).skipped == [1]
    assert (await engine.nack("q", "w", [1], [stale.lease_id])).skipped == [1]
    assert (await engine.extend("q", "w", [1], [stale.lease_id], lease_ms=500)).skipped == [1]
    assert (await engine.ack("q", "w", [1], [current.lease_id])).acked == 1


@pytest.mark.parametrize("fence", ["", "lease_1"])
async def test_an_empty_lease_id_accepts_any_lease(world: World, fence: str) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "w")
    assert (await engine.ack("q", "w", [1], [fence])).acked == 1


async def test_a_lease_includes_its_last_millisecond(world: World) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "a")
    await world.clock.advance(1.0)
    assert counts(engine) == (0, 1, 0)
    assert taken(await engine.claim("q", "b")) == []
    await world.clock.advance(0.001)
    assert counts(engine) == (1, 0, 0)
    assert (await engine.ack("q", "a", [1])).skipped == [1]
    assert taken(await engine.claim("q", "b")) == [1]


async def test_returned_jobs_are_delivered_before_fresh_ones_lowest_first(world: World) -> None:
    engine = await opened(world, 5)
    await engine.claim("q", "a", max=3)
    await engine.nack("q", "a", [3])
    await engine.nack("q", "a", [1])
    assert taken(await engine.claim("q", "b", max=1)) == [1]
    assert taken(await engine.claim("q", "b", max=3)) == [3, 4, 5]


async def test_a_job_nacked_with_a_delay_is_ready_after_it(world: World) -> None:
    engine = await opened(world, 2)
    await engine.claim("q", "a", max=2)
    result = await engine.nack("q", "a", [2], delay_ms=500)
    assert (result.nacked, result.ready, result.in_flight) == (1, 0, 1)
    assert counts(engine) == (0, 1, 0)
    await world.clock.advance(0.499)
    assert taken(await engine.claim("q", "b")) == []
    await world.clock.advance(0.001)
    assert counts(engine) == (1, 1, 0)
    assert [job.deliveries for job in (await engine.claim("q", "b")).jobs()] == [2]


async def test_extending_sets_the_end_and_keeps_the_lease(world: World) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "a")
    start_ms = world.clock.now_ms()
    await world.clock.advance(0.5)
    result = await engine.extend("q", "a", [1, 2, 1], lease_ms=2000)
    assert (result.deadlines_ms, result.skipped) == ({1: start_ms + 2500}, [2, 1])
    await world.clock.advance(2.0)
    assert taken(await engine.claim("q", "b")) == []
    shorter = await engine.extend("q", "a", [1], ["lease_1"], lease_ms=1)
    assert shorter.deadlines_ms == {1: start_ms + 2600}
    await world.clock.advance(0.101)
    assert taken(await engine.claim("q", "b")) == [1]


@pytest.mark.parametrize(
    ("asked", "given"), [(None, 1000), (0, 100), (1, 100), (5000, 5000), (10**12, 86_400_000)]
)
async def test_leases_have_the_requested_length_within_the_limits(
    world: World, asked: int | None, given: int
) -> None:
    engine = await opened(world, 1)
    (job,) = (await engine.claim("q", "a", lease_ms=asked)).jobs()
    assert job.deadline_ms - world.clock.now_ms() == given


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (1000, 1000), (5000, 1000)])
async def test_a_claim_takes_one_to_a_thousand_jobs(world: World, asked: int, given: int) -> None:
    engine = await opened(world, 1200)
    result = await engine.claim("q", "a", max=asked)
    assert taken(result) == list(range(1, given + 1))
    assert result.ready == 1200 - given


async def test_deleted_evicted_and_expired_jobs_have_no_holder(world: World) -> None:
    engine = await opened(world, 4)
    await engine.claim("q", "a", max=3)
    await engine.nack("q", "a", [2])
    await engine.delete("q", before_seq=3)
    assert counts(engine) == (1, 1, 0)
    assert (await engine.ack("q", "a", [1])).skipped == [1]
    await engine.put_topic("q", TopicConfig(type="queue", cap_records=1))
    assert counts(engine) == (1, 0, 0)
    assert taken(await engine.claim("q", "b", max=9)) == [4]
    await engine.put_topic("q", TopicConfig(type="queue", ttl_ms=10))
    await world.clock.advance(0.011)
    assert counts(engine) == (0, 0, 0)
    assert (await engine.ack("q", "b", [4])).skipped == [4]


@pytest.mark.parametrize("where", ["log", "segments", "memory"])
async def test_jobs_are_the_same_in_every_tier(world: World, where: str) -> None:
    engine = await world.open(segment_max_events=4)
    config = TopicConfig(type="queue", durability="ephemeral" if where == "memory" else "disk")  # type: ignore[arg-type]
    await engine.put_topic("q", config)
    await engine.write("q", [rec(n, tag=f"t{n}", node="n", meta={"n": n}) for n in range(1, 31)])
    if where == "segments":
        await engine.checkpoint()
    jobs = (await engine.claim("q", "w", max=20)).jobs()
    assert [(job.seq, job.tag, bytes(job.data)) for job in jobs] == [
        (n, f"t{n}", b"%d" % n) for n in range(1, 21)
    ]
    assert (await engine.ack("q", "w", list(range(1, 20)))).acked == 19
    await engine.write("q", recs(31))
    assert counts(engine) == (11, 1, 0)
    assert sorted(await read_all(engine, "q")) == list(range(20, 32))
    assert taken(await engine.claim("q", "w", max=5)) == [21, 22, 23, 24, 25]


async def test_jobs_in_a_cold_segment_are_delivered_too() -> None:
    world = World(cold_dir="/cold", segment_max_events=4, hot_retain_segments=0)
    engine = await opened(world, 8)
    await engine.checkpoint()
    await engine.checkpoint()
    assert taken(await engine.claim("q", "w", max=6)) == [1, 2, 3, 4, 5, 6]


async def test_the_topic_has_to_be_a_queue(world: World) -> None:
    engine = await world.open()
    await engine.write("log", recs(1))
    for name, error in (("log", NotAQueue), ("none", TopicNotFound)):
        for call in (
            engine.claim(name, ""),
            engine.ack(name, "w", [1]),
            engine.nack(name, "w", [1]),
            engine.extend(name, "w", [1], lease_ms=1),
            engine.work(name, "w"),
        ):
            with pytest.raises(error):
                await call
    assert engine.state("log").queue is None


@pytest.mark.parametrize("node", ["", "n" * 129, "é" * 65, "\ud800"])
async def test_a_worker_needs_a_name(world: World, node: str) -> None:
    engine = await opened(world)
    for call in (
        engine.claim("q", node),
        engine.ack("none", node, []),
        engine.nack("none", node, []),
        engine.extend("none", node, [], lease_ms=1),
        engine.work("none", node),
    ):
        with pytest.raises(InvalidRequest):
            await call


@pytest.mark.parametrize(
    "token", ["1", "lease_", "lease_G", "lease_0", "lease_1A", "LEASE_1", "lease_" + "f" * 17]
)
async def test_a_malformed_lease_id_is_refused_before_anything_else(world: World, token: str) -> None:
    engine = await opened(world)
    with pytest.raises(InvalidRequest, match="lease id"):
        await engine.ack("none", "", [1] * 2000, [token])


async def test_there_is_one_lease_id_per_job_and_at_most_a_thousand_jobs(world: World) -> None:
    engine = await opened(world)
    with pytest.raises(InvalidRequest, match="lease_ids"):
        await engine.nack("none", "w", [1, 2], ["lease_1"])
    with pytest.raises(BatchTooLarge) as refused:
        await engine.extend("none", "w", [1] * 1001, lease_ms=1)
    assert refused.value.detail == {"seqs": 1001, "max": 1000}
    with pytest.raises(TopicNotFound):
        await engine.ack("none", "w", [1] * 1000, [""] * 1000)


async def test_a_job_whose_ack_is_being_committed_is_not_delivered(world: World) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "a")
    world.committers.hold()
    acking = asyncio.ensure_future(engine.ack("q", "a", [1]))
    await settle()
    await world.clock.advance(5.0)
    assert counts(engine) == (0, 1, 0)
    assert (await engine.nack("q", "a", [1])).skipped == [1]
    assert taken(await engine.claim("q", "b")) == []
    world.committers.release()
    assert (await acking).acked == 1
    assert counts(engine) == (0, 0, 0)


async def test_an_ack_whose_commit_fails_leaves_the_lease_as_it_was(world: World) -> None:
    engine = await opened(world, 2, TopicConfig(type="queue", lease_ms=1000, durable=True))
    await engine.claim("q", "a", max=2)
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ALWAYS)
    with pytest.raises(CommitFailed):
        await engine.ack("q", "a", [1])
    await settle()
    world.disk.plan = None
    assert counts(engine) == (0, 2, 0)
    assert (await engine.ack("q", "a", [1], ["lease_1"])).acked == 1
    assert seqs(await engine.diff("q")) == [2]


async def test_an_ack_continues_without_its_caller(world: World) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "a")
    world.committers.hold()
    acking = asyncio.ensure_future(engine.ack("q", "a", [1]))
    await settle()
    acking.cancel()
    world.committers.release()
    await settle()
    assert counts(engine) == (0, 0, 0)


async def test_an_fsync_ack_survives_a_power_cut(world: World) -> None:
    engine = await opened(world, 3, TopicConfig(type="queue", durable=True))
    await engine.claim("q", "a", max=2)
    await engine.ack("q", "a", [2])
    engine = await world.crash()
    assert seqs(await engine.diff("q")) == [1, 3]
    assert counts(engine) == (2, 0, 0)


async def test_a_recreated_queue_starts_over(world: World) -> None:
    engine = await opened(world, 2)
    await engine.claim("q", "a")
    await engine.remove_topic("q")
    await engine.put_topic("q", QUEUE)
    assert counts(engine) == (0, 0, 0)
    await engine.write("q", recs(1))
    (job,) = (await engine.claim("q", "a")).jobs()
    assert (job.seq, job.lease_id, job.deliveries) == (1, "lease_1", 1)


async def test_a_claim_whose_queue_is_deleted_meanwhile_fails(world: World) -> None:
    engine = await opened(world, 1)
    world.committers.hold()
    claiming = asyncio.ensure_future(engine.claim("q", "a"))  # waits for its lease number
    await settle()
    removing = asyncio.ensure_future(engine.remove_topic("q"))
    await settle()
    world.committers.release()
    assert (await removing).deleted
    with pytest.raises(TopicNotFound):
        await claiming


async def test_an_unreadable_job_does_not_block_the_others(world: World) -> None:
    engine = await opened(world, 3)
    topic = engine._catalog.get("q")
    topic.log.index.runs[0].mark(0, DAMAGED)
    assert taken(await engine.claim("q", "w", max=2)) == [2]
    assert counts(engine) == (1, 1, 0)
    assert taken(await engine.claim("q", "w", max=2)) == [3]
    await world.clock.advance(1.0)
    with pytest.raises(Damaged, match="jobs 1 to 1") as told:
        await engine.claim("q", "w")
    assert told.value.detail == {"topic": "q", "first_seq": 1, "last_seq": 1}


async def test_a_closed_engine_delivers_no_jobs(world: World) -> None:
    engine = await opened(world, 1)
    await engine.close()
    with pytest.raises(ShuttingDown):
        await engine.claim("q", "a")
