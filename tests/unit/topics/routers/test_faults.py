"""Routers after a restart and a deletion, between other commits, and without room."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.unit.topics.engine_doubles import DATA, World, read_all, recs, settle, values
from tests.unit.topics.routers.test_recovery import DISK, FSYNC

from penstock.errors import StorageFull
from penstock.testing.topics_kit import InlineCommitter
from penstock.topics import Engine, Predicate, RouterConfig, TopicConfig, TopicNotFound
from penstock.topics.checkpoints.snapshot import load_latest
from penstock.topics.routers.copy_commit import PASS_BYTES_MAX, PASS_ROWS_MAX
from penstock.topics.routers.routing import COPIES_BYTES_MIN
from penstock.topics.routers.table import Router
from penstock.topics.tools.backup import backup
from penstock.topics.tools.restore import restore

AB = RouterConfig(source="a", dest="b")


async def between(world: World, config: TopicConfig) -> Engine:
    engine = await world.open()
    await engine.put_topic("a", config)
    await engine.put_topic("b", config)
    await engine.put_router("a->b", AB)
    return engine


async def copied_from_a_segment(world: World, config: TopicConfig) -> dict[int, object]:
    """Return copies that are only in a frame, of records that are only in a segment."""
    engine = await between(world, config)
    await engine.write("a", recs(1, 2, 3))
    await engine.checkpoint()
    assert engine._routing.table.leaving("a")[0].cursor == 0
    return await read_all(engine, "b")


# ---- a source that goes after a restart ------------------------------------------------------------------


@pytest.mark.parametrize("config", [DISK, FSYNC])
async def test_a_source_deleted_after_a_restart_stays_until_its_copies_are_stored(
    config: TopicConfig,
) -> None:
    world = World()
    copied = await copied_from_a_segment(world, config)
    engine = await world.kill()
    await engine.remove_topic("a")
    await settle()
    engine = await world.kill()
    assert engine.problems == []
    assert await read_all(engine, "b") == copied
    await engine.close()


@pytest.mark.parametrize("config", [DISK, FSYNC])
async def test_a_copy_whose_original_was_in_a_missing_segment_is_reported(config: TopicConfig) -> None:
    world = World()
    await copied_from_a_segment(world, config)
    for name in world.files():
        if "/seg-" in name:  # the copies are in no segment
            world.disk.unlink(f"{DATA}/{name}")
    engine = await world.kill()
    assert any("copies of records that cannot be read" in problem for problem in engine.problems)
    await engine.close()


# ---- read your writes ------------------------------------------------------------------------------------


def hold(world: World) -> InlineCommitter:
    (committer,) = world.committers.all
    committer.held = True
    return committer


async def behind_a_pass(world: World) -> InlineCommitter:
    """Hold a pass in flight. The next commit contains it and whatever is submitted now."""
    engine = await between(world, DISK)
    await engine.write("a", recs(0))
    await engine.drain("b")
    await engine.write("a", recs(1))
    committer = hold(world)
    engine._routing.refresh("b")
    await settle()
    assert len(committer.waiting) == 1
    return committer


async def test_a_write_in_the_commit_of_a_pass_is_in_the_next_diff() -> None:
    world = World()
    committer = await behind_a_pass(world)

    async def write_and_read() -> list[object]:
        await world.engine.write("a", recs(2))
        return values(await world.engine.diff("b"))

    reading = asyncio.ensure_future(write_and_read())
    await settle()
    committer.held = False
    committer.commit()
    assert await reading == [0, 1, 2]
    await world.engine.close()


@pytest.mark.parametrize("how", ["topic", "router"])
async def test_a_write_in_the_commit_of_a_pass_is_copied_before_source_or_destination_is_deleted(
    how: str,
) -> None:
    world = World()
    committer = await behind_a_pass(world)

    async def write_and_remove() -> None:
        await world.engine.write("a", recs(2))
        if how == "topic":
            await world.engine.remove_topic("a")
        else:
            await world.engine.remove_router("a->b")

    removing = asyncio.ensure_future(write_and_remove())
    await settle()
    committer.held = False
    committer.commit()
    await removing
    assert list((await read_all(world.engine, "b")).values()) == [0, 1, 2]
    await world.engine.close()


# ---- backups ---------------------------------------------------------------------------------------------


async def test_a_backup_waits_for_a_snapshot_that_does_not_need_missing_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. copies; 2. the source is deleted; 3. a backup reads the snapshot; 4. a checkpoint drops it."""
    world = World()
    copied = await copied_from_a_segment(world, FSYNC)
    await world.engine.remove_topic("a")
    await settle()
    load = load_latest
    early = [load(world.disk, f"{DATA}/meta")]
    await world.engine.checkpoint()
    await settle()
    module = importlib.import_module(
        "penstock.topics.tools.backup"
    )  # the package exports a function of that name
    monkeypatch.setattr(module, "load_latest", lambda *where: early.pop() if early else load(*where))
    backup(world.disk, DATA, "/backup")
    await world.engine.close()
    restore(world.disk, "/backup", "/restored")
    restored = await World(disk=world.disk, data_dir="/restored").open()
    assert restored.problems == []
    assert await read_all(restored, "b") == copied
    await restored.close()


