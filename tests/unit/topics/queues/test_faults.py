"""The promises of a queue during a checkpoint, a stop, a config change or a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from tests.unit.topics.engine_doubles import COLD, World, read_all, recs, settle

from penstock.errors import Unavailable
from penstock.testing.disk import DiskFault, PlannedFault
from penstock.testing.topics_kit import InlineWorkers
from penstock.topics import (
    CommitFailed,
    Durability,
    Engine,
    Predicate,
    RouterConfig,
    ShuttingDown,
    TopicConfig,
)
from penstock.topics.model import ClaimedJob
from penstock.topics.queues import dead_letters
from penstock.topics.queues.reading import read_jobs
from penstock.topics.topic.index import Seqs, TopicIndex
from penstock.topics.topic.leases import Job, LeaseTable
from penstock.topics.topic.topic import Topic

T = TypeVar("T")


def queue(**fields: object) -> TopicConfig:
    return TopicConfig(type="queue", **{"lease_ms": 3_600_000, "durable": True} | fields)  # type: ignore[arg-type]


def counts(engine: Engine) -> tuple[int, int, int]:
    found = engine.state("q").queue
    assert found is not None
    return found.ready, found.in_flight, found.dead_lettered


async def claimed(engine: Engine, node: str = "w", most: int = 1) -> list[ClaimedJob]:
    return (await engine.claim("q", node, max=most)).jobs()


async def opened(world: World, jobs: int = 1, **fields: object) -> Engine:
    engine = await world.open()
    await engine.put_topic("q", queue(**fields))
    await engine.write("q", recs(*range(1, jobs + 1)))
    return engine


@pytest.fixture
def world() -> World:
    return World()


# ---- checkpoints -------------------------------------------------------------------------------------


class InterruptedWorkers(InlineWorkers):
    """Workers that run a callback while the first read waits for the cold tier."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    async def fetch(self, work: Callable[[], T]) -> T:
        if self.meanwhile:
            await self.meanwhile.pop()()  # type: ignore[misc]
        return await super().fetch(work)


@pytest.mark.parametrize("fed", [False, True])
async def test_a_checkpoint_during_a_cold_read_moves_jobs_and_the_claim_finds_them(fed: bool) -> None:
    """Copies are in memory and written jobs in the log. Afterwards both are in a segment."""
    world = World(cold_dir=COLD, hot_retain_segments=0, segment_max_events=2, make_workers=InterruptedWorkers)
    engine = await world.open()
    source = "src" if fed else "q"
    await engine.put_topic(source, TopicConfig(durable=True) if fed else queue())
    if fed:
        await engine.put_topic("q", queue())
        await engine.put_router("r", RouterConfig(source="src", dest="q"))
    await engine.write(source, recs(1, 2, 3, 4))
    await engine.drain("q")
    await engine.checkpoint()
    await engine.checkpoint()
    assert [entry.cold for entry in engine._catalog.get("q").log.segments] == [True, True]
    await engine.write(source, recs(5, 6, 7))
    await engine.drain("q")
    assert isinstance(world.workers, InterruptedWorkers)
    world.workers.meanwhile = [engine.checkpoint, engine.checkpoint]
    jobs = await claimed(engine, most=10)
    assert [(job.seq, bytes(job.data)) for job in jobs] == [(seq, b"%d" % seq) for seq in range(1, 8)]


# ---- stops -------------------------------------------------------------------------------------------


async def test_a_stream_gets_nothing_once_the_engine_is_closed(world: World) -> None:
    engine = await opened(world, 3)
    work = await engine.work("q", "w")
    jobs = await work.next(1.0)
    assert jobs is not None
    await engine.ack("q", "w", jobs.seqs)
    await engine.close()
    with pytest.raises(ShuttingDown):
        await work.next(1.0)


