"""Promises of the append log and of topics, one small test each. `topic_mutants.py` names them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, TINY, append, bodies
from tests.unit.topics.engine_doubles import (
    COLD,
    FSYNC,
    World,
    fail_to_sync_the_snapshot,
    read_all,
    rec,
    recs,
    settle,
)

from penstock.errors import PenstockError
from penstock.storage import AppendLog, scan
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics import CommitFailed, Predicate, TopicConfig

T = TypeVar("T")


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def world() -> World:
    return World()


def open_log(disk: FakeDisk) -> AppendLog:
    return AppendLog.open(disk, DIRECTORY, TINY, file_bytes=400)


async def at_once(call: Coroutine[Any, Any, T]) -> T:
    """What a call returns that has nothing to wait for; one that waits all the same is not waited for."""
    task = asyncio.create_task(call)
    await settle()
    assert task.done(), "it waits for something that never comes"
    return task.result()


# The append log


def test_a_sync_covers_everything_that_was_written_before_it(disk: FakeDisk) -> None:
    log = open_log(disk)
    append(log, b"written", sync=False)
    append(log, b"synced", sync=True)
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"written", b"synced"]


def test_a_sync_that_failed_is_not_believed_the_second_time(disk: FakeDisk) -> None:
    log = open_log(disk)
    append(log, b"delivered", sync=False)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.FAIL_ONCE)
    with pytest.raises(PenstockError):
        log.sync()
    log.sync()
    assert log.is_durable
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"delivered"]


def test_a_rotation_leaves_nothing_behind_that_is_not_durable(disk: FakeDisk) -> None:
    log = open_log(disk)
    append(log, b"old", sync=False)
    log.rotate()
    append(log, b"new", sync=True)
    assert bodies(scan(disk.crash(), DIRECTORY, TINY)) == [b"old", b"new"]


def test_a_power_cut_never_takes_away_the_file_that_is_current() -> None:
    for call in range(16):
        for seed in range(8):
            disk = FakeDisk()
            log = open_log(disk)
            disk.plan = PlannedFault(call=len(disk.calls) + call, kind=DiskFault.CRASH_BEFORE)
            with contextlib.suppress(PowerCut):
                log.rotate()
            after = disk.crash(Survival.RANDOM, random.Random(seed))
            assert scan(after, DIRECTORY, TINY).damage == [], f"at call {call}, seed {seed}"


# Topics


async def test_after_a_failed_commit_the_next_write_takes_its_sequences(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    with pytest.raises(CommitFailed):
        await engine.write("t", recs("lost", "lost"))
    assert (await at_once(engine.write("t", recs("kept")))).first_seq == 1
    assert await read_all(engine, "t") == {1: "kept"}


async def test_a_reader_that_waits_is_woken_by_what_is_published(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = asyncio.create_task(engine.diff("t", wait_ms=10_000))
    await settle()
    await engine.write("t", recs(1))
    await settle()
    assert waiting.done()
    assert len(waiting.result().fragments) == 1


async def test_what_had_expired_does_not_come_back_with_a_longer_life(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durable=True, ttl_ms=1000))
    await engine.write("t", recs(1, 2))
    await world.clock.advance(2.0)
    await engine.write("t", recs(3))
    await engine.put_topic("t", TopicConfig(durable=True))
    assert await read_all(await world.kill(), "t") == {3: 3}


async def test_everything_that_a_snapshot_names_survives_a_power_cut(world: World) -> None:
    engine = await world.open()
    for n in range(1, 4):
        await engine.write("t", recs(n), config=FSYNC)
        await engine.checkpoint()
    engine = await world.crash()
    assert (engine.problems, await read_all(engine, "t")) == ([], {1: 1, 2: 2, 3: 3})


async def test_the_log_is_there_until_the_snapshot_that_does_without_it_is_durable(world: World) -> None:
    engine = await world.open(wal_file_bytes=300)
    await engine.put_topic("t", FSYNC)
    for n in range(1, 11):
        await engine.write("t", recs(n))
    await fail_to_sync_the_snapshot(world)
    engine = await world.crash()
    assert engine.exists("t")
    assert (engine.problems, list(await read_all(engine, "t"))) == ([], list(range(1, 11)))


async def test_a_deletion_outlives_the_log_that_told_of_it(world: World) -> None:
    engine = await world.open()
    await engine.write("t", [rec(1), rec(2, tag="x"), rec(3)], config=FSYNC)
    await engine.checkpoint()
    await engine.delete("t", match=Predicate(value="x"))
    await engine.checkpoint()
    engine = await world.crash()
    assert (engine.problems, await read_all(engine, "t")) == ([], {1: 1, 3: 3})


async def test_hot_records_stay_until_it_is_durable_that_they_are_cold(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=2, hot_retain_segments=1)
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(3, 4))
    await fail_to_sync_the_snapshot(world)
    engine = await world.crash()
    assert (engine.problems, list(await read_all(engine, "t"))) == ([], [1, 2, 3, 4])
