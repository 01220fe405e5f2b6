"""Recovery restores the same state for any number of logs, and reports every damage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest
from tests.unit.topics.engine_doubles import (
    COLD,
    FSYNC,
    World,
    fail_to_sync_the_snapshot,
    flip_bit,
    read_all,
    rec,
    recs,
    seqs,
)

from penstock.errors import PenstockError, Rejected
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics import Damaged, Durability, Engine, Predicate, TopicConfig


@pytest.fixture
def world() -> World:
    return World()


async def test_progress_is_reported(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    engine = await world.kill()
    assert engine.ready
    assert engine.replay_progress == 1.0


async def test_an_incomplete_write_is_cut_off(world: World) -> None:
    """The first frames of a write survive a power cut, the last one does not."""
    engine = await world.open(wal_file_bytes=1 << 16)
    await engine.put_topic("t", TopicConfig(durability=Durability.MEMORY))
    await engine.write("t", recs("whole"))
    world.committers.tend()
    await engine.write("t", recs(*["x" * 300] * 20))
    heads = set()
    plugged = world.disk
    for seed in range(30):
        world.disk = plugged.crash(Survival.RANDOM, random.Random(seed))
        engine = await world.open()
        heads.add(engine.state("t").head_seq)
        assert (await engine.write("t", recs("next"))).first_seq == engine.state("t").head_seq
        engine = await world.kill()
        assert engine.problems == []
    assert heads == {1, 21}


# ---- another number of logs --------------------------------------------------------------------------

WAYS = [(1, 3), (3, 1), (2, 3), (3, 2), (4, 2)]


@pytest.mark.parametrize("stop", ["restart", "kill", "crash"])
@pytest.mark.parametrize(("before", "after"), WAYS)
async def test_the_number_of_logs_may_change(world: World, stop: str, before: int, after: int) -> None:
    engine = await world.open(wal_shards=before)
    names = [f"t{n}" for n in range(7)]
    for n, name in enumerate(names):
        await engine.write(name, recs(*range(n + 1), tag="a"), config=FSYNC)
    for turn, shards in enumerate((after, before, after, after), 1):
        engine = await getattr(world, stop)(wal_shards=shards)
        assert engine.problems == []
        for n, name in enumerate(names):
            await engine.write(name, recs(f"{turn}", tag="b"))
            assert list((await read_all(engine, name)).values()) == [
                *range(n + 1),
                *(str(one) for one in range(1, turn + 1)),
            ]
    folders = {name.rpartition("/")[0] for name in world.files() if name.endswith(".log")}
    await engine.checkpoint()
    await engine.checkpoint()
    left = {name.rpartition("/")[0] for name in world.files() if name.endswith(".log")}
    assert len(left) == after, f"{folders} became {left}"


async def test_a_delete_in_a_new_log_is_replayed_after_the_records_in_the_old_one(world: World) -> None:
    engine = await world.open(wal_shards=1)
    await engine.write("t", recs(1, 2, tag="x"), config=FSYNC)
    engine = await world.kill(wal_shards=3)
    await engine.delete("t", match=Predicate(value="x"))
    for shards in (3, 1, 2):
        engine = await world.kill(wal_shards=shards)
        assert await read_all(engine, "t") == {}
        assert engine.state("t").head_seq == 2


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
async def test_an_old_config_does_not_come_back_with_an_old_log(world: World, checkpoints: int) -> None:
    engine = await world.open(wal_shards=1)
    await engine.put_topic("t", FSYNC)
    await engine.put_topic("t", TopicConfig(durable=True, cap_records=2))
    engine = await world.kill(wal_shards=3)
    await engine.put_topic("t", TopicConfig(durable=True, cap_records=9))
    for _ in range(checkpoints):
        await engine.checkpoint()
    for shards in (3, 2, 1):
        engine = await world.kill(wal_shards=shards)
        assert engine.state("t").config.cap_records == 9


async def test_a_log_that_is_used_again_is_read_from_its_valid_start(world: World) -> None:
    engine = await world.open(wal_shards=2)
    await engine.put_topic("t", FSYNC)
    for turn, shards in enumerate((3, 2, 3, 1, 2, 1)):
        await engine.write("t", recs(turn))
        engine = await world.kill(wal_shards=shards)
        assert list((await read_all(engine, "t")).values()) == list(range(turn + 1))
        assert engine.problems == []


# ---- snapshots ---------------------------------------------------------------------------------------


async def _open_without_the_newest_snapshot(world: World) -> Engine:
    """Kill the process and make the newest snapshot unreadable."""
    world.unplug(Survival.EVERYTHING)
    newest = max(name for name in world.files() if name.startswith("meta/"))
    world.disk.truncate(f"/data/{newest}", 30)
    engine = await world.open()
    assert newest in engine.problems[0]
    return engine


async def test_an_unreadable_snapshot_is_reported_and_the_previous_one_is_used(world: World) -> None:
    engine = await world.open(wal_file_bytes=300)
    for n in range(1, 4):
        for place in range(10):
            await engine.write("t", recs(10 * n + place), config=FSYNC)
        if n < 3:
            await engine.checkpoint()
    wanted = await read_all(engine, "t")
    engine = await _open_without_the_newest_snapshot(world)
    assert len(engine.problems) == 1
    assert await read_all(engine, "t") == wanted
    await engine.checkpoint()
    engine = await world.kill()
    assert (engine.problems, await read_all(engine, "t")) == ([], wanted)


@pytest.mark.parametrize("stops", ["kill", "kill kill", "restart", "restart restart", "restart kill"])
async def test_the_log_that_the_previous_snapshot_needs_survives_every_start(
    world: World, stops: str
) -> None:
    engine = await world.open(wal_file_bytes=900)
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    for n in range(4, 40):
        await engine.write("t", recs(n))
    await engine.checkpoint()
    for stop in stops.split():
        await getattr(world, stop)()
    engine = await _open_without_the_newest_snapshot(world)
    assert len(engine.problems) == 1
    assert await read_all(engine, "t") == {n: n for n in range(1, 40)}
    assert (await engine.write("t", recs(40))).first_seq == 40


async def test_the_previous_snapshot_finds_segments_that_were_moved_since(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=3, hot_retain_segments=1)
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(4, 5, 6))
    await engine.checkpoint()
    assert [segment.cold for segment in engine._catalog.get("t").log.segments] == [True, False]
    engine = await _open_without_the_newest_snapshot(world)
    assert len(engine.problems) == 1
    for _ in range(2):
        assert await read_all(engine, "t") == {n: n for n in range(1, 7)}
        await engine.checkpoint()
        engine = await world.kill()
        assert engine.problems == []


async def test_without_the_newest_snapshot_moved_segments_are_found_too(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=3, hot_retain_segments=0)
    for first in (1, 4):
        await engine.write("t", recs(first, first + 1, first + 2), config=FSYNC)
        await engine.checkpoint()
    assert [segment.cold for segment in engine._catalog.get("t").log.segments] == [True, True]
    world.disk.unlink(f"/data/{max(name for name in world.files() if name.startswith('meta/snapshot'))}")
    world.unplug(Survival.EVERYTHING)
    engine = await world.open()
    for _ in range(2):
        assert await read_all(engine, "t") == {n: n for n in range(1, 7)}
        assert engine.problems == []
        await engine.checkpoint()
        engine = await world.kill()


async def test_the_previous_snapshot_works_without_segments_that_were_deleted_since(world: World) -> None:
    engine = await world.open(segment_max_events=3)
    await engine.write("t", recs(1, 2, 3, tag="x"), config=FSYNC)
    await engine.write("t", recs(4))
    await engine.checkpoint()
    await engine.delete("t", match=Predicate(value="x"))
    await engine.checkpoint()
    engine = await _open_without_the_newest_snapshot(world)
    assert [("segment 1 " in problem) for problem in engine.problems] == [False, True]
    for _ in range(2):
        assert (await read_all(engine, "t"), engine.state("t").count) == ({4: 4}, 1)
        await engine.checkpoint()
        engine = await world.kill()
        assert engine.problems == []


async def test_no_file_is_removed_before_a_snapshot_without_it_is_durable(world: World) -> None:
    """1. a snapshot is in place but its name is not synced; 2. a start removes files that it does not name;
    3. the power fails, and the previous snapshot is there again.
    """
    engine = await world.open(segment_max_events=2)
    await engine.put_topic("t", TopicConfig(durable=True, cap_records=2))
    await engine.write("t", recs(1, 2))
    await engine.checkpoint()
    await engine.write("t", recs(3, 4))
    await fail_to_sync_the_snapshot(world)
    await world.abandon()
    engine = await world.crash()
    assert (engine.problems, await read_all(engine, "t")) == ([], {3: 3, 4: 4})


async def test_an_engine_never_starts_empty_over_data_it_cannot_read(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.close()
    for name in world.files():
        if name.startswith("meta/"):
            world.disk.truncate(f"/data/{name}", 5)
    with pytest.raises(Damaged):
        await world.open()
    with pytest.raises(Damaged):
        await world.open()


async def test_an_engine_does_not_start_on_an_unfinished_restore(world: World) -> None:
    world.disk.make_dirs("/data/restoring")
    with pytest.raises(Rejected, match="did not finish"):
        await world.open()


async def test_an_engine_never_starts_empty_when_its_snapshots_are_gone(world: World) -> None:
    """The log continues a missing snapshot. No file is changed, so that the snapshot can be restored."""
    engine = await world.open()
    for n in range(3):
        await engine.write("t", recs(*range(50 * n, 50 * n + 50)), config=FSYNC)
        await engine.checkpoint()
    wanted = await read_all(engine, "t")
    await engine.close()
    snapshots = [name for name in world.files() if name.startswith("meta/")]
    world.disk.make_dirs("/away/meta")
    for name in snapshots:
        world.disk.rename(f"/data/{name}", f"/away/{name}")
    left = world.files()
    for _ in range(2):
        with pytest.raises(Damaged, match="snapshot"):
            await world.open()
        assert world.files() == left
    for name in snapshots:
        world.disk.rename(f"/away/{name}", f"/data/{name}")
    engine = await world.open()
    assert (await read_all(engine, "t"), engine.problems) == (wanted, [])


async def test_records_of_a_topic_whose_creation_cannot_be_read_are_reported_and_kept(world: World) -> None:
    engine = await world.open(wal_file_bytes=900)
    file, start = world.committers.all[0].log.end
    await engine.put_topic("nameless", FSYNC)
    end = world.committers.all[0].log.end.offset
    await engine.put_topic("other", FSYNC)
    for n in range(30):
        await engine.write("nameless", recs(f"value {n:02d}"))
    world.unplug(Survival.EVERYTHING)
    flip_bit(world.disk, f"/data/wal/wal-{file:016d}.log", (start + end) // 2 * 8)
    logs = [name for name in world.files() if name.endswith(".log")]
    holding = [name for name in logs if b"value" in world.disk.read(f"/data/{name}")]
    assert len(holding) > 2
    engine = await world.open()
    assert [state.topic for state in engine.topics()[0]] == ["other"]
    for name in holding:
        assert any(problem.startswith(name) and "records" in problem for problem in engine.problems)
    for n in range(3):
        await engine.write("other", recs(n))
        await engine.checkpoint()
    await world.restart()
    kept = b"".join(world.disk.read(f"/data/{name}") for name in world.files() if name.startswith("wal/"))
    assert all(f"value {n:02d}".encode() in kept for n in range(30))


async def test_a_lost_log_file_and_its_records_are_reported(world: World) -> None:
    engine = await world.open(wal_file_bytes=700)
    for n in range(20):
        await engine.write("t", recs(n), config=FSYNC)
    world.unplug(Survival.EVERYTHING)
    logs = sorted(name for name in world.files() if name.endswith(".log"))
    world.disk.unlink(f"/data/{logs[1]}")
    engine = await world.open()
    assert engine.problems
    found = {}
    cursor = 0
    while cursor < 20:
        try:
            page = await engine.diff("t", cursor)
        except Damaged as error:
            cursor = _end_of(error)
            continue
        found |= dict(zip(seqs(page), page.records(), strict=True))
        cursor = page.next_from_seq
    assert 0 < len(found) < 20
    assert engine.state("t").head_seq == 20
    assert (await engine.write("t", recs("on"))).first_seq == 21
    await engine.checkpoint()
    engine = await world.kill()
    assert (await engine.write("t", recs("on"))).first_seq == 22


async def _without_its_end(world: World, *, extent: bool, zeros: bool) -> int:
    """Take a checkpoint, write two more records, kill, and truncate the log before the snapshot's offset."""
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.checkpoint()
    offset = world.engine._wal.shards[0].committed_offset.offset  # type: ignore[union-attr]
    last = (await engine.write("t", recs(3, 4))).last_seq
    world.unplug(Survival.EVERYTHING)
    path = f"/data/{max(name for name in world.files() if name.endswith('.log'))}"
    size = world.disk.stat(path).size
    world.disk.truncate(path, offset - 20)
    if zeros:
        kept = world.disk.read(path)
        world.disk.unlink(path)
        world.disk.allocate(path, size)
        file = world.disk.open_log(path)
        file.write_durably_at(0, [kept])
        file.close()
    if not extent:
        world.disk.unlink("/data/wal/EXTENT")
    return last