async def test_a_waiting_stream_fails_when_the_engine_closes(world: World) -> None:
    engine = await opened(world, 1)
    work = await engine.work("q", "w")
    await work.next(0)
    waiting = asyncio.ensure_future(work.next(15.0))
    await settle()
    await engine.close()
    with pytest.raises(ShuttingDown):
        await waiting


@pytest.mark.parametrize("letters", [Durability.DISK, Durability.FSYNC])
async def test_a_stop_waits_for_dead_letters_that_are_being_written(
    world: World, letters: Durability
) -> None:
    """A written letter belongs to a deleted job, so a clean stop duplicates nothing."""
    engine = await opened(world, 1, max_deliveries=1, dead_letter="dead")
    await engine.put_topic("dead", TopicConfig(durability=letters))
    await claimed(engine)
    await engine.nack("q", "w", [1])
    world.committers.hold()
    claiming = asyncio.ensure_future(engine.claim("q", "w"))
    await settle()
    closing = asyncio.ensure_future(engine.close())
    await settle()
    while not closing.done():
        for committer in world.committers.all:
            committer.commit()
        await settle()
    closing.result()
    await asyncio.gather(claiming, return_exceptions=True)
    engine = await world.open()
    assert await claimed(engine) == []
    assert counts(engine) == (0, 0, 1)
    assert len(await read_all(engine, "dead")) == 1


# ---- a new config ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_a_lease_that_ended_while_leases_were_not_durable_does_not_come_back(
    world: World, checkpointed: bool
) -> None:
    engine = await opened(world, 2, leases_durable=True)
    (first,) = await claimed(engine, "a")
    if checkpointed:
        await engine.checkpoint()
    await engine.put_topic("q", queue(leases_durable=False))
    await engine.nack("q", "a", [1], [first.lease_id])
    (second,) = await claimed(engine, "b")
    (delayed,) = await claimed(engine, "b")
    await engine.nack("q", "b", [2], [delayed.lease_id], delay_ms=1000)
    await engine.put_topic("q", queue(leases_durable=True))
    engine = await world.crash()
    assert counts(engine) == (0, 1, 0)
    assert list((await engine.ack("q", "a", [1], [first.lease_id])).skipped) == [1]
    assert (await engine.ack("q", "b", [1], [second.lease_id])).acked == 1
    await world.clock.advance(1.0)
    assert [job.seq for job in await claimed(engine)] == [2]


async def test_a_claim_that_was_logged_while_leases_stopped_being_durable_does_not_come_back(
    world: World,
) -> None:
    engine = await opened(world, 1, leases_durable=True)
    await claimed(engine, "a")
    await engine.nack("q", "a", [1])
    world.committers.hold()
    changing = asyncio.ensure_future(engine.put_topic("q", queue(leases_durable=False)))
    await settle()
    claiming = asyncio.ensure_future(engine.claim("q", "a"))
    await settle()
    world.committers.release()
    await changing
    (job,) = (await claiming).jobs()
    await engine.nack("q", "a", [1])
    await engine.put_topic("q", queue(leases_durable=True))
    engine = await world.crash()
    assert counts(engine) == (1, 0, 0)
    assert list((await engine.ack("q", "a", [1], [job.lease_id])).skipped) == [1]


async def test_a_crash_before_current_leases_are_logged_brings_back_no_ended_ones(world: World) -> None:
    engine = await opened(world, 1, leases_durable=True)
    (first,) = await claimed(engine, "a")
    await engine.put_topic("q", queue(leases_durable=False))
    await engine.nack("q", "a", [1])
    (second,) = await claimed(engine, "b")
    world.committers.hold()
    changing = asyncio.ensure_future(engine.put_topic("q", queue(leases_durable=True)))
    await settle()
    for committer in world.committers.all:
        committer.commit()
    await settle()
    assert engine.state("q").config.leases_durable
    assert not changing.done()
    changing.cancel()
    engine = await world.crash()
    assert engine.state("q").config.leases_durable
    assert counts(engine) == (1, 0, 0)
    for node, job in (("a", first), ("b", second)):
        assert list((await engine.ack("q", node, [1], [job.lease_id])).skipped) == [1]


