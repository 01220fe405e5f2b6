"""Backup of a server with routers: logs that are read at different moments must be consistent."""

from __future__ import annotations

from tests.unit.topics.engine_doubles import DATA, World, read_all, recs
from tests.unit.topics.routers.test_recovery import FSYNC, apart, shard

from penstock.storage.log_layout import LogPosition
from penstock.storage.log_scan import LogScan
from penstock.testing.disk import Survival
from penstock.topics import RouterConfig
from penstock.topics.checkpoints.layout import LogGroup, scan_log
from penstock.topics.checkpoints.snapshot import load_latest
from penstock.topics.log.frame import FrameType
from penstock.topics.log.frame_scan import read_frames
from penstock.topics.tools.backup import agree, backup
from penstock.topics.tools.restore import restore


def read_log(world: World, topic: str) -> tuple[str, LogScan]:
    path = shard(world, topic).log._directory.removeprefix(f"{DATA}/")
    return path, scan_log(
        world.disk, DATA, LogGroup(path=path, start=LogPosition(0, 0), synced=LogPosition(0, 0))
    )


def kinds(log: LogScan) -> list[int]:
    tables = [read_frames(file.view, run.start, run.ends) for file in log.files for run in file.runs]
    return [int(kind) for table in tables for kind in table.heads["type"]]


async def test_a_log_is_cut_before_copies_of_unread_records() -> None:
    world = World(wal_file_bytes=1 << 20)
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", recs(1))
    await engine.drain("b")
    early = read_log(world, "a")
    await engine.write("b", recs("direct"))
    await engine.write("a", recs(2))
    await engine.drain("b")
    await engine.write("b", recs("late"))
    late = read_log(world, "b")
    agreed = agree(dict([early, late]), None)
    assert agreed.logs[early[0]] is early[1]
    whole, cut = kinds(late[1]), kinds(agreed.logs[late[0]])
    assert cut == whole[: len(cut)]
    assert whole.count(FrameType.ROUTER_CURSOR) == 2
    assert cut.count(FrameType.ROUTER_CURSOR) == 1
    assert cut.count(FrameType.APPEND) == 1
    together = agree(dict([read_log(world, "a"), late]), None)
    assert together.logs[late[0]] is late[1]
    assert together.referred == {engine._catalog.get("a").id}
    await engine.close()


async def test_records_in_segments_count_as_read() -> None:
    world = World(wal_file_bytes=1 << 20)
    engine = await apart(world, FSYNC, FSYNC)
    await engine.write("a", recs(1))
    await engine.checkpoint()
    await engine.write("a", recs(2))
    await engine.drain("b")
    snapshot = load_latest(world.disk, f"{DATA}/meta").snapshot
    assert snapshot is not None
    path, log = read_log(world, "b")
    start = snapshot.wal[path]
    needed = scan_log(
        world.disk,
        DATA,
        LogGroup(path=path, start=LogPosition(start.file, start.offset), synced=LogPosition(0, 0)),
        needed_only=True,
    )
    source = read_log(world, "a")
    assert agree(dict([source, (path, needed)]), snapshot).logs[path] is needed
    assert kinds(agree({path: log}, None).logs[path]).count(FrameType.ROUTER_CURSOR) == 0
    await engine.close()


async def test_a_backup_has_the_originals_of_copies_of_a_deleted_source() -> None:
    world = World(wal_file_bytes=1 << 20)
    engine = await apart(world, FSYNC, FSYNC)
    await engine.remove_router("a->b")
    await engine.write("a", recs(1, 2))
    await engine.put_router("a->b", RouterConfig(source="a", dest="b"))
    await engine.write("a", recs(3))
    await engine.checkpoint()
    await engine.remove_topic("a")
    assert await read_all(engine, "b") == {1: 3}
    world.unplug(Survival.EVERYTHING)
    backup(world.disk, DATA, "/backup")
    restore(world.disk, "/backup", "/restored")
    engine = await world.open(data_dir="/restored")
    assert engine.problems == []
    assert await read_all(engine, "b") == {1: 3}
    await engine.close()