@pytest.mark.parametrize("zeros", [False, True], ids=["truncated", "zeroed"])
@pytest.mark.parametrize("extent", [True, False], ids=["extent", "the snapshot alone"])
async def test_a_log_that_ends_before_its_snapshot_is_reported_and_no_number_is_reused(
    world: World, extent: bool, zeros: bool
) -> None:
    last = await _without_its_end(world, extent=extent, zeros=zeros)
    engine = await world.open()
    assert any("ends before the end of its durable data" in problem for problem in engine.problems)
    assert any('topic "t": records from 3 on are lost' in problem for problem in engine.problems)
    page = await engine.diff("t", 2)
    assert page.tombstone is not None
    assert (page.tombstone.reason, page.tombstone.gap_from) == ("lost", 3)
    assert page.tombstone.gap_to == engine.state("t").head_seq
    written = await engine.write("t", recs("new"))
    assert written.first_seq == page.tombstone.gap_to + 1 > last
    assert await read_all(engine, "t", last) == {written.first_seq: "new"}
    for again in (world.kill, world.restart):
        engine = await again()
        assert engine.problems == []
        page = await engine.diff("t", 2)
        assert page.tombstone is not None
        assert page.tombstone.reason == "lost", "what was lost stays known"


async def test_a_loss_of_records_synced_after_the_last_snapshot_is_reported(world: World) -> None:
    engine = await world.open()
    for n in range(6):
        last = (await engine.write("t", recs(n), config=FSYNC)).last_seq
    middle = world.engine._wal.shards[0].committed_offset.offset // 2  # type: ignore[union-attr]
    world.unplug(Survival.EVERYTHING)
    world.disk.truncate(f"/data/{max(name for name in world.files() if name.endswith('.log'))}", middle)
    engine = await world.open()
    assert any("ends before the end of its durable data" in problem for problem in engine.problems)
    assert (await engine.write("t", recs("new"))).first_seq > last


