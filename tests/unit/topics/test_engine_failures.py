"""Disk failures: nothing is acknowledged falsely, and the engine keeps working."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.unit.topics.engine_doubles import (
    FSYNC,
    World,
    gather_outcomes,
    read_all,
    recs,
    seqs,
    settle,
    values,
)

from penstock.errors import PenstockError, StorageFull
from penstock.storage.fs import LockHeld, WritableFile
from penstock.testing.disk import DiskFault, PlannedFault, Survival
from penstock.topics import CommitFailed, Durability, NotReady, Predicate, TopicConfig, TopicNotFound
from penstock.topics.topic.topic import Topic


@contextlib.asynccontextmanager
async def failing(
    world: World, kind: DiskFault = DiskFault.FAIL_ALWAYS, after: int = 0
) -> AsyncIterator[None]:
    """Fail the disk from now on, or after this number of calls, until the end of the block."""
    world.disk.plan = PlannedFault(call=len(world.disk.calls) + after, kind=kind)
    yield
    await settle()
    world.disk.plan = None


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
async def test_after_a_failed_commit_nothing_is_published_and_the_sequences_are_free(
    world: World, durability: str
) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=Durability(durability)))
    await engine.write("t", recs("before"))
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.write("t", recs("lost", "lost"))
        assert engine.state("t").head_seq == 1
        assert values(await engine.diff("t")) == ["before"]
    result = await engine.write("t", recs("after"))
    assert result.first_seq == 2
    assert values(await engine.diff("t")) == ["before", "after"]
    for stop in ("kill", "restart"):
        engine = await getattr(world, stop)()
        assert list((await read_all(engine, "t")).values()) == ["before", "after"]
        assert engine.problems == []


async def test_everything_queued_after_a_failure_fails_too(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    await engine.put_topic("u", FSYNC)
    world.committers.hold()
    calls = [engine.write("t", recs(1)), engine.write("t", recs(2)), engine.write("u", recs(3))]
    early = [asyncio.ensure_future(call) for call in calls]
    await settle()
    async with failing(world):
        world.committers.release()
        # These writes depend on the failed one, before the failure is known.
        late = [asyncio.ensure_future(engine.write(name, recs(4))) for name in ("t", "u")]
        outcomes = await gather_outcomes([*early, *late])
    assert [type(outcome) for outcome in outcomes] == [CommitFailed] * 5
    assert (await engine.write("t", recs("x"))).first_seq == 1
    assert (await engine.write("u", recs("y"))).first_seq == 1
    engine = await world.crash()
    assert (await read_all(engine, "t"), await read_all(engine, "u")) == ({1: "x"}, {1: "y"})


async def test_a_failure_on_one_shard_does_not_affect_the_others(world: World) -> None:
    engine = await world.open(wal_shards=4)
    for n in range(8):
        await engine.put_topic(f"t{n}", TopicConfig(durability=Durability.MEMORY))
    shards = {name: engine._catalog.get(name).shard.number for name in (f"t{n}" for n in range(8))}
    bad, good = "t0", next(name for name, shard in shards.items() if shard != shards["t0"])
    world.committers.hold()
    writes = {name: asyncio.ensure_future(engine.write(name, recs(1))) for name in (bad, good)}
    await settle()
    async with failing(world):
        world.committers.all[shards[bad]].commit()
    world.committers.release()
    await gather_outcomes(writes.values())
    assert isinstance(writes[bad].exception(), CommitFailed)
    assert writes[good].result().first_seq == 1


async def test_a_failed_sync_never_acknowledges(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    await engine.put_topic("loose", TopicConfig(durability=Durability.MEMORY))
    await engine.write("loose", recs(1))
    written = len(world.disk.calls)
    async with failing(world, DiskFault.FAIL_ONCE, after=1):
        # There are other records in the log, so this takes a write and a sync. The sync fails.
        with pytest.raises(CommitFailed):
            await engine.write("t", recs("not durable"))
    assert world.disk.calls[written : written + 2] == ["write_at", "datasync"]
    assert (await engine.write("t", recs("durable"))).first_seq == 1
    engine = await world.crash()
    assert await read_all(engine, "t") == {1: "durable"}


async def test_a_full_disk_is_reported_until_there_is_space_again(world: World) -> None:
    engine = await world.open(wal_file_bytes=600)
    await engine.put_topic("t", FSYNC)
    written = 0
    async with failing(world, DiskFault.NO_SPACE):
        with contextlib.suppress(StorageFull):
            while written < 100:
                await engine.write("t", recs("x" * 50))
                written += 1
        assert written < 100
        with pytest.raises(StorageFull):
            await engine.put_topic("u", FSYNC)
        with pytest.raises(StorageFull):
            await engine.delete("t", before_seq=2)
        assert len(await read_all(engine, "t")) == written
    assert (await engine.write("t", recs("y"))).first_seq == written + 1
    assert (await engine.put_topic("u", FSYNC)).created
    engine = await world.crash()
    assert len(await read_all(engine, "t")) == written + 1


async def _fill(world: World, topic: str) -> int:
    """Write until the disk is full. Return the number of records."""
    for written in range(1000):
        try:
            await world.engine.write(topic, recs("x" * 30, tag="odd" if written % 2 else None))
        except StorageFull:
            return written
    raise AssertionError("it never gets full")


async def test_deletions_are_accepted_without_room_for_another_log_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await world.open(wal_file_bytes=1 << 14)
    await engine.put_topic("t", FSYNC)
    await engine.write("u", recs(1), config=FSYNC)

    def no_space(path: str, size: int, *, reserve_only: bool = False) -> None:
        raise StorageFull(f"no space for {size} bytes")

    with monkeypatch.context() as full:
        full.setattr(world.disk, "allocate", no_space)
        written = await _fill(world, "t")
        assert (await engine.delete("t", before_seq=3)).deleted == 2
        assert (await engine.delete("t", match=Predicate(value="odd"))).deleted == written // 2 - 1
        await engine.remove_topic("u")
        with pytest.raises(StorageFull):
            await engine.write("t", recs("x" * 30))
    assert (await engine.write("t", recs("on"))).first_seq == written + 1
    for stop in ("crash", "kill", "restart"):
        kept = await read_all(engine, "t")
        assert list(kept) == [*range(3, written + 1, 2), written + 1]
        assert not engine.exists("u")
        engine = await getattr(world, stop)()
        assert engine.problems == []


async def test_a_failed_creation_leaves_no_topic_and_can_be_repeated(world: World) -> None:
    engine = await world.open()
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.put_topic("t", FSYNC)
        with pytest.raises(CommitFailed):
            await engine.write("t", recs(1))
        assert not engine.exists("t")
    assert (await engine.put_topic("t", FSYNC)).created
    engine = await world.kill()
    assert [state.topic for state in engine.topics()[0]] == ["t"]


async def test_a_failed_deletion_of_a_topic_leaves_it_in_use(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.remove_topic("t")
    assert (await engine.write("t", recs(2))).first_seq == 2
    engine = await world.crash()
    assert await read_all(engine, "t") == {1: 1, 2: 2}


async def test_a_failed_delete_of_records_deletes_nothing(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, tag="x"), config=FSYNC)
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.delete("t", before_seq=2)
        with pytest.raises(CommitFailed):
            await engine.delete("t", match=Predicate(value="x"))
    assert engine.state("t").count == 2
    engine = await world.crash()
    assert engine.state("t").count == 2


async def test_a_failed_config_change_changes_nothing(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=FSYNC)
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.put_topic("t", TopicConfig(cap_records=1))
    assert engine.state("t").config.cap_records == 0
    assert engine.state("t").count == 2


async def test_a_creation_whose_caller_is_cancelled_still_creates_one_topic(world: World) -> None:
    engine = await world.open()
    world.committers.hold()
    first = asyncio.create_task(engine.put_topic("t", FSYNC))
    await settle()
    first.cancel()
    await settle()
    second = asyncio.create_task(engine.put_topic("t", FSYNC))
    await settle()
    world.committers.release()
    assert not (await second).created
    await engine.write("t", recs(1))
    assert [state.topic for state in engine.topics()[0]] == ["t"]
    engine = await world.kill()
    assert [state.topic for state in engine.topics()[0]] == ["t"]
    assert await read_all(engine, "t") == {1: 1}


async def test_a_deletion_whose_caller_is_cancelled_loses_no_later_write(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    world.committers.hold()
    removal = asyncio.create_task(engine.remove_topic("t"))
    await settle()
    removal.cancel()
    await settle()
    write = asyncio.create_task(engine.write("t", recs(1)))
    await settle()
    world.committers.release()
    result = await write
    assert (result.first_seq, result.created) == (1, True)
    assert await read_all(engine, "t") == {1: 1}
    engine = await world.kill()
    assert await read_all(engine, "t") == {1: 1}


async def test_an_engine_whose_start_failed_releases_the_directory(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    plugged = world.disk
    for call in range(200):
        world.unplug(Survival.EVERYTHING)
        world.disk = plugged.crash(Survival.EVERYTHING)
        world.disk.plan = PlannedFault(call=call, kind=DiskFault.FAIL_ALWAYS)
        try:
            engine = await world.open()
        except PenstockError:
            assert not world.engine.ready
            world.disk.plan = None
            engine = await world.open()
            assert await read_all(engine, "t") == {1: 1}
        else:
            break
    assert call > 10


async def test_a_directory_has_one_engine(world: World) -> None:
    await world.open()
    with pytest.raises(LockHeld):
        await World(disk=world.disk, clock=world.clock).open()


async def test_no_call_is_served_before_the_start_is_complete(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.close()
    from penstock.topics import Engine

    late = Engine(engine.config, fs=world.disk, clock=world.clock)
    with pytest.raises(NotReady) as caught:
        late.state("t")
    assert caught.value.detail == {"replay_progress": 0.0}
    with pytest.raises(NotReady):
        await late.write("t", recs(1))


async def test_a_close_on_a_broken_disk_ends_and_loses_nothing(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    async with failing(world):
        await engine.close()
    engine = await world.open()
    assert await read_all(engine, "t") == {1: 1}


async def test_a_full_queue_does_not_prevent_the_engine_from_closing(world: World) -> None:
    engine = await world.open(wal_queue_max=2)
    await engine.put_topic("t", TopicConfig())
    world.committers.hold()
    writes = [asyncio.ensure_future(engine.write("t", recs(n))) for n in range(2)]
    await settle()
    closing = asyncio.create_task(engine.close())
    await settle()
    world.committers.release()
    await closing
    assert [(await write).first_seq for write in writes] == [1, 2]
    engine = await world.open()
    assert await read_all(engine, "t") == {1: 0, 2: 1}


async def test_reading_a_topic_that_is_deleted_meanwhile_raises_not_found(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = asyncio.create_task(engine.diff("t", wait_ms=1000))
    await settle()
    await engine.remove_topic("t")
    with pytest.raises(TopicNotFound):
        await waiting
    assert seqs(await engine.diff((await engine.write("t", recs(1))).topic)) == [1]


async def test_a_server_whose_log_accepts_no_writes_is_not_ready_until_it_accepts_them_again(
    world: World,
) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durable=True))
    await engine.check_writable()
    async with failing(world):
        with pytest.raises(PenstockError):
            await engine.write("t", recs(1))
        for _ in range(2):
            with pytest.raises(NotReady, match="no write succeeds"):
                await engine.check_writable()
    await engine.check_writable()
    assert (await engine.write("t", recs(2))).first_seq == 1


@pytest.mark.parametrize("file", ["next-", "CURRENT.", "EXTENT."])
async def test_a_disk_that_fills_up_while_a_log_file_is_started_leaves_room_for_deletions(
    world: World, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    engine = await world.open(wal_file_bytes=1 << 14)
    await engine.put_topic("t", FSYNC)
    allocate, create = world.disk.allocate, world.disk.create

    def allocate_or_not(path: str, size: int, *, reserve_only: bool = False) -> None:
        refuse(path)
        allocate(path, size, reserve_only=reserve_only)

    def create_or_not(path: str) -> WritableFile:
        refuse(path)
        return create(path)

    def refuse(path: str) -> None:
        if file in path:
            raise StorageFull(f"no space for {path}")

    with monkeypatch.context() as full:
        full.setattr(world.disk, "allocate", allocate_or_not)
        full.setattr(world.disk, "create", create_or_not)
        written = await _fill(world, "t")
        for _ in range(3):
            with pytest.raises(StorageFull):
                await engine.write("t", recs("x" * 30))
        assert (await engine.delete("t", before_seq=3)).deleted == 2
        assert (await engine.delete("t", match=Predicate(value="odd"))).deleted > 0
    kept = len(await read_all(engine, "t"))
    assert (await engine.write("t", recs("y"))).first_seq == written + 1
    engine = await world.crash()
    assert (engine.problems, len(await read_all(engine, "t"))) == ([], kept + 1)


async def test_a_deletion_on_a_full_disk_does_not_make_the_server_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await world.open(wal_file_bytes=1 << 14)
    await engine.put_topic("t", FSYNC)

    def no_space(path: str, size: int, *, reserve_only: bool = False) -> None:
        raise StorageFull(f"no space for {size} bytes")

    with monkeypatch.context() as full:
        full.setattr(world.disk, "allocate", no_space)
        await _fill(world, "t")
        while True:  # the probes fill the rest of the file
            try:
                await engine.check_writable()
                with pytest.raises(StorageFull):
                    await engine.write("t", recs("x" * 30))
            except NotReady:
                break
        assert (await engine.delete("t", before_seq=3)).deleted == 2
        with pytest.raises(NotReady, match="no write succeeds"):
            await engine.check_writable()
    await engine.check_writable()


async def test_a_server_that_must_be_restarted_is_not_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Topic, "publish", broken)
        with pytest.raises(CommitFailed, match="in the log, but not published"):
            await engine.write("t", recs("unseen"))
    for _ in range(2):
        with pytest.raises(NotReady, match="restart the server"):
            await engine.check_writable()
