"""A queue with a router as its source: its jobs are copies and behave like all others."""

from __future__ import annotations

import pytest
from tests.unit.topics.engine_doubles import World, recs, seqs

from penstock.topics import Engine, RouterConfig, TopicConfig


async def routed(world: World, **fields: object) -> Engine:
    engine = await world.open()
    await engine.put_topic("source", TopicConfig(durable=True))
    await engine.put_topic("q", TopicConfig(type="queue", durable=True, **fields))  # type: ignore[arg-type]
    await engine.put_router("r", RouterConfig(source="source", dest="q"))
    await engine.write("source", recs(1, 2, 3, 4))
    return engine


async def test_a_claim_gets_jobs_that_were_just_written_to_the_source() -> None:
    engine = await routed(World())
    assert (await engine.claim("q", "w", max=3)).seqs == [1, 2, 3]
    await engine.close()


@pytest.mark.parametrize("stop", ["restart", "kill", "crash"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("leases_durable", [False, True])
async def test_an_acked_copy_stays_gone(stop: str, checkpointed: bool, leases_durable: bool) -> None:
    world = World()
    engine = await routed(world, leases_durable=leases_durable, lease_ms=60_000)
    await engine.claim("q", "w", max=3)
    if checkpointed:
        await engine.checkpoint()
    assert (await engine.ack("q", "w", [1, 3])).acked == 2
    for _ in range(2):
        engine = await getattr(world, stop)()
        assert engine.problems == []
        await engine.drain("q")
        assert seqs(await engine.diff("q")) == [2, 4]
        queue = engine.state("q").queue
        assert queue is not None
        assert (queue.ready, queue.in_flight) == ((1, 1) if leases_durable else (2, 0))
    await engine.close()