async def test_a_loss_is_known_after_a_crash_before_it_was_recorded(world: World) -> None:
    last = await _without_its_end(world, extent=True, zeros=False)
    heads = set()
    damaged = world.disk
    for call in range(60):
        world.disk = damaged.crash(Survival.EVERYTHING)
        world.disk.plan = PlannedFault(call=len(world.disk.calls) + call, kind=DiskFault.CRASH_AFTER)
        with contextlib.suppress(PowerCut):
            await world.open()
        engine = await world.crash(Survival.EVERYTHING)
        heads.add(engine.state("t").head_seq)
    assert len(heads) == 1, "each start comes to the same end"
    assert heads.pop() > last


async def _without(world: World, *gone: str) -> Engine:
    """Start after a kill and the loss of every file with one of these prefixes."""
    world.unplug(Survival.EVERYTHING)
    for name in world.files():
        if name.startswith(gone):
            world.disk.unlink(f"/data/{name}")
    return await world.open()


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_log_that_lost_all_its_files_before_the_first_snapshot_is_reported(shards: int) -> None:
    world = World(wal_shards=shards)
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    engine = await _without(world, "wal/wal-", "wal/shard-00/wal-", "wal/shard-01/wal-")
    assert any("is missing" in problem for problem in engine.problems)
    assert (await engine.write("t", recs("new"), config=FSYNC)).first_seq > 3
    for again in (world.kill, world.restart):
        engine = await again()
        assert engine.problems == [], "what was lost is written down once"


