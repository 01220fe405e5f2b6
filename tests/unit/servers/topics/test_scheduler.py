"""The delivery order of topics: by priority, deferred under pressure, and always complete."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tests.unit.servers.topics.live_doubles import FakeSink, Watching
from tests.unit.topics.engine_doubles import World, recs, seqs, settle

from penstock.servers.topics import broadcaster
from penstock.topics import TopicConfig
from penstock.topics.schedule.pressure import CALM, Ladder


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(max_topics=0)
    await made.open()
    yield made
    await made.engine.close()


@pytest.fixture
def watching(world: World) -> Watching:
    return Watching(world)


def press(world: World, *, coalesce_ms: float = 0.0, defers: bool = False) -> None:
    """Keep the pressure at this value until it is changed."""
    scheduler = world.engine.scheduler
    if scheduler._ticking is not None:
        scheduler._ticking.cancel()
    scheduler._governor.ladder = Ladder(
        pressure=0.9, coalesce_ms=coalesce_ms, commit_window_ms=0.0, defers=defers, refuses=False
    )


def relax(world: World) -> None:
    world.engine.scheduler._governor.ladder = CALM


async def make(world: World, **priorities: int | None) -> None:
    for name, priority in priorities.items():
        await world.engine.put_topic(name, TopicConfig(priority=priority, auto_priority=False))


async def follow(watching: Watching, *names: str) -> tuple[object, FakeSink]:
    return await watching.open(await watching.create(topics={name: {} for name in names}))


async def write_together(world: World, *names: str) -> None:
    """Publish to all topics at once, in this order."""
    world.committers.hold()
    writes = [asyncio.ensure_future(world.engine.write(name, recs(1))) for name in names]
    await settle()
    world.committers.release()
    await asyncio.gather(*writes)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def order(writer: FakeSink) -> list[str]:
    return [data["topic"] for name, data in writer.events() if name == "record"]


# ---- by priority ------------------------------------------------------------------------------------------


async def test_the_most_urgent_topic_goes_first(world: World, watching: Watching) -> None:
    await make(world, a=0, b=300, c=600, d=900, e=-1)
    _, writer = await follow(watching, "a", "b", "c", "d", "e")
    await write_together(world, "e", "a", "b", "c", "d")
    await settle()
    assert order(writer) == ["d", "c", "b", "a", "e"]


async def test_an_urgent_topic_marked_later_precedes_the_rest(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "VISITS_PER_TURN", 1)
    plain = [f"p{number:02d}" for number in range(30)]
    await make(world, **dict.fromkeys(plain, 0), urgent=900)
    _, writer = await follow(watching, *plain, "urgent")
    await write_together(world, *plain)
    for _ in range(200):
        if len(order(writer)) == 5:
            break
        await asyncio.sleep(0)
    await world.engine.write("urgent", recs(1))
    await turns(60)
    told = order(writer)
    assert sorted(told) == sorted([*plain, "urgent"])
    assert told.index("urgent") < 16
    assert [name for name in told if name != "urgent"] == plain, "within a band the first comes first"


async def test_a_topic_waits_once_for_any_number_of_writes(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(world, a=-1)
    await follow(watching, "a")
    press(world, defers=True)
    monkeypatch.setattr("penstock.topics.schedule.ready_set._AGEING_PER_MS", 0.0)
    for number in range(5):
        await world.engine.write("a", recs(number))
        await settle()
    assert watching.api.waiting == 1


async def test_readers_of_long_logs_get_their_visits_among_busy_topics(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "VISITS_PER_TURN", 2)
    await world.engine.write("long", recs(*range(50)))
    busy = [f"b{number}" for number in range(8)]
    await make(world, **dict.fromkeys(busy, 900))
    await follow(watching, *busy)
    live = (await watching.respond(await watching.create(topics={"long": {}}, limit=1))).live
    assert live is not None
    slow = FakeSink()
    live.attach(slow)
    for _ in range(40):
        await write_together(world, *busy)
    assert len(slow.seqs()) > 10


async def test_wait_times_are_reported_unless_the_topic_was_deferred(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(world.engine.scheduler, "observe", waits.append)
    await make(world, a=-1000, b=0)
    await follow(watching, "a", "b")
    press(world, defers=True)
    await write_together(world, "a", "b")
    await settle()
    assert waits == [0]
    assert world.engine.scheduler.depth == 0, "what is put off is no reason to put off more"
    await world.clock.advance(3)
    relax(world)
    await world.clock.advance(0.1)
    assert waits == [0]


# ---- deferred ---------------------------------------------------------------------------------------------


async def test_deferred_topics_are_delivered_completely_when_the_pressure_falls(
    world: World, watching: Watching
) -> None:
    await make(world, low=-900, plain=0)
    _, writer = await follow(watching, "low", "plain")
    press(world, defers=True)
    for number in range(3):
        await world.engine.write("low", recs(number))
        await settle()
    await world.engine.write("plain", recs(1))
    await world.clock.advance(2)
    assert order(writer) == ["plain"]
    assert watching.api.waiting == 1
    assert seqs(await world.engine.diff("low")) == [1, 2, 3], "it can be polled at any time"
    relax(world)
    await world.clock.advance(0.1)
    assert order(writer) == ["plain", "low"]
    assert writer.seqs() == [1, 1, 2, 3]
    assert writer.names()[-1] == "caught-up"


async def test_real_pressure_defers_topics_and_then_falls(world: World, watching: Watching) -> None:
    await make(world, low=-1000)
    _, writer = await follow(watching, "low")
    for _ in range(40):
        world.engine.scheduler.sample(late_ms=500.0)
    await world.engine.write("low", recs(1))
    await settle()
    assert writer.seqs() == []
    await world.clock.advance(1)
    assert writer.seqs() == [1]


async def test_a_topic_that_waits_long_enough_is_served_under_any_pressure(
    world: World, watching: Watching
) -> None:
    await make(world, low=-1000, less=-100)
    _, writer = await follow(watching, "low", "less")
    press(world, defers=True)
    await write_together(world, "low", "less")
    await world.clock.advance(0.9)
    assert order(writer) == []
    await world.clock.advance(0.2)
    assert order(writer) == ["less"]
    await world.clock.advance(8.7)
    assert order(writer) == ["less"]
    await world.clock.advance(0.3)
    assert order(writer) == ["less", "low"]


async def test_a_client_is_warned_once_about_deferred_topics(world: World, watching: Watching) -> None:
    await make(world, low=-1000, lower=-900, plain=0)
    _, writer = await follow(watching, "low", "lower", "plain")
    _, other = await follow(watching, "plain")
    press(world, defers=True)
    for number in range(3):
        await world.engine.write("low", recs(number))
        await world.clock.advance(0.3)
    await world.engine.write("lower", recs(1))
    await world.clock.advance(0.3)
    ((_, data),) = [event for event in writer.events() if event[0] == "error"]
    assert data.keys() == {"code", "error", "retry_after_ms", "topics"}
    assert (data["code"], data["retry_after_ms"], data["topics"]) == (429, 1000, ["low", "lower"])
    assert "error" not in other.names()
    relax(world)
    await world.clock.advance(0.1)
    press(world, defers=True)
    await world.engine.write("low", recs(1))
    await world.clock.advance(0.1)
    assert writer.names().count("error") == 2, "it is another time"


async def test_a_full_connection_is_not_warned_and_a_broken_one_is_closed(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await make(world, low=-1000)
    _, full = await follow(watching, "low")
    _, broken = await follow(watching, "low")
    _, sound = await follow(watching, "low")
    full.is_writable = False

    def fail(data: bytes) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(broken, "write", fail)
    press(world, defers=True)
    await world.engine.write("low", recs(1))
    await world.clock.advance(0.2)
    assert "error" not in full.names()
    assert broken.is_cut
    assert "error" in sound.names()
    relax(world)
    await world.clock.advance(0.1)
    assert sound.seqs() == [1]


async def test_a_deletion_is_reported_immediately_even_for_deferred_topics(
    world: World, watching: Watching
) -> None:
    await make(world, low=-1000)
    _, writer = await follow(watching, "low")
    press(world, coalesce_ms=20.0, defers=True)
    await world.engine.write("low", recs(1))
    await settle()
    await world.engine.remove_topic("low")
    await settle()
    assert writer.names()[-1] == "topic-deleted"


async def test_nothing_is_left_when_every_waiting_client_is_gone(world: World, watching: Watching) -> None:
    await make(world, low=-1000, plain=0)
    live, _ = await follow(watching, "low", "plain")
    press(world, coalesce_ms=20.0, defers=True)
    for _ in range(2):
        await write_together(world, "low", "plain")
        await settle()
    assert watching.api.waiting == 2
    sleeping = world.clock.sleeping
    live.closed()  # type: ignore[attr-defined]
    await settle()
    assert watching.api.waiting == 0
    assert world.clock.sleeping < sleeping
    await world.clock.advance(1)
    _, writer = await follow(watching, "plain")
    await world.engine.write("plain", recs(3))
    await world.clock.advance(0.1)
    assert writer.seqs()[-1] == 3


# ---- coalesced --------------------------------------------------------------------------------------------


async def test_under_pressure_a_recently_served_topic_is_coalesced(world: World, watching: Watching) -> None:
    await make(world, a=0)
    _, writer = await follow(watching, "a")
    press(world, coalesce_ms=10.0)
    await world.engine.write("a", recs(0))
    await settle()
    assert writer.seqs() == [1], "it was not served before"
    for number in range(3):
        await world.engine.write("a", recs(number))
        await settle()
    assert writer.seqs() == [1]
    await world.clock.advance(0.008)
    assert writer.seqs() == [1]
    await world.clock.advance(0.002)
    assert writer.seqs() == [1, 2, 3, 4]
    assert writer.names().count("record") == 2
    await world.clock.advance(0.5)
    await world.engine.write("a", recs(9))
    await settle()
    assert writer.seqs() == [1, 2, 3, 4, 5], "its last delivery is long ago"


async def test_the_most_urgent_topics_are_never_coalesced(world: World, watching: Watching) -> None:
    await make(world, a=750)
    _, writer = await follow(watching, "a")
    press(world, coalesce_ms=20.0)
    for number in range(4):
        await world.engine.write("a", recs(number))
        await settle()
    assert writer.names().count("record") == 4


async def test_a_coalesced_topic_is_delivered_after_a_pressure_change(
    world: World, watching: Watching
) -> None:
    await make(world, a=0, b=0)
    _, writer = await follow(watching, "a", "b")
    press(world, coalesce_ms=20.0)
    await write_together(world, "a", "b")
    await settle()
    await world.engine.write("a", recs(2))
    await world.clock.advance(0.004)
    press(world, coalesce_ms=5.0)
    await world.engine.write("b", recs(2))
    relax(world)
    await world.clock.advance(0.02)
    assert order(writer) in (["a", "b", "a", "b"], ["a", "b", "b", "a"])
    assert watching.api.waiting == 0


@pytest.mark.parametrize("seed", range(30))
async def test_under_any_pressure_everything_is_delivered_once_in_order(
    seed: int, world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(broadcaster, "VISITS_PER_TURN", rng.choice([1, 2, 256]))
    names = [f"t{number}" for number in range(6)]
    await make(world, **{name: rng.choice([-1000, -100, -1, 0, 300, 900, None]) for name in names})
    writers = [(await follow(watching, *rng.sample(names, rng.randrange(1, 7))))[1] for _ in range(4)]
    for _ in range(150):
        action = rng.randrange(5)
        if action < 3:
            await write_together(world, *rng.sample(names, rng.randrange(1, 4)))
        elif action == 3:
            press(world, coalesce_ms=rng.choice([0.0, 5.0, 20.0]), defers=rng.random() < 0.5)
        else:
            await world.clock.advance(rng.choice([0.001, 0.01, 0.05, 0.3]))
    relax(world)
    await world.clock.advance(0.2)
    for writer in writers:
        for name in {data["topic"] for kind, data in writer.events() if kind == "caught-up"}:
            told = [data for kind, data in writer.events() if kind == "record" and data["topic"] == name]
            got = [record["$seq"] for data in told for record in data["records"]]
            assert got == list(range(1, world.engine.state(name).head_seq + 1)), f"seed {seed}"
    assert watching.api.waiting == 0
