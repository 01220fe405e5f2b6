"""Checkpoints: when they are taken, what they keep, and what they remove."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from tests.unit.topics.engine_doubles import (
    COLD,
    FSYNC,
    DetachedWorkers,
    World,
    fail_to_sync_the_snapshot,
    flip_bit,
    read_all,
    rec,
    recs,
    seqs,
    settle,
)

from penstock.testing.disk import DiskFault, PlannedFault, PowerCut, Survival
from penstock.topics import Durability, Predicate, TopicConfig


@pytest.fixture
def world() -> World:
    return World()


def data_files(world: World, root: str = "/data") -> list[str]:
    return [name for name, _ in world.disk.list_files(root) if name.endswith(".data")]


def log_files(world: World) -> list[str]:
    return [name for name in world.files() if name.startswith("wal/") and name.endswith(".log")]


async def test_records_read_the_same_before_and_after(world: World) -> None:
    engine = await world.open(segment_max_events=4)
    batch = [rec({"n": n}, tag=f"t{n}", node="x" if n % 2 else None, meta={"m": n}) for n in range(10)]
    await engine.write("t", batch, config=FSYNC)
    before = (await engine.diff("t", include_tags=True)).fragments
    await engine.checkpoint()
    assert (await engine.diff("t", include_tags=True)).fragments == before
    engine = await world.crash()
    assert (await engine.diff("t", include_tags=True)).fragments == before


async def test_the_active_segment_grows_and_full_ones_are_sealed(world: World) -> None:
    engine = await world.open(segment_max_events=4)
    for n in range(6):
        await engine.write("t", recs(n), config=FSYNC)
        await engine.checkpoint()
    segments = engine._catalog.get("t").log.segments
    assert [(one.first_seq, one.count, one.sealed) for one in segments] == [(1, 4, True), (5, 2, False)]
    assert len(data_files(world)) == 2
    assert len(await read_all(engine, "t")) == 6


async def test_segments_are_sealed_by_size_and_by_age(world: World) -> None:
    engine = await world.open(segment_max_bytes=200, segment_max_age_ms=5000)
    await engine.write("t", recs(*["x" * 60] * 5), config=FSYNC)
    await engine.checkpoint()
    assert len(engine._catalog.get("t").log.segments) > 1
    await world.clock.advance(5)
    await engine.checkpoint()
    assert all(segment.sealed for segment in engine._catalog.get("t").log.segments)


async def test_a_due_checkpoint_is_taken_automatically(world: World) -> None:
    engine = await world.open(checkpoint_interval_ms=2000, checkpoint_bytes=3000)
    await engine.write("t", recs(1), config=FSYNC)
    await world.clock.advance(1.5)
    assert data_files(world) == []
    await world.clock.advance(1.0)
    assert len(data_files(world)) == 1
    await engine.write("t", recs("x" * 4000))
    await world.clock.advance(0.3)
    assert sum(segment.count for segment in engine._catalog.get("t").log.segments) == 2


async def test_a_failed_checkpoint_is_retried_and_does_no_harm(world: World) -> None:
    engine = await world.open(checkpoint_interval_ms=1000)
    await engine.write("t", recs(1), config=FSYNC)
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ALWAYS)
    await world.clock.advance(3)
    assert await read_all(engine, "t") == {1: 1}
    world.disk.plan = None
    await engine.write("t", recs(2))
    await world.clock.advance(3)
    assert len(data_files(world)) == 1
    assert await read_all(engine, "t") == {1: 1, 2: 2}


async def test_log_files_are_removed_when_two_snapshots_do_not_need_them(world: World) -> None:
    engine = await world.open(wal_file_bytes=800)
    await engine.put_topic("t", FSYNC)
    for n in range(60):
        await engine.write("t", recs("x" * 30))
        if n % 10 == 9:
            await engine.checkpoint()
            assert len(log_files(world)) <= 12
    assert len(await read_all(engine, "t")) == 60
    assert len([name for name in world.files() if name.startswith("meta/")]) == 2


async def test_dead_segments_are_removed_with_their_records(world: World) -> None:
    engine = await world.open(segment_max_events=2, cold_dir=COLD, hot_retain_segments=1)
    await engine.put_topic("t", TopicConfig(cap_records=4, durable=True))
    for n in range(20):
        await engine.write("t", recs(n))
        await engine.checkpoint()
    assert len(data_files(world)) + len(data_files(world, COLD)) <= 4
    assert list((await read_all(engine, "t")).values()) == [16, 17, 18, 19]
    await engine.delete("t", before_seq=100)
    await engine.checkpoint()
    assert data_files(world) + data_files(world, COLD) == []


async def test_records_deleted_before_a_checkpoint_leave_no_trace(world: World) -> None:
    engine = await world.open()
    await engine.write("t", [rec("secret", tag="x"), rec("kept")], config=FSYNC)
    await engine.delete("t", match=Predicate(value="x"))
    await engine.checkpoint()
    (name,) = data_files(world)
    assert b"secret" not in world.disk.read(f"/data/{name}")
    assert await read_all(await world.crash(), "t") == {2: "kept"}


async def test_writes_continue_during_a_checkpoint_and_none_is_lost(world: World) -> None:
    engine = await world.open(segment_max_events=3)
    await engine.write("t", recs(*range(5)), config=FSYNC)
    world.workers.hold()
    checkpoint = asyncio.create_task(engine.checkpoint())
    await settle()
    await engine.write("t", recs(5, 6))
    world.workers.release()
    await checkpoint
    await engine.write("t", recs(7))
    for stop in ("crash", "kill", "restart"):
        engine = await getattr(world, stop)()
        assert list((await read_all(engine, "t")).values()) == list(range(8))


async def test_closing_waits_for_a_running_checkpoint(world: World) -> None:
    engine = await world.open(checkpoint_interval_ms=1000)
    await engine.write("t", recs(1, 2, tag="x"), config=FSYNC)
    world.workers.hold()
    await world.clock.advance(2)
    assert world.workers.waiting == 1
    deleting = asyncio.create_task(engine.delete("t", before_seq=2))
    await settle()
    closing = asyncio.create_task(engine.close())
    await settle()
    assert not closing.done()
    world.workers.release()
    await deleting
    await closing
    engine = await world.open()
    assert (await read_all(engine, "t"), engine.problems) == ({2: 2}, [])


@pytest.mark.parametrize("later", range(0, 45, 3))
async def test_a_snapshot_of_unknown_outcome_is_removed_before_the_files_it_names_change(
    world: World, later: int
) -> None:
    """1. its directory sync fails; 2. a record in it is deleted; 3. the next attempt is interrupted."""
    engine = await world.open(segment_max_events=100)
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(3, 4, tag="x"))
    await fail_to_sync_the_snapshot(world)
    await engine.delete("t", match=Predicate(value="x"))
    await engine.write("t", recs(5, 6, 7))
    world.disk.plan = PlannedFault(call=len(world.disk.calls) + later, kind=DiskFault.CRASH_BEFORE)
    with contextlib.suppress(PowerCut):
        await engine.checkpoint()
    for survival in (Survival.EVERYTHING, Survival.NOTHING):
        engine = await world.crash(survival)
        assert (await read_all(engine, "t"), engine.problems) == ({1: 1, 2: 2, 5: 5, 6: 6, 7: 7}, [])


async def test_reserved_sequences_survive_a_checkpoint(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=TopicConfig(durability=Durability.DISK))
    await engine.checkpoint()
    acked = await engine.write("t", recs(2))
    engine = await world.crash()
    assert (await engine.write("t", recs(3))).first_seq > acked.last_seq
    assert seqs(await engine.diff("t"))[0] == 1


async def test_a_damaged_segment_does_not_prevent_the_others_from_being_stored(world: World) -> None:
    engine = await world.open(segment_max_events=100, cold_dir=COLD, hot_retain_segments=1)
    await engine.write("bad", recs(1, 2), config=FSYNC)
    await engine.write("good", recs(1), config=FSYNC)
    await engine.close()
    (name,) = [name for name in world.files() if name.endswith("00000001/seg-0000000000000001.idx")]
    world.disk.truncate(f"/data/{name}", 10)
    engine = await world.open(segment_max_events=2)
    assert len(engine.problems) == 1
    for n in range(5):
        await engine.write("bad", recs(n))
        await engine.write("good", recs(n))
        await engine.checkpoint()
    assert len(engine._catalog.get("good").log.segments) == 3
    assert list(await read_all(engine, "bad", 2)) == [3, 4, 5, 6, 7]
    engine = await world.crash()
    assert len(await read_all(engine, "good")) == 6
    assert len(await read_all(engine, "bad", 2)) == 5


async def test_a_damaged_del_file_does_not_prevent_checkpoints(world: World) -> None:
    engine = await world.open()
    await engine.write("bad", [rec(1), rec(2), rec(3, tag="x")], config=FSYNC)
    await engine.write("good", recs(1), config=FSYNC)
    await engine.checkpoint()
    await engine.delete("bad", match=Predicate(value="x"))
    await engine.checkpoint()
    world.unplug(Survival.EVERYTHING)
    (name,) = [f"/data/{name}" for name in world.files() if name.endswith(".del")]
    flip_bit(world.disk, name, world.disk.stat(name).size * 8 - 1)
    engine = await world.open()
    assert len(engine.problems) == 1
    for n in (4, 5):
        await engine.write("bad", recs(n))
        await engine.write("good", recs(n))
        await engine.checkpoint()
    engine = await world.crash()
    assert await read_all(engine, "bad", 3) == {4: 4, 5: 5}
    assert await read_all(engine, "good") == {1: 1, 2: 4, 3: 5}
    assert len(engine.problems) == 1


async def _left_alone_by_its_caller() -> World:
    """Store a checkpoint after its caller was cancelled, then delete a record in it."""
    world = World(make_workers=DetachedWorkers)
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", [rec(4, tag="x"), rec(5), rec(6)])
    world.workers.hold()
    checkpoint = asyncio.create_task(engine.checkpoint())
    await settle()
    checkpoint.cancel()
    await settle()
    world.workers.release()
    await settle()
    assert checkpoint.cancelled()
    await engine.delete("t", match=Predicate(value="x"))
    return world


async def test_a_checkpoint_whose_caller_was_cancelled_counts_for_the_next_one() -> None:
    """A power failure at any point must not change the files that the snapshot names."""
    for call in range(100):
        world = await _left_alone_by_its_caller()
        world.disk.plan = PlannedFault(call=len(world.disk.calls) + call, kind=DiskFault.CRASH_AFTER)
        try:
            await world.engine.checkpoint()
        except PowerCut:
            engine = await world.crash(Survival.RANDOM, rng=random.Random(call))
            assert (await read_all(engine, "t"), engine.problems) == ({1: 1, 2: 2, 3: 3, 5: 5, 6: 6}, [])
        else:
            break
    assert call > 10