# ---- bounds ----------------------------------------------------------------------------------------------


async def test_a_pass_that_copies_nothing_examines_few_records_and_yields() -> None:
    world = World(wal_file_bytes=1 << 24)
    engine = await world.open()
    await engine.put_router("a->b", replace(AB, filter=Predicate(value="rare", is_prefix=False)))
    await engine.write("a", recs(*range(5000), tag="common"))
    await engine.write("a", recs("found", tag="rare"))
    router = engine._routing.table.leaving("a")[0]
    seen: list[int] = []
    draining = asyncio.ensure_future(engine.drain("b"))
    while not draining.done():
        seen.append(router.cursor)
        await asyncio.sleep(0)
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= PASS_ROWS_MAX
    assert values(await engine.diff("b")) == ["found"]
    await engine.close()


async def test_copies_wait_in_the_source_when_checkpoints_fail() -> None:
    world = World(wal_file_bytes=1 << 22, checkpoint_bytes=1 << 20)
    engine = await between(world, DISK)
    assert engine._maintenance is not None
    store, engine._maintenance._store = engine._maintenance._store, no_room  # type: ignore[assignment,method-assign]
    for number in range(200):
        await engine.write("a", recs("x" * 60_000, number))
        await engine.drain("b")
    dest, written = engine._catalog.get("b"), engine.state("a").head_seq
    assert COPIES_BYTES_MIN <= dest.log.chunk_bytes < COPIES_BYTES_MIN + 2 * PASS_BYTES_MAX
    assert engine.state("b").head_seq < written
    engine._maintenance._store = store  # type: ignore[method-assign]
    await engine.checkpoint()
    await world.clock.advance(3)
    assert engine.state("b").head_seq == written
    await engine.close()


def no_room(*_: object) -> None:
    raise StorageFull("no room for a segment")


# ---- routers that cannot continue ------------------------------------------------------------------


async def full(world: World) -> Engine:
    """Return a destination without room, and records that wait for it."""
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(cap_records=2))
    await engine.put_topic("b", TopicConfig(discard="reject", cap_records=1))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1))
    await engine.write("a", recs(2))
    await engine.drain("b")
    return engine