@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
async def test_a_topic_whose_creation_was_lost_does_not_reuse_acknowledged_numbers(
    world: World, durability: Durability
) -> None:
    config = TopicConfig(durability=durability)
    engine = await world.open()
    last = (await engine.write("t", recs(*range(5)), config=config)).last_seq
    world.committers.tend()
    engine = await _without(world, "wal/wal-")
    assert not engine.exists("t")
    written = await engine.write("t", recs("new"), config=config)
    assert written.first_seq > last
    for ahead in (0, last):
        page = await engine.diff("t", ahead)
        assert page.tombstone is not None
        assert (page.tombstone.reason, page.tombstone.gap_to) == ("lost", written.first_seq - 1)
        assert seqs(page) == [written.first_seq]
    for again in (world.kill, world.restart, world.kill):
        engine = await again()
        page = await engine.diff("t", last)
        assert page.tombstone is not None
        assert (page.tombstone.reason, page.tombstone.gap_to) == ("lost", written.first_seq - 1)
        head = engine.state("t").head_seq
        assert (await engine.write("t", recs("more"))).first_seq > head
        other = await engine.write(f"after-{head}", recs("new"), config=config)
        assert other.first_seq > last, "so does each topic that is created later: it may be the lost one"


async def test_a_directory_that_lost_nothing_begins_its_topics_at_one(world: World) -> None:
    engine = await world.open()
    for name in ("a", "b", "c"):
        assert (await engine.write(name, recs(1), config=FSYNC)).first_seq == 1
        engine = await world.kill()


