"""`consistency: "strong"`: only synced records are pushed, and nothing waits for longer than a sync."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from tests.unit.servers.topics.live_doubles import FakeSink, Watching
from tests.unit.topics.engine_doubles import World, recs, seqs, settle

from penstock.storage import Entry
from penstock.testing.disk import DiskFault, PlannedFault
from penstock.testing.topics_kit import InlineCommitter
from penstock.topics import TopicConfig
from penstock.topics.config import Durability
from penstock.topics.errors import Throttled
from penstock.topics.log.wal import WalShard
from penstock.topics.routers.model import RouterConfig


class Fences:
    """Requested syncs, held until a test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[tuple[InlineCommitter, Entry]] = []
        self.held = False
        self.asked = 0
        self._submit = InlineCommitter.submit
        fences = self

        def submit(self: InlineCommitter, entry: Entry, *, hold: bool = False) -> None:
            is_fence = entry.sync and not entry.buffers
            fences.asked += is_fence
            if is_fence and fences.held:
                fences.waiting.append((self, entry))
            else:
                fences._submit(self, entry, hold=hold)

        monkeypatch.setattr(InlineCommitter, "submit", submit)

    async def let(self) -> None:
        """Complete the waiting syncs; later ones wait again."""
        waiting, self.waiting = self.waiting, []
        for committer, entry in waiting:
            self._submit(committer, entry)
        await settle()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(max_topics=0, wal_shards=2)
    await made.open()
    yield made
    await made.engine.close()


@pytest.fixture
def watching(world: World) -> Watching:
    return Watching(world)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Fences:
    return Fences(monkeypatch)


async def put(world: World, durability: Durability = Durability.DISK, **config: int) -> None:
    await world.engine.put_topic("x", TopicConfig(durability=durability, **config))  # type: ignore[arg-type]


async def follow(watching: Watching, **fields: object) -> FakeSink:
    return (await watching.follow("x", consistency="strong", **fields))[1]


