"""Work streams and claim batches: pushed jobs and jobs shared by claims, on a test clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.topics.engine_doubles import World, recs, settle

from penstock.topics import ClaimResult, Engine, ShuttingDown, TopicConfig, TopicNotFound
from penstock.topics.queues import claims
from penstock.topics.queues.claims import LeaseAllocator
from penstock.topics.queues.reading import read_jobs


@pytest.fixture
def world() -> World:
    return World()


async def opened(world: World, jobs: int = 0, **fields: object) -> Engine:
    engine = await world.open()
    await engine.put_topic("q", TopicConfig(type="queue", lease_ms=1000, **fields))  # type: ignore[arg-type]
    if jobs:
        await engine.write("q", recs(*range(1, jobs + 1)))
    return engine


def counts(engine: Engine) -> tuple[int, int]:
    found = engine.state("q").queue
    assert found is not None
    return found.ready, found.in_flight


def seqs(result: ClaimResult | None) -> list[int]:
    assert result is not None
    return list(result.seqs)


async def test_a_stream_never_holds_more_than_its_maximum(world: World) -> None:
    engine = await opened(world, 5)
    work = await engine.work("q", "w", max=2)
    assert seqs(await work.next(0)) == [1, 2]
    assert await work.next(0) is None
    await engine.ack("q", "w", [1])
    assert seqs(await work.next(0)) == [3]
    assert (work.held, counts(engine)) == (2, (2, 2))


@pytest.mark.parametrize("event", ["publish", "ack", "nack", "drop"])
async def test_a_waiting_stream_is_woken_immediately(world: World, event: str) -> None:
    engine = await opened(world, 0 if event == "publish" else 1)
    other = await engine.work("q", "other")
    if event != "publish":
        assert seqs(await other.next(0)) == [1]
    if event == "ack":
        await engine.write("q", recs(2))
    work = other if event == "ack" else await engine.work("q", "w")
    waiting = asyncio.ensure_future(work.next(15.0))
    await settle()
    assert not waiting.done()
    if event == "publish":
        await engine.write("q", recs(1))
    elif event == "ack":
        await engine.ack("q", "other", [1])
    elif event == "nack":
        await engine.nack("q", "other", [1])
    else:
        await other.close()
    await settle()
    assert seqs(waiting.result()) == ([2] if event == "ack" else [1])


async def test_changes_without_a_notification_are_noticed_within_a_quarter_of_a_second(world: World) -> None:
    engine = await opened(world, 1)
    await engine.claim("q", "other")
    work = await engine.work("q", "w")
    waiting = asyncio.ensure_future(work.next(15.0))
    await world.clock.advance(1.0)
    assert not waiting.done()
    await world.clock.advance(0.25)
    assert seqs(waiting.result()) == [1]


async def test_the_wait_ends_at_its_timeout(world: World) -> None:
    engine = await opened(world)
    work = await engine.work("q", "w")
    waiting = asyncio.ensure_future(work.next(15.0))
    await world.clock.advance(14.99)
    assert not waiting.done()
    await world.clock.advance(0.01)
    assert waiting.result() is None


async def test_a_closed_stream_returns_exactly_its_own_jobs(world: World) -> None:
    engine = await opened(world, 4)
    polled = await engine.claim("q", "w")
    work = await engine.work("q", "w", max=3)
    assert seqs(await work.next(0)) == [2, 3, 4]
    await engine.ack("q", "w", [3])
    await work.close()
    assert counts(engine) == (2, 1)
    assert (await engine.ack("q", "w", [1], [polled.jobs()[0].lease_id])).acked == 1
    assert [job.deliveries for job in (await engine.claim("q", "v", max=5)).jobs()] == [2, 2]


async def test_an_expired_job_of_another_worker_is_not_returned(world: World) -> None:
    engine = await opened(world, 1)
    work = await engine.work("q", "w")
    assert seqs(await work.next(0)) == [1]
    await world.clock.advance(1.001)
    assert (await engine.claim("q", "w")).seqs == [1]
    assert work.held == 0
    await work.close()
    assert counts(engine) == (0, 1)


# ---- workers that are not heard of -------------------------------------------------------------------


async def test_a_stream_whose_leases_expire_gets_no_more_jobs_and_ends(world: World) -> None:
    """A client that hangs costs the queue one delivery of its jobs and affects no other worker."""
    engine = await opened(world, 5, max_deliveries=3, dead_letter="dead")
    work = await engine.work("q", "w", max=2)
    assert seqs(await work.next(0)) == [1, 2]
    waiting = asyncio.ensure_future(work.next(60.0))
    await world.clock.advance(1.9)
    assert (work.held, counts(engine)) == (0, (5, 0))
    assert not waiting.done()
    await world.clock.advance(0.4)
    assert waiting.result() is None
    assert work.is_silent
    await work.close()
    delivered = (await engine.claim("q", "v", max=9)).jobs()
    assert [job.deliveries for job in delivered] == [2, 2, 1, 1, 1]


@pytest.mark.parametrize("call", ["ack", "nack", "extend"])
@pytest.mark.parametrize("fenced", [False, True])
async def test_a_late_worker_continues_after_its_next_message(world: World, call: str, fenced: bool) -> None:
    engine = await opened(world, 2)
    work = await engine.work("q", "w")
    first = await work.next(0)
    assert first is not None
    tokens = [first.jobs()[0].lease_id] if fenced else []
    await world.clock.advance(1.001)
    assert list((await engine.claim("q", "other")).seqs) == [1]
    waiting = asyncio.ensure_future(work.next(15.0))
    await settle()
    assert not waiting.done()
    more = {"lease_ms": 1000} if call == "extend" else {}
    assert list((await getattr(engine, call)("q", "w", [1], tokens, **more)).skipped) == [1]
    await settle()
    assert seqs(waiting.result()) == [2]
    assert not work.is_silent


async def test_a_worker_with_other_jobs_counts_as_alive(world: World) -> None:
    engine = await opened(world, 4)
    work = await engine.work("q", "w", max=2)
    assert seqs(await work.next(0)) == [1, 2]
    await world.clock.advance(0.5)
    await engine.extend("q", "w", [2], lease_ms=5000)
    await world.clock.advance(1.0)
    assert await work.next(0) is None
    await world.clock.advance(3.0)
    assert not work.is_silent
    await engine.extend("q", "w", [2], lease_ms=5000)
    assert seqs(await work.next(0)) == [1]


@pytest.mark.parametrize("fenced", [False, True])
async def test_a_stream_that_hangs_is_not_mistaken_for_another_one_of_the_same_node(
    world: World, fenced: bool
) -> None:
    engine = await opened(world, 4)
    hung, busy = await engine.work("q", "w"), await engine.work("q", "w")
    assert seqs(await hung.next(0)) == [1]
    await world.clock.advance(1.001)
    for seq in (1, 2, 3):
        jobs = await busy.next(0)
        assert seqs(jobs) == [seq]
        assert jobs is not None
        tokens = [jobs.jobs()[0].lease_id] if fenced else []
        assert (await engine.ack("q", "w", [seq], tokens)).acked == 1
        assert await hung.next(0) is None
    assert counts(engine) == (1, 0)


async def test_another_node_does_not_keep_a_stream_alive(world: World) -> None:
    engine = await opened(world, 2)
    work = await engine.work("q", "w")
    await work.next(0)
    await world.clock.advance(1.001)
    await engine.ack("q", "v", [1])
    assert await work.next(0) is None


async def test_a_deleted_job_does_not_count_as_expired(world: World) -> None:
    engine = await opened(world, 2)
    work = await engine.work("q", "w")
    assert seqs(await work.next(0)) == [1]
    await engine.delete("q", before_seq=2)
    await world.clock.advance(1.001)
    assert seqs(await work.next(0)) == [2]


async def test_durable_leases_of_a_stream_are_released_durably(world: World) -> None:
    engine = await opened(world, 2, leases_durable=True, durable=True)
    work = await engine.work("q", "w", max=2)
    await work.next(0)
    await work.close()
    engine = await world.crash()
    assert counts(engine) == (2, 0)


async def test_a_stream_ends_with_its_queue(world: World) -> None:
    engine = await opened(world)
    work = await engine.work("q", "w")
    waiting = asyncio.ensure_future(work.next(15.0))
    await settle()
    await engine.remove_topic("q")
    with pytest.raises(TopicNotFound):
        await waiting
    await work.close()


async def test_a_stream_whose_wait_is_cancelled_can_be_closed(world: World) -> None:
    engine = await opened(world, 1)
    work = await engine.work("q", "w", max=2)
    await work.next(0)
    waiting = asyncio.ensure_future(work.next(15.0))
    await settle()
    waiting.cancel()
    await settle()
    await work.close()
    assert counts(engine) == (1, 0)


# ---- cohorts -----------------------------------------------------------------------------------------


async def test_claims_within_the_window_share_fairly(world: World) -> None:
    engine = await opened(world, 7, claim_jitter_ms=100)
    claims = [asyncio.ensure_future(engine.claim("q", node, max=most)) for node, most in [("a", 5), ("b", 5)]]
    await world.clock.advance(0.05)
    claims.append(asyncio.ensure_future(engine.claim("q", "c", max=1)))
    await world.clock.advance(0.049)
    assert not any(claim.done() for claim in claims)
    await world.clock.advance(0.001)
    assert [list(claim.result().seqs) for claim in claims] == [[1, 4, 6], [2, 5, 7], [3]]


async def test_every_claim_of_a_batch_gets_the_lease_that_it_requested(world: World) -> None:
    engine = await opened(world, 2, claim_jitter_ms=100)
    short = asyncio.ensure_future(engine.claim("q", "a", lease_ms=200))
    long = asyncio.ensure_future(engine.claim("q", "b", lease_ms=5000))
    await world.clock.advance(0.1)
    now_ms = world.clock.now_ms()
    assert [job.deadline_ms - now_ms for job in short.result().jobs() + long.result().jobs()] == [200, 5000]


async def test_a_claimer_that_left_takes_no_jobs(world: World) -> None:
    engine = await opened(world, 2, claim_jitter_ms=100)
    opener = asyncio.ensure_future(engine.claim("q", "a", max=2))
    await settle()
    other = asyncio.ensure_future(engine.claim("q", "b", max=2))
    await settle()
    opener.cancel()
    await world.clock.advance(0.1)
    assert list(other.result().seqs) == [1, 2]
    assert counts(engine) == (0, 2)


async def test_a_claim_after_the_window_opens_the_next_one(world: World) -> None:
    engine = await opened(world, 2, claim_jitter_ms=100)
    first = asyncio.ensure_future(engine.claim("q", "a"))
    await world.clock.advance(0.1)
    second = asyncio.ensure_future(engine.claim("q", "b"))
    await world.clock.advance(0.099)
    assert list(first.result().seqs) == [1]
    assert not second.done()
    await world.clock.advance(0.001)
    assert list(second.result().seqs) == [2]


async def test_streams_join_claim_batches(world: World) -> None:
    engine = await opened(world, 4, claim_jitter_ms=100)
    work = await engine.work("q", "w", max=4)
    streamed = asyncio.ensure_future(work.next(15.0))
    polled = asyncio.ensure_future(engine.claim("q", "p", max=4))
    await world.clock.advance(0.1)
    assert seqs(streamed.result()) == [1, 3]
    assert list(polled.result().seqs) == [2, 4]


@pytest.mark.parametrize("moment", ["at once", "within the window"])
async def test_a_claim_batch_fails_when_the_engine_closes(world: World, moment: str) -> None:
    engine = await opened(world, 1, claim_jitter_ms=100)
    claims = [asyncio.ensure_future(engine.claim("q", node)) for node in "ab"]
    await asyncio.sleep(0)
    if moment == "within the window":
        await world.clock.advance(0.05)
    await engine.close()
    for claim in claims:
        with pytest.raises(ShuttingDown):
            await claim


async def test_a_claim_batch_fails_when_its_queue_is_deleted(world: World) -> None:
    engine = await opened(world, 1, claim_jitter_ms=100)
    claim = asyncio.ensure_future(engine.claim("q", "a"))
    await settle()
    await engine.remove_topic("q")
    await world.clock.advance(0.1)
    with pytest.raises(TopicNotFound):
        await claim


# ---- who leaves while jobs are dealt -----------------------------------------------------------------


class HeldUp:
    """A hold on reservations of lease numbers: a pass waits for it before it leases jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        reserve = LeaseAllocator._reserve

        async def waiting(hand_out: LeaseAllocator, *arguments: Any) -> None:
            await self.go.wait()
            await reserve(hand_out, *arguments)

        monkeypatch.setattr(LeaseAllocator, "_reserve", waiting)


