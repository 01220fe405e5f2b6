"""Pressure: its signals, and that it only delays."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import World, recs, seqs

from penstock.testing.clock import ManualClock
from penstock.topics import TopicConfig
from penstock.topics.errors import Throttled
from penstock.topics.routers.model import RouterConfig
from penstock.topics.routers.routing import Routing
from penstock.topics.routers.table import Router
from penstock.topics.schedule.pressure import Scheduler

LATE_MS = 500.0


@pytest.fixture
def world() -> World:
    return World()


def press(scheduler: Scheduler, samples: int = 40) -> None:
    for _ in range(samples):
        scheduler.sample(late_ms=LATE_MS)


async def test_a_loop_that_is_on_time_has_no_pressure() -> None:
    clock = ManualClock()
    scheduler = Scheduler(clock)
    scheduler.start(())
    for _ in range(30):
        await clock.advance(0.1)
    assert scheduler.ladder.pressure == 0.0
    await scheduler.close()


async def test_a_suspended_machine_does_not_count_as_load() -> None:
    clock = ManualClock()
    scheduler = Scheduler(clock)
    scheduler.start(())
    await clock.advance(3600)
    assert scheduler.ladder.pressure == 0.0
    await scheduler.close()


def test_waiting_topics_and_long_waits_are_pressure() -> None:
    deep, slow = Scheduler(ManualClock()), Scheduler(ManualClock())
    deep.watch(lambda: 1000)
    for _ in range(20):
        deep.sample(late_ms=0.0)
        slow.observe(50.0)
        slow.sample(late_ms=0.0)
    assert deep.depth == 1000
    assert deep.ladder.pressure > 0.9
    assert slow.ladder.pressure > 0.9


def test_a_finished_wait_decays() -> None:
    scheduler = Scheduler(ManualClock())
    for _ in range(20):
        scheduler.observe(50.0)
        scheduler.sample(late_ms=0.0)
    for _ in range(40):
        scheduler.sample(late_ms=0.0)
    assert scheduler.ladder.pressure == 0.0


async def test_at_full_pressure_a_queue_that_fills_up_refuses_writers(world: World) -> None:
    engine = await world.open(wal_queue_max=8, wal_shards=1)
    await engine.put_topic("t", TopicConfig(durable=True))
    world.committers.hold()
    waiting = [asyncio.ensure_future(engine.write("t", recs(n))) for n in range(4)]
    await asyncio.sleep(0)
    press(engine.scheduler)
    with pytest.raises(Throttled, match="retry in a moment") as refused:
        await engine.write("t", recs("refused"))
    assert refused.value.detail == {"retry_after_ms": 1000}
    insisting = asyncio.ensure_future(engine.write("t", recs("insists"), insist=True))
    await asyncio.sleep(0)
    world.committers.release()
    await asyncio.gather(*waiting, insisting)
    assert seqs(await engine.diff("t")) == [1, 2, 3, 4, 5], "what was refused has left no trace"


async def test_at_full_pressure_an_empty_queue_accepts_all_writes(world: World) -> None:
    engine = await world.open()
    press(engine.scheduler)
    assert (await engine.write("t", recs(1))).first_seq == 1


async def test_commits_wait_for_more_writes_while_the_pressure_lasts(world: World) -> None:
    engine = await world.open()
    press(engine.scheduler)
    assert [committer.window_s for committer in world.committers.all] == pytest.approx(
        [0.01] * len(world.committers.all), abs=1e-3
    )
    for _ in range(60):
        engine.scheduler.sample(late_ms=0.0)
    assert {committer.window_s for committer in world.committers.all} == {0.0}


@pytest.mark.parametrize(("is_pressed", "bands"), [(False, [0, 1, 4]), (True, [1, 2, 4])])
async def test_copies_are_made_in_the_order_of_their_destinations_one_band_lower_under_pressure(
    world: World, monkeypatch: pytest.MonkeyPatch, is_pressed: bool, bands: list[int]
) -> None:
    engine = await world.open()
    for name, priority in (("middle", 600), ("high", 900), ("low", -5)):
        await engine.put_topic(name, TopicConfig(priority=priority))
        await engine.put_router(name, RouterConfig(source="source", dest=name))
    if is_pressed:
        press(engine.scheduler)
    started: list[str] = []
    start = Routing._start

    def note(self: Routing, router: Router) -> object:
        started.append(router.name)
        return start(self, router)

    monkeypatch.setattr(Routing, "_start", note)
    await engine.write("source", recs(1))
    in_bands = [band for band, places in enumerate(engine._routing._waiting._bands) for _ in places]
    await world.clock.advance(0.06)
    assert started == ["high", "middle", "low"]
    assert in_bands == bands
    assert seqs(await engine.diff("low")) == [1], "a reader does not wait for its turn"
    await engine.close()