async def test_current_leases_become_durable_with_the_config_even_if_its_caller_is_cancelled(
    world: World,
) -> None:
    engine = await opened(world, 2500)
    jobs = [job for _ in range(3) for job in await claimed(engine, "a", 800)]
    world.committers.hold()
    changing = asyncio.ensure_future(engine.put_topic("q", queue(leases_durable=True)))
    await settle()
    changing.cancel()
    world.committers.release()
    await settle()
    engine = await world.crash()
    assert counts(engine) == (100, 2400, 0)
    assert (await engine.ack("q", "a", [2400], [jobs[-1].lease_id])).acked == 1


# ---- claims that fail --------------------------------------------------------------------------------


async def test_a_claim_that_cannot_be_logged_does_not_count_as_a_delivery(world: World) -> None:
    engine = await opened(world, 1, leases_durable=True, max_deliveries=2, dead_letter="dead")
    await claimed(engine)
    await engine.nack("q", "w", [1])
    for _ in range(3):
        world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
        with pytest.raises(CommitFailed):
            await claimed(engine)
        await settle()
    engine = await world.kill()
    assert [job.deliveries for job in await claimed(engine)] == [2]
    assert counts(engine) == (0, 1, 0)


@pytest.mark.parametrize("leases_durable", [False, True])
async def test_a_claim_without_a_response_of_the_cold_tier_does_not_count_as_a_delivery(
    leases_durable: bool,
) -> None:
    world = World(cold_dir=COLD, hot_retain_segments=0, segment_max_events=1, make_workers=InterruptedWorkers)
    engine = await opened(world, 1, leases_durable=leases_durable, max_deliveries=1, dead_letter="dead")
    await engine.checkpoint()
    await engine.checkpoint()

    async def be_away() -> None:
        raise Unavailable("the cold tier is away")

    assert isinstance(world.workers, InterruptedWorkers)
    world.workers.meanwhile = [be_away, be_away]
    for _ in range(2):
        with pytest.raises(Unavailable):
            await claimed(engine)
    assert [job.deliveries for job in await claimed(engine)] == [1]


@pytest.mark.parametrize("stop", ["kill", "restart"])
@pytest.mark.parametrize("cut", [False, True])
async def test_a_durable_claim_whose_client_left_leaves_no_trace(world: World, cut: bool, stop: str) -> None:
    """Its lease is neither in the log nor in a snapshot that was taken during the claim."""
    engine = await opened(world, 1, leases_durable=True)
    await claimed(engine)
    await engine.nack("q", "w", [1])
    world.committers.hold()
    claiming = asyncio.ensure_future(engine.claim("q", "a"))
    await settle()
    if cut:
        await engine.checkpoint()
    claiming.cancel()
    await settle()
    world.committers.release()
    await settle()
    if cut:
        await engine.checkpoint()
    engine = await getattr(world, stop)()
    assert counts(engine) == (1, 0, 0)
    assert [job.deliveries for job in await claimed(engine)] == [2]


# ---- what a claim costs ------------------------------------------------------------------------------