@pytest.mark.parametrize("leases_durable", [False, True])
async def test_a_stream_that_closes_while_its_claim_batch_is_served_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, leases_durable: bool
) -> None:
    engine = await opened(world, 3, claim_jitter_ms=50, leases_durable=leases_durable)
    held_up = HeldUp(monkeypatch)
    work = await engine.work("q", "w", max=2)
    streamed = asyncio.ensure_future(work.next(15.0))
    polled = asyncio.ensure_future(engine.claim("q", "p", max=1))
    await world.clock.advance(0.05)
    streamed.cancel()
    await settle()
    await work.close()
    held_up.go.set()
    await settle()
    assert list(polled.result().seqs) == [1]
    assert (work.held, counts(engine)) == (0, (2, 1))


@pytest.mark.parametrize("who", ["stream", "claim"])
async def test_jobs_of_a_client_that_left_before_the_response_are_returned(
    world: World, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The client leaves while its jobs are read, after they were leased and logged."""
    engine = await opened(world, 2, claim_jitter_ms=50, leases_durable=True)
    go = asyncio.Event()

    async def waiting(*arguments: Any) -> Any:
        await go.wait()
        return await read_jobs(*arguments)

    monkeypatch.setattr(claims, "read_jobs", waiting)
    work = await engine.work("q", "w", max=2)
    leaving = asyncio.ensure_future(work.next(15.0) if who == "stream" else engine.claim("q", "w", max=2))
    await world.clock.advance(0.05)
    assert counts(engine) == (0, 2)
    leaving.cancel()
    go.set()
    await settle()
    assert counts(engine) == (2, 0)
    engine = await world.kill()
    assert counts(engine) == (2, 0)


async def test_a_claimer_that_leaves_at_the_moment_of_its_response_takes_no_jobs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await opened(world, 1, claim_jitter_ms=50)
    serve = LeaseAllocator.claim

    async def serve_and_lose(hand_out: LeaseAllocator, *arguments: Any) -> Any:
        results = await serve(hand_out, *arguments)
        asyncio.get_running_loop().call_soon(claim.cancel)
        return results

    monkeypatch.setattr(LeaseAllocator, "claim", serve_and_lose)
    claim = asyncio.ensure_future(engine.claim("q", "w"))
    await world.clock.advance(0.05)
    assert claim.cancelled()
    assert counts(engine) == (1, 0)


async def test_a_stream_that_becomes_silent_within_the_window_gets_no_jobs(world: World) -> None:
    engine = await opened(world, 3, claim_jitter_ms=2000)
    work = await engine.work("q", "w", max=2)
    streamed = asyncio.ensure_future(work.next(15.0))
    polled = asyncio.ensure_future(engine.claim("q", "p", max=1))
    await world.clock.advance(2.0)
    assert (seqs(streamed.result()), list(polled.result().seqs)) == ([1, 3], [2])
    await engine.ack("q", "w", [1])
    streamed = asyncio.ensure_future(work.next(15.0))
    await world.clock.advance(2.0)
    assert not streamed.done()
    assert counts(engine) == (2, 0)
    streamed.cancel()
    await settle()
