"""A cold place belongs to one data directory, and nothing is moved to a place where it would be lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.topics.engine_doubles import COLD, FSYNC, World, read_all, recs

from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.storage.fs import stage
from penstock.testing.disk import DiskFault, PlannedFault, PowerCut, Survival
from penstock.topics import Damaged, Engine, EngineConfig
from penstock.topics.checkpoints.cold_tier import check_apart

MARKER = f"{COLD}/topics/owner.json"


@pytest.fixture
def world() -> World:
    return World(cold_dir=COLD, segment_max_events=2, hot_retain_segments=0)


async def fill(world: World) -> Engine:
    """Write four records, all of them cold."""
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3, 4), config=FSYNC)
    await engine.checkpoint()
    assert all(segment.cold for segment in engine._catalog.get("t").log.segments)
    return engine


def unmount(world: World) -> None:
    for name, _ in list(world.disk.list_files(COLD)):
        target = f"/away/{name}"
        world.disk.make_dirs(target.rpartition("/")[0])
        world.disk.rename(f"{COLD}/{name}", target)


def mount(world: World) -> None:
    for name, _ in list(world.disk.list_files("/away")):
        target = f"{COLD}/{name}"
        world.disk.make_dirs(target.rpartition("/")[0])
        world.disk.rename(f"/away/{name}", target)


# ---- a place of its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("spell", [str, lambda path: f"file://{path}"])
@pytest.mark.parametrize(
    "where", ["data", "data/", "data/../data", "data/cold", ".", "link", "link/x", "via/x"]
)
def test_a_cold_place_is_not_the_data_directory_nor_in_it_nor_around_it(
    tmp_path: Path, where: str, spell: Callable[[str], str]
) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "via").symlink_to(tmp_path / "data" / "sub")
    with pytest.raises(ConfigError, match="set TOPICS_COLD_DIR"):
        check_apart(str(tmp_path / "data"), spell(f"{tmp_path}/{where}"))
    for fine in (f"{tmp_path}/cold", f"{tmp_path}/data2", "s3://bucket/data"):
        check_apart(str(tmp_path / "data"), fine)


def test_a_data_directory_that_is_a_link_stands_for_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError):
        check_apart(str(tmp_path / "data"), str(tmp_path / "real"))
    check_apart(str(tmp_path / "new"), str(tmp_path / "cold"))


@pytest.mark.parametrize("place", ["{data}", "file://{data}/old", "memory://old"])
async def test_an_engine_does_not_start_with_a_place_that_would_lose_records(
    tmp_path: Path, place: str
) -> None:
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match="cold"):
        await Engine.open(EngineConfig(data_dir=str(data), cold_dir=place.format(data=data)))
    assert not list(data.rglob("owner.json"))


@pytest.mark.parametrize("url", ["{}", "file://{}"])
async def test_two_data_directories_do_not_share_a_place(tmp_path: Path, url: str) -> None:
    place = url.format(tmp_path / "cold")

    def config(name: str) -> EngineConfig:
        return EngineConfig(data_dir=str(tmp_path / name), cold_dir=place, wal_shards=1)

    for name in ("one", "one"):
        async with await Engine.open(config(name)):
            with pytest.raises(ConfigError, match="belongs to another data directory"):
                await Engine.open(config("two"))
    async with await Engine.open(config("one")):
        pass


async def test_a_new_data_directory_does_not_take_over_an_old_ones_place(world: World) -> None:
    await (await fill(world)).close()
    with pytest.raises(ConfigError, match="a place of its own"):
        await world.open(data_dir="/data2")
    assert await read_all(await world.open(data_dir="/data"), "t") == {1: 1, 2: 2, 3: 3, 4: 4}


async def test_a_power_cut_at_any_call_of_a_claim_locks_no_engine_out() -> None:
    whole = World(cold_dir=COLD)
    await whole.open()
    for call in range(len(whole.disk.calls)):
        for kind in (DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER, DiskFault.FAIL_ONCE):
            world = World(cold_dir=COLD)
            world.disk.plan = PlannedFault(call=call, kind=kind)
            with contextlib.suppress(PowerCut, PenstockError):
                await world.open()
            world.disk.plan = None
            for survival in (Survival.EVERYTHING, Survival.NOTHING):
                engine = await world.crash(survival)
                await engine.write("t", recs(1), config=FSYNC)


# ---- a place that is not there -----------------------------------------------------------------------


async def test_cold_records_without_a_cold_place_are_reported_at_the_start(world: World) -> None:
    await (await fill(world)).close()
    with pytest.raises(ConfigError, match="set TOPICS_COLD_DIR"):
        await world.open(cold_dir=None)
    assert len(await read_all(await world.open(cold_dir=COLD), "t")) == 4


async def test_an_unmounted_place_is_reported_at_the_start_and_not_created(world: World) -> None:
    await (await fill(world)).close()
    unmount(world)
    with pytest.raises(ConfigError, match="is it mounted"):
        await world.open()
    assert list(world.disk.list_files(COLD)) == []
    mount(world)
    engine = await world.open()
    assert (len(await read_all(engine, "t")), engine.problems) == (4, [])


async def test_a_place_that_goes_away_is_unavailable_and_comes_back(world: World) -> None:
    engine = await fill(world)
    unmount(world)
    with pytest.raises(Unavailable, match="is it mounted"):
        await engine.diff("t")
    await engine.write("u", recs(*range(6)), config=FSYNC)
    await engine.checkpoint()
    assert list(world.disk.list_files(COLD)) == []
    assert len(await read_all(engine, "u")) == 6
    mount(world)
    assert len(await read_all(engine, "t")) == 4
    await world.clock.advance(31)
    await engine.checkpoint()
    assert all(segment.cold for segment in engine._catalog.get("u").log.segments)
    assert len(await read_all(await world.crash(), "u")) == 6


async def test_a_cold_file_that_is_missing_alone_is_damage_that_names_its_records(world: World) -> None:
    engine = await fill(world)
    world.disk.unlink(f"{COLD}/topics/00000001/seg-0000000000000003.data")
    with pytest.raises(Damaged, match=r'records 3 to 4 of topic "t".*restore it') as caught:
        await engine.diff("t", 2)
    assert caught.value.detail == {"topic": "t", "first_seq": 3, "last_seq": 4}


async def test_a_place_that_was_taken_over_gets_no_more_files(world: World) -> None:
    engine = await fill(world)
    before = [name for name, _ in world.disk.list_files(COLD)]
    content = world.disk.read(MARKER)
    world.disk.unlink(MARKER)
    stage(world.disk, MARKER, [content[:-3] + b'x"}'])
    await engine.write("t", recs(5, 6))
    await engine.checkpoint()
    assert [name for name, _ in world.disk.list_files(COLD)] == before
    assert len(await read_all(engine, "t", 4)) == 2