def count_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the time of every pass."""
    times: list[float] = []
    run = engine._routing._pass

    async def counted(router: Router) -> bool:
        times.append(engine._routing._clock.monotonic())
        return await run(router)

    monkeypatch.setattr(engine._routing, "_pass", counted)
    return times


async def test_a_router_without_room_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    engine = await full(world)
    times = count_passes(engine, monkeypatch)
    await world.clock.advance(20)
    assert 8 <= len(times) <= 16
    pauses = [round(after - before, 3) for before, after in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(2, abs=0.06)
    await engine.close()


@pytest.mark.parametrize("how", ["delete", "config"])
async def test_a_destination_that_gets_room_is_served_by_the_next_tick(how: str) -> None:
    world = World()
    engine = await full(world)
    await world.clock.advance(20)
    if how == "delete":
        await engine.delete("b", before_seq=2)
    else:
        await engine.put_topic("b", TopicConfig(discard="reject", cap_records=5))
    await world.clock.advance(0.1)
    assert engine.state("b").head_seq == 2
    await engine.close()


async def test_a_reader_makes_a_backing_off_router_retry_immediately() -> None:
    world = World()
    engine = await full(world)
    await world.clock.advance(20)
    await engine.delete("b", before_seq=2)
    assert values(await engine.diff("b")) == [2]
    await engine.close()


async def test_losses_of_a_source_while_its_router_waits_for_room_are_not_reported_repeatedly() -> None:
    world = World(wal_file_bytes=1 << 20)
    engine = await full(world)
    await world.clock.advance(5)
    (committer,) = world.committers.all
    before, writes = committer.stats().entries, 200
    for number in range(writes):
        await engine.write("a", recs(number))
        await world.clock.advance(0.05)
    assert committer.stats().entries - before - writes <= 15
    await engine.close()


async def test_a_full_disk_is_not_retried_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    engine = await between(world, DISK)
    await engine.write("a", recs(1))
    log = engine._catalog.get("b").shard.log

    def reserve(size: int, *, urgent: bool = False) -> None:
        raise StorageFull("there is no room")

    with monkeypatch.context() as patch:
        patch.setattr(log, "reserve", reserve)
        times = count_passes(engine, patch)
        await world.clock.advance(10)
        assert len(times) <= 12
    await world.clock.advance(2.1)
    assert engine.state("b").head_seq == 1
    await engine.close()


# ---- odds and ends ---------------------------------------------------------------------------------------


async def test_a_change_that_is_decided_after_its_topic_was_deleted_is_refused() -> None:
    world = World()
    engine = await between(world, DISK)
    router = engine._routing.table.leaving("a")[0]
    committer = hold(world)
    changing = asyncio.ensure_future(engine.put_router("a->b", replace(AB, preserve_tag=False)))
    await settle()
    assert len(committer.waiting) == 1
    engine._routing.topic_left(router.dest)
    committer.held = False
    committer.commit()
    with pytest.raises(TopicNotFound):
        await changing
    assert engine.router_count == 0
    await engine.close()


async def test_lost_ranges_of_a_queue_do_not_accumulate() -> None:
    world = World(wal_file_bytes=1 << 22)
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(cap_records=1))
    await engine.put_topic("b", TopicConfig(type="queue"))
    await engine.put_router("a->b", AB)
    for _ in range(100):
        await engine.write("a", recs("lost", "copied"))
        jobs = await engine.claim("b", "n", max=10)
        await engine.ack("b", "n", jobs.seqs)
    queue = engine._catalog.get("b")
    assert len(queue.log.trims.ranges) <= 64
    assert queue.log.floors.floor <= queue.log.index.earliest_seq
    await engine.write("a", recs("lost", "copied"))
    page = await engine.diff("b")
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.reason) == (1, "source_trim")
    told, at = page.tombstone.missed_estimate, page.next_from_seq
    engine = await world.kill()
    queue = engine._catalog.get("b")
    assert len(queue.log.trims.ranges) <= 65
    while not page.caught_up:
        page = await engine.diff("b", at)
        at = page.next_from_seq
        told += 0 if page.tombstone is None else page.tombstone.missed_estimate
    assert told >= 101
    assert values(page)[-1:] == ["copied"]
    await engine.close()


async def test_a_lost_range_at_the_front_is_the_floor_after_a_restart_too() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(cap_records=1))
    await engine.put_topic("b", TopicConfig(cap_records=2))
    await engine.put_router("a->b", AB)
    for number in range(6):
        await engine.write("a", recs("lost", number))
        await engine.drain("b")
    before = engine._catalog.get("b")
    engine = await world.kill()
    after = engine._catalog.get("b")
    assert after.log.floors.floor == before.log.floors.floor
    assert after.log.trims.ranges == before.log.trims.ranges
    await engine.close()


async def test_a_source_of_very_many_routers_notifies_all_of_them() -> None:
    world = World(wal_file_bytes=1 << 22, max_routers=0)
    engine = await world.open()
    for number in range(300):
        await engine.put_router(f"r{number}", RouterConfig(source="a", dest=f"d{number}"))
    await engine.write("a", recs(1))
    await engine.write("a", recs(2))
    assert values(await engine.diff("d299")) == [1, 2]
    await world.clock.advance(0.2)
    assert {engine.state(f"d{number}").head_seq for number in range(300)} == {2}
    await engine.write("a", recs(3))
    await world.clock.advance(0.2)
    assert {engine.state(f"d{number}").head_seq for number in range(300)} == {3}
    await engine.close()


async def test_records_that_arrive_during_a_pass_reach_listeners_without_a_tick() -> None:
    world = World()
    committer = await behind_a_pass(world)
    heard: list[int] = []
    dest = world.engine._catalog.get("b")
    dest.subscribers.listen(lambda: heard.append(dest.log.index.head_seq))
    writing = asyncio.ensure_future(world.engine.write("a", recs(2)))
    await settle()
    committer.held = False
    committer.commit()
    await writing
    await settle()
    assert heard == [2, 3]
    await world.engine.close()


async def test_ranges_lost_between_live_records_take_no_segment_rows() -> None:
    world = World(segment_max_events=10_000)
    engine = await between(world, FSYNC)
    await engine.write("b", recs("before"))
    lost = 1_000_000
    engine._catalog.get("b").mark_lost(lost)
    engine._catalog.get("b").log.forget_in_flight()
    await engine.write("b", recs("after", "last"))
    await engine.checkpoint()
    assert [entry.count for entry in engine._catalog.get("b").log.segments] == [1, 2]
    await engine.write("b", recs("more"))
    await engine.checkpoint()
    assert [entry.count for entry in engine._catalog.get("b").log.segments] == [1, 3]
    engine = await world.kill()
    assert engine.problems == []
    found = {1: "before", lost + 2: "after", lost + 3: "last", lost + 4: "more"}
    assert await read_all(engine, "b") == found
    page = await engine.diff("b", 1)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (2, lost + 1)
    await engine.close()