async def stuck(world: World, jobs: int) -> Engine:
    """Return a queue whose jobs had their last delivery and whose letters are refused."""
    engine = await opened(world, jobs, max_deliveries=1, dead_letter="dead")
    await engine.put_topic("dead", TopicConfig(discard="reject", cap_records=1))
    await engine.write("dead", recs("full"))
    for _ in range(jobs // 500 + 1):
        result = await engine.claim("q", "w", max=500)
        await engine.nack("q", "w", result.seqs)
    assert await claimed(engine) == []
    return engine


def changes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the jobs whose state changes from now on."""
    seen: list[int] = []
    change = LeaseTable._set

    def watched(table: LeaseTable, seq: int, job: Job, state: int) -> None:
        seen.append(seq)
        change(table, seq, job, state)

    monkeypatch.setattr(LeaseTable, "_set", watched)
    return seen


async def test_a_claim_does_not_retry_every_refused_letter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await stuck(world, 1000)
    seen = changes(monkeypatch)
    assert await claimed(engine) == []
    assert len(seen) < 10
    for letters in range(1, 4):
        await engine.delete("dead", before_seq=letters + 1)  # room for one letter
        assert await claimed(engine) == []
        assert counts(engine) == (1000 - letters, 0, letters)
    assert len(seen) < 50


async def test_accepted_letters_are_moved_in_a_few_claims_and_not_all_in_one(world: World) -> None:
    engine = await stuck(world, 2500)
    await engine.put_topic("dead", TopicConfig())
    assert await claimed(engine) == []
    assert 1000 <= counts(engine)[2] <= 1500
    await engine.write("q", recs("fresh"))
    assert [job.seq for job in await claimed(engine)] == [2501]
    for _ in range(2):
        await claimed(engine)
    assert counts(engine) == (0, 1, 2500)


@pytest.mark.parametrize("unreadable", [1, 4])
async def test_an_unreadable_job_does_not_block_other_letters(
    world: World, monkeypatch: pytest.MonkeyPatch, unreadable: int
) -> None:
    engine = await stuck(world, 4)
    await engine.put_topic("dead", TopicConfig())

    async def without_that(topic: Topic, seqs: Sequence[int], *more: Any) -> Any:
        return await read_jobs(topic, [seq for seq in seqs if seq != unreadable], *more)

    monkeypatch.setattr(dead_letters, "read_jobs", without_that)
    for _ in range(4):
        await claimed(engine)
    assert counts(engine) == (1, 0, 3)


async def test_stuck_jobs_are_delivered_when_the_limit_is_raised(world: World) -> None:
    engine = await stuck(world, 3)
    await engine.put_topic("q", queue(max_deliveries=2, dead_letter="dead"))
    assert [job.deliveries for job in await claimed(engine, most=5)] == [2, 2, 2]
    assert counts(engine) == (0, 3, 0)


@pytest.mark.parametrize("cause", ["cap", "age", "delete"])
async def test_jobs_removed_from_the_front_are_dropped_without_a_scan_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    engine = await opened(world, 100, **{"cap_records": 100} if cause == "cap" else {"ttl_ms": 10_000})
    await world.clock.advance(5.0)
    await engine.write("q", recs(*range(100)))
    gone = 100 if cause == "cap" else 0
    jobs = await claimed(engine, most=100)
    await engine.ack("q", "w", [job.seq for job in jobs if job.seq % 2])
    looked_at: list[int] = []
    are_live = TopicIndex.are_live

    def watched(index: TopicIndex, seqs: Seqs) -> Any:
        looked_at.extend(seqs.tolist())
        return are_live(index, seqs)

    monkeypatch.setattr(TopicIndex, "are_live", watched)
    if cause == "cap":
        await engine.write("q", recs(*range(60)))  # 50 were acked
    elif cause == "age":
        await world.clock.advance(5.001)
    else:
        await engine.delete("q", before_seq=11)
    left = [job.seq for job in jobs if not job.seq % 2]
    left = {"cap": [seq for seq in left if seq > gone + 20], "age": [], "delete": left[5:]}[cause]
    assert counts(engine)[1] == len(left)
    assert looked_at == []
    assert (await engine.ack("q", "w", [job.seq for job in jobs])).acked == len(left)
    assert counts(engine)[1] == 0


async def test_jobs_deleted_by_tag_have_no_holder(world: World) -> None:
    engine = await opened(world, 3)
    await engine.write("q", recs(4, 5, tag="t"))
    await claimed(engine, most=5)
    await engine.delete("q", match=Predicate(value="t"))
    assert counts(engine) == (0, 3, 0)
    assert (await engine.ack("q", "w", [1, 2, 3, 4, 5])).acked == 3