async def test_a_record_is_pushed_as_soon_as_it_is_synced(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    strong = await follow(watching)
    _, weak = await watching.follow("x")
    fences.held = True
    await world.engine.write("x", recs(1))
    await settle()
    assert weak.seqs() == [1], "others do not wait"
    assert strong.seqs() == []
    await fences.let()
    assert strong.seqs() == [1]
    assert strong.names() == ["caught-up", "record", "caught-up"]


async def test_records_written_after_the_sync_wait_for_the_next_one(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    strong = await follow(watching)
    fences.held = True
    for number in range(3):
        await world.engine.write("x", recs(number))
        await settle()
    assert len(fences.waiting) == 1, "one at a time"
    await fences.let()
    assert strong.seqs() == [1]
    assert len(fences.waiting) == 1, "nobody has to write for the next one"
    await fences.let()
    assert strong.seqs() == [1, 2, 3]
    assert fences.waiting == []


async def test_the_backlog_comes_as_one_batch_and_then_caught_up(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    await world.engine.write("x", recs(1, 2))
    fences.held = True
    strong = await follow(watching)
    assert strong.names() == [], "it is not caught up: there are records"
    await fences.let()
    assert strong.names() == ["record", "caught-up"]
    assert strong.seqs() == [1, 2]


async def test_under_continuous_writes_it_proceeds_and_catches_up(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    await world.engine.write("x", recs(1))
    fences.held = True
    strong = await follow(watching)
    for number in range(10):
        await world.engine.write("x", recs(number))
        await settle()
        await fences.let()
        assert len(strong.seqs()) >= number + 1
        assert strong.seqs() == list(range(1, len(strong.seqs()) + 1))
    assert strong.names().count("caught-up") >= 5


@pytest.mark.parametrize("durability", [Durability.EPHEMERAL, Durability.MEMORY, Durability.FSYNC])
async def test_other_classes_have_nothing_to_wait_for(
    world: World, watching: Watching, fences: Fences, durability: Durability
) -> None:
    await put(world, durability)
    fences.held = True
    strong = await follow(watching)
    await world.engine.write("x", recs(1, 2))
    await settle()
    assert strong.seqs() == [1, 2]
    assert fences.asked == 0


async def test_without_strong_watchers_no_sync_is_requested(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    await watching.follow("x")
    await world.engine.write("x", recs(1))
    await settle()
    assert fences.asked == 0
    leaving = [await watching.follow("x", consistency="strong") for _ in range(2)]
    assert fences.asked == 1
    for live, _ in leaving:
        await world.engine.write("x", recs(1))
        await settle()
        live.closed()
    assert fences.asked == 3
    await world.engine.write("x", recs(1))
    await settle()
    assert fences.asked == 3, "nobody wants them any more"


async def test_a_watcher_from_the_head_also_waits_for_existing_records(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    await world.engine.write("x", recs(1, 2))
    fences.held = True
    wid = await watching.create(topics={"x": {"tail": True}}, consistency="strong")
    _, strong = await watching.open(wid)
    assert strong.names() == []
    await fences.let()
    assert strong.names() == ["caught-up"]
    await world.engine.write("x", recs(3))
    await settle()
    await fences.let()
    assert strong.seqs() == [3]


async def test_a_failed_sync_is_retried_after_a_second_and_nothing_is_pushed_before(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    strong = await follow(watching)
    fences.held = True
    await world.engine.write("x", recs(1))
    await settle()
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    await fences.let()
    fences.held = False
    await world.clock.advance(0.9)
    assert strong.seqs() == []
    await world.clock.advance(0.2)
    assert strong.seqs() == [1]


async def test_a_failed_sync_is_retried_by_the_next_publish(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    strong = await follow(watching)
    fences.held = True
    await world.engine.write("x", recs(1))
    await settle()
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    await fences.let()
    fences.held = False
    assert strong.seqs() == []
    await world.engine.write("x", recs(2))
    await settle()
    assert strong.seqs() == [1, 2]


async def test_a_full_log_is_asked_again_for_a_sync(
    world: World, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(world)
    strong = await follow(watching)
    check_room, is_full = WalShard.check_room, False

    def refuse(self: WalShard) -> None:
        if is_full:
            raise Throttled("full")
        check_room(self)

    monkeypatch.setattr(WalShard, "check_room", refuse)
    writing = asyncio.ensure_future(world.engine.write("x", recs(1)))
    await asyncio.sleep(0)
    is_full = True
    await writing
    await world.clock.advance(3)
    assert strong.seqs() == []
    is_full = False
    await world.clock.advance(1.1)
    assert strong.seqs() == [1]


async def test_a_client_that_leaves_during_a_sync_leaves_nothing(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    live, writer = await watching.follow("x", consistency="strong")
    fences.held = True
    await world.engine.write("x", recs(1))
    await settle()
    live.closed()
    await fences.let()
    assert writer.seqs() == []
    assert watching.api.waiting == 0


async def test_a_deleted_topic_is_reported_immediately(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    strong = await follow(watching)
    fences.held = True
    await world.engine.write("x", recs(1))
    await settle()
    await world.engine.remove_topic("x")
    await settle()
    assert strong.names() == ["caught-up", "topic-deleted"]
    await fences.let()


async def test_a_topic_with_reduced_durability_holds_back_from_then_on(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world, Durability.MEMORY)
    strong = await follow(watching)
    await world.engine.write("x", recs(1))
    await put(world)
    fences.held = True
    await world.engine.write("x", recs(2))
    await settle()
    assert strong.seqs() == [1]
    await fences.let()
    assert strong.seqs() == [1, 2]


async def test_a_gap_is_reported_even_if_records_are_evicted_before_they_are_synced(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world, cap_records=2)
    strong = await follow(watching)
    fences.held = True
    for number in range(6):
        await world.engine.write("x", recs(number, number))
        await settle()
        await fences.let()
    while fences.waiting:
        await fences.let()
    told: list[int] = []
    for name, data in strong.events():
        if name == "record":
            told += [record["$seq"] for record in data["records"]]
        elif name == "tombstone":
            assert data["gap_from"] == len(told) + 1
            told += range(data["gap_from"], data["gap_to"] + 1)
    assert told == list(range(1, 13))


async def test_a_copy_waits_for_the_sync_of_its_original(
    world: World, watching: Watching, fences: Fences
) -> None:
    await put(world)
    topic = world.engine._catalog.get
    for feeder in map(str, range(50)):
        await world.engine.put_topic(feeder, TopicConfig())
        if topic(feeder).shard is not topic("x").shard:
            break
    await world.engine.put_router("r", RouterConfig(source=feeder, dest="x"))
    strong = await follow(watching)
    fences.held = True
    await world.engine.write(feeder, recs(1))
    await world.clock.advance(0.2)
    assert strong.seqs() == []
    assert {committer for committer, _ in fences.waiting} == set(world.committers.all)
    await fences.let()
    assert strong.seqs() == [1]


@pytest.mark.parametrize("seed", range(25))
async def test_pushed_records_survive_a_power_failure(seed: int) -> None:
    rng = random.Random(seed)
    world = World(max_topics=0, wal_shards=2)
    await world.open()
    await put(world, cap_records=rng.choice([0, 0, 8]))
    await world.engine.put_router("r", RouterConfig(source="source", dest="x"))
    watching = Watching(world)
    strong, writers = None, []
    for _ in range(rng.randrange(5, 40)):
        action = rng.randrange(8)
        if action < 4:
            name = rng.choice(["x", "source"])
            await world.engine.write(name, recs(*range(rng.randrange(1, 4))))
        elif action == 4:
            strong = await follow(watching, limit=rng.choice([1, 100]))
            writers.append(strong)
        elif action == 5:
            world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
            await world.clock.advance(0.001)
            world.disk.plan = None
        elif action == 6:
            await world.clock.advance(rng.choice([0.01, 0.1, 1.1]))
        else:
            await asyncio.sleep(0)
    pushed = {seq for writer in writers for seq in writer.seqs()}
    before = set(seqs(await world.engine.diff("x", limit=1000)))
    engine = await world.crash()
    after = set(seqs(await engine.diff("x", limit=1000)))
    assert pushed & before <= after, f"seed {seed}"
    await engine.close()