async def test_no_lease_number_that_was_lost_with_the_log_is_reused(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("q", TopicConfig(type="queue", durability=Durability.FSYNC))
    await engine.write("q", recs(*range(30)))
    await engine.checkpoint()
    given = (await engine.claim("q", "worker", max=10)).jobs()
    engine = await _without(world, "wal/wal-")
    await engine.write("q", recs("new"))
    again = (await engine.claim("q", "worker", max=10)).jobs()
    assert again
    assert not {job.lease_id for job in given} & {job.lease_id for job in again}


async def test_a_start_fails_over_segments_that_neither_snapshot_nor_log_names(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    with pytest.raises(Damaged, match="segments in topics/00000001, and neither meta nor wal names"):
        await _without(world, "wal/", "meta/")
    assert any(name.startswith("topics/") for name in world.files()), "nothing was removed"


async def test_an_idle_log_without_losses_is_not_reported_as_damaged(world: World) -> None:
    engine = await world.open()
    for n in range(5):
        await engine.write("t", recs(n), config=FSYNC)
        engine = await world.crash() if n % 2 else await world.restart()
        assert engine.problems == []
        assert engine.state("t").head_seq == n + 1


# ---- every bit of every file -------------------------------------------------------------------------


async def _filled() -> tuple[World, dict[str, dict[int, object]]]:
    """Create a data directory with every kind of file, without a last checkpoint."""
    world = World(
        clock=ManualClock(), segment_max_events=3, cold_dir=COLD, hot_retain_segments=1, wal_file_bytes=900
    )
    engine = await world.open()
    for n in range(4):
        await engine.write("f", [rec({"n": n, "k": k}, tag=f"t{k}") for k in range(3)], config=FSYNC)
        await engine.write("g", recs(f"g{n}"), config=FSYNC)
        if n < 3:
            await engine.checkpoint()
        await engine.delete("f", match=Predicate(value="t1"), before_seq=8)
    await engine.checkpoint()
    await engine.write("f", recs("last"))
    wanted = {name: await read_all(engine, name) for name in ("f", "g")}
    world.committers.tend()
    world.unplug(Survival.EVERYTHING)
    return world, wanted


def _files(disk: FakeDisk) -> list[str]:
    found = [f"{root}/{name}" for root in ("/data", COLD) for name, _ in disk.list_files(root)]
    return [path for path in found if not path.endswith(".lock")]


def _kind(path: str) -> str:
    name = path.rpartition("/")[2]
    tier = "cold " if path.startswith(COLD) else ""
    return tier + (
        name.partition("-")[0] if name.startswith(("wal", "snapshot")) else name.rpartition(".")[2]
    )


def _end_of(error: Damaged) -> int:
    assert error.detail is not None
    return int(str(error.detail["last_seq"]))


async def _read_with_patience(engine: object, name: str) -> tuple[dict[int, object], bool]:
    """Return the readable records of a topic, and whether some were reported as damaged."""
    found: dict[int, object] = {}
    cursor, told = 0, False
    while True:
        try:
            page = await engine.diff(name, cursor, limit=1000)  # type: ignore[attr-defined]
        except Damaged as error:
            told = True
            cursor = _end_of(error)
            continue
        found |= {record.seq: json.loads(bytes(record.data)) for record in page.records()}
        cursor = page.next_from_seq
        if page.caught_up:
            return found, told


async def test_a_flipped_bit_is_detected_or_harmless() -> None:
    """Flip bits in every kind of file: no wrong record, and no missing record without a report."""
    world, wanted = await _filled()
    base = world.disk
    kinds = set()
    rng = random.Random(7)
    for path in _files(base):
        kinds.add(_kind(path))
        size = len(base.crash(Survival.EVERYTHING).read(path)) * 8
        used = min(size, 8 * 900)
        for bit in sorted(rng.sample(range(used), min(used, 14))):
            disk = base.crash(Survival.EVERYTHING)
            flip_bit(disk, path, bit)
            flipped = World(disk=disk, clock=world.clock, **_without_dir(world))
            await _check_flipped(flipped, wanted, f"{path} bit {bit}")
    assert {"wal", "CURRENT", "snapshot", "data", "idx", "tags", "del", "cold data"} <= kinds


def _without_dir(world: World) -> dict[str, object]:
    return {key: value for key, value in world.config.items() if key != "data_dir"}


async def _check_flipped(world: World, wanted: dict[str, dict[int, object]], why: str) -> None:
    try:
        engine = await world.open()
    except PenstockError:
        return
    told = bool(engine.problems)
    for name, records in wanted.items():
        if not engine.exists(name):
            assert told, f"{why}: {name} is gone without a word"
            continue
        found, damaged = await _read_with_patience(engine, name)
        wrong = {seq: value for seq, value in found.items() if records.get(seq, value) != value}
        assert wrong == {}, f"{why}: wrong records"
        assert told or set(found) <= set(records), f"{why}: records came back"
        assert told or damaged or set(records) <= set(found), f"{why}: records are missing without a word"
    await engine.delete("g", before_seq=100) if engine.exists("g") else None
    upkeep = engine._maintenance
    if upkeep is not None and upkeep._ticking is not None:
        upkeep._ticking.cancel()
    await asyncio.sleep(0)
