"""A slow or silent cold tier delays nothing, and interrupted moves are repeated."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from tests.unit.topics.engine_doubles import (
    COLD,
    FSYNC,
    World,
    fail_to_sync_the_snapshot,
    read_all,
    recs,
    settle,
)

from penstock.errors import Unavailable
from penstock.storage.fs import FileSystem, OsFileSystem
from penstock.topics import Engine, EngineConfig, TopicConfig
from penstock.topics.errors import ShuttingDown
from penstock.topics.workers import LooseThreads, ThreadWorkers


class Silent:
    """A file system that blocks new files below one directory until it is released."""

    def __init__(self, below: str) -> None:
        self._fs = OsFileSystem()
        self._below = below
        self.free = threading.Event()
        self.asked = threading.Event()

    def create(self, path: str) -> object:
        self._wait(path)
        return self._fs.create(path)

    def list_files(self, path: str) -> object:
        self._wait(path)
        return self._fs.list_files(path)

    def _wait(self, path: str) -> None:
        if path.startswith(self._below + "/topics/0"):
            self.asked.set()
            self.free.wait(60)

    def __getattr__(self, name: str) -> object:
        return getattr(self._fs, name)


async def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        data_dir=str(tmp_path / "data"),
        cold_dir=str(tmp_path / "cold"),
        wal_shards=1,
        wal_file_bytes=64 * 1024,
        segment_max_events=2,
        hot_retain_segments=0,
        checkpoint_interval_ms=50,
    )


def newest_snapshot(tmp_path: Path) -> str:
    return max((path.name for path in (tmp_path / "data" / "meta").glob("snapshot-*.bin")), default="")


async def test_a_cold_tier_that_does_not_respond_delays_no_checkpoint_and_no_stop(tmp_path: Path) -> None:
    silent = Silent(str(tmp_path / "cold"))
    engine = await Engine.open(config(tmp_path), fs=cast("FileSystem", silent))
    try:
        await engine.write("t", recs(*range(10)), config=FSYNC)
        await engine.write("gone", recs(1, 2), config=FSYNC)
        await until(silent.asked.is_set)
        before = newest_snapshot(tmp_path)
        await engine.write("t", recs(*range(10, 20)))
        await engine.remove_topic("gone")
        await until(lambda: newest_snapshot(tmp_path) > before)
        assert len(await read_all(engine, "t")) == 20
        started = time.monotonic()
        await engine.close()
        assert time.monotonic() - started < 10
    finally:
        silent.free.set()
    async with await Engine.open(config(tmp_path)) as engine:
        assert (list((await read_all(engine, "t")).values()), engine.problems) == (list(range(20)), [])
        await engine.checkpoint()
        assert all(segment.cold for segment in engine._catalog.get("t").log.segments)
        assert list((await read_all(engine, "t")).values()) == list(range(20))
    assert not list((tmp_path / "data").rglob("seg-*.data"))


async def test_segments_move_by_themselves_and_hot_data_follows(tmp_path: Path) -> None:
    async with await Engine.open(config(tmp_path)) as engine:
        await engine.write("t", recs(*range(10)), config=FSYNC)
        await until(lambda: len(list((tmp_path / "cold").rglob("seg-*.data"))) == 5)
        await until(lambda: not list((tmp_path / "data").rglob("seg-*.data")))
        assert list((await read_all(engine, "t")).values()) == list(range(10))


# ---- step by step ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World(cold_dir=COLD, segment_max_events=2, hot_retain_segments=0)


def data_files(world: World, root: str) -> int:
    return sum(name.endswith(".data") for name, _ in world.disk.list_files(root))


@contextlib.contextmanager
def failing(world: World) -> Iterator[list[int]]:
    """Fail every write to the cold tier, and yield the number of attempts."""
    create, tried = world.disk.create, [0]

    def refuse(path: str) -> object:
        if path.startswith(COLD):
            tried[0] += 1
            raise Unavailable("the cold tier does not answer")
        return create(path)

    world.disk.create = refuse  # type: ignore[method-assign,assignment]
    yield tried
    world.disk.create = create  # type: ignore[method-assign]


async def test_after_a_failure_all_topics_wait_before_it_is_tried_again(world: World) -> None:
    engine = await world.open()
    for name in ("a", "b"):
        await engine.write(name, recs(*range(6)), config=FSYNC)
    with failing(world) as tried:
        await engine.checkpoint()
        await engine.checkpoint()
        assert tried == [1]
        await world.clock.advance(31)
        await engine.checkpoint()
        assert tried == [2]
    await engine.checkpoint()
    assert data_files(world, COLD) == 0
    await world.clock.advance(120)
    await settle()
    await world.clock.advance(120)
    assert (data_files(world, COLD), data_files(world, "/data")) == (6, 0)


async def test_a_damaged_segment_does_not_prevent_the_others_from_moving(world: World) -> None:
    engine = await world.open(hot_retain_segments=9)
    for name in ("a", "b"):
        await engine.write(name, recs(*range(4)), config=FSYNC)
    await engine.checkpoint()
    await engine.close()
    world.disk.unlink("/data/topics/00000001/seg-0000000000000001.data")
    engine = await world.open(hot_retain_segments=0)
    assert [segment.cold for segment in engine._catalog.get("a").log.segments] == [False, True]
    assert [segment.cold for segment in engine._catalog.get("b").log.segments] == [True, True]


async def test_copies_that_no_snapshot_names_are_made_again_after_a_crash(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(6)), config=FSYNC)
    assert engine._maintenance is not None
    await engine._maintenance._checkpoint()
    assert engine._maintenance._cold is not None
    await engine._maintenance._cold.tend(engine._catalog.all())
    assert (data_files(world, COLD), data_files(world, "/data")) == (3, 3)
    engine = await world.crash()
    assert (data_files(world, COLD), data_files(world, "/data")) == (3, 0)
    assert (len(await read_all(engine, "t")), engine.problems) == (6, [])


async def test_hot_data_stays_until_the_snapshot_that_says_cold_is_durable(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(6)), config=FSYNC)
    assert engine._maintenance is not None
    await engine._maintenance._checkpoint()
    assert engine._maintenance._cold is not None
    await engine._maintenance._cold.tend(engine._catalog.all())
    await fail_to_sync_the_snapshot(world)
    assert data_files(world, "/data") == 3
    world.unplug()
    engine = await world.open(hot_retain_segments=9)
    assert (len(await read_all(engine, "t")), engine.problems) == (6, [])


async def test_a_segment_that_dies_between_its_copy_and_the_snapshot_is_removed_from_both_tiers(
    world: World,
) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(6)), config=FSYNC)
    assert engine._maintenance is not None
    await engine._maintenance._checkpoint()
    assert engine._maintenance._cold is not None
    await engine._maintenance._cold.tend(engine._catalog.all())
    await engine.delete("t", before_seq=5)
    await engine.checkpoint()
    assert (data_files(world, COLD), data_files(world, "/data")) == (1, 0)
    assert engine._maintenance._cold.copied == {}
    await engine.remove_topic("t")
    await settle()
    assert (data_files(world, COLD), data_files(world, "/data")) == (0, 0)


async def test_a_stop_moves_nothing_and_the_next_start_does(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(6)), config=TopicConfig(durable=True))
    await engine.close()
    assert (data_files(world, COLD), data_files(world, "/data")) == (0, 3)
    engine = await world.open()
    assert (data_files(world, COLD), data_files(world, "/data")) == (3, 0)
    assert (await engine.diff("t")).cold_segments_read == 3


# ---- the thread --------------------------------------------------------------------------------------


async def test_a_thread_works_in_order_and_reports_errors() -> None:
    thread, done = LooseThreads(1, "cold"), []

    def fail() -> None:
        raise Unavailable("not now")

    calls: list[Awaitable[None]] = [thread(lambda n=n: done.append(n)) for n in range(3)]  # type: ignore[misc]
    await asyncio.gather(*calls)
    with pytest.raises(Unavailable, match="not now"):
        await thread(fail)
    assert done == [0, 1, 2]
    thread.close()


async def test_a_closed_thread_starts_no_more_work() -> None:
    thread, begun, gate = LooseThreads(1, "cold"), threading.Event(), threading.Event()
    done: list[object] = []

    def slow() -> None:
        begun.set()
        done.append(gate.wait(60))

    busy = asyncio.ensure_future(thread(slow))
    late = asyncio.ensure_future(thread(lambda: done.append("late")))
    await until(begun.is_set)
    thread.close()
    busy.cancel()
    late.cancel()
    gate.set()
    (worker,) = thread._threads
    worker.join(10)
    assert (worker.is_alive(), worker.daemon, done) == (False, True, [True])


async def test_workers_close_although_reads_of_the_cold_tier_hang() -> None:
    workers, gate = ThreadWorkers(), threading.Event()
    begun: list[int] = []

    def hang() -> bool:
        begun.append(1)
        return gate.wait(60)

    hanging = [asyncio.ensure_future(workers.fetch(hang)) for _ in range(4)]
    queued = asyncio.ensure_future(workers.fetch(hang))
    await until(lambda: len(begun) == 4)
    workers.close()
    gate.set()
    assert await asyncio.gather(*hanging) == [True] * 4
    with pytest.raises(ShuttingDown):
        await queued
