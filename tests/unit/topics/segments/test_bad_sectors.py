"""Files with unreadable parts: the damage is reported, and everything else keeps working."""

from __future__ import annotations

import pytest
from tests.unit.topics.engine_doubles import COLD, DATA, FSYNC, World, read_all, rec, recs, seqs
from tests.unit.topics.test_engine_failures import failing

from penstock.testing.clock import ManualClock
from penstock.topics import CommitFailed, Damaged, Durability, Engine, Predicate, TopicConfig
from penstock.topics.model import Page
from penstock.topics.tools.backup import backup
from penstock.topics.tools.verify import verify

LARGE = ["x" * 1500] * 20
LOW, HIGH = 8192, 12288
"""One page of a file, which holds a few large records."""


@pytest.fixture
def world() -> World:
    return World(wal_file_bytes=1 << 18)


def last_of(error: Damaged) -> int:
    assert error.detail is not None
    return int(str(error.detail["last_seq"]))


async def read_past(engine: Engine, topic: str) -> tuple[list[int], list[int]]:
    """Return the readable records, and those that a reader must skip after an error."""
    good: list[int] = []
    bad: list[int] = []
    at = 0
    while at < engine.state(topic).head_seq:
        try:
            page = await engine.diff(topic, at, limit=1000)
        except Damaged as error:
            at = last_of(error)
            bad.append(at)
            continue
        good += seqs(page)
        at = page.next_from_seq
    return good, bad


def log_file(world: World) -> str:
    (name,) = [name for name in world.files() if name.endswith(".log") and name.startswith("wal/wal-")][-1:]
    return f"{DATA}/{name}"


def overlapping(count: int, bad: list[int]) -> list[int]:
    assert 2 <= len(bad) <= 4
    assert bad == list(range(bad[0], bad[-1] + 1))
    return [seq for seq in range(1, count + 1) if seq not in bad]


@pytest.mark.parametrize("limit", [1000, 3])
@pytest.mark.parametrize("choose", [False, True])
async def test_a_page_from_the_log_ends_before_an_unreadable_record(
    world: World, limit: int, choose: bool
) -> None:
    engine = await world.open()
    await engine.write("t", recs(*LARGE, tag="a"), config=FSYNC)
    await engine.write("other", recs(*LARGE), config=FSYNC)
    world.disk.spoil(log_file(world), LOW, HIGH)
    match = Predicate(value="a") if choose else None

    async def page(from_seq: int) -> Page:
        return await engine.diff("t", from_seq, limit=limit, match=match)

    at = 0
    while True:
        try:
            at = (await page(at)).next_from_seq
        except Damaged as error:
            told = last_of(error)
            break
    assert told == at + 1
    assert 3 <= at <= 6
    good, bad = await read_past(engine, "t")
    assert good == overlapping(20, bad)
    assert bad[0] == at + 1
    assert len(await read_all(engine, "other")) == 20
    await engine.close()


async def test_a_record_that_is_larger_than_a_bad_sector_is_not_delivered(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs("a", *["x" * 20_000] * 12), config=FSYNC)
    world.disk.spoil(log_file(world), LOW, HIGH)
    assert await read_past(engine, "t") == ([1, *range(3, 14)], [2])
    await engine.close()


async def test_zeros_in_a_truncated_log_are_not_delivered(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*LARGE), config=FSYNC)
    file = world.disk.open_log(log_file(world))
    file.write_durably_at(LOW, [bytes(file.size - LOW)])
    index = engine._catalog.get("t").log.index
    whole = []
    for seq in range(1, 21):
        located = index.locate(seq)
        assert located is not None
        offset, length, *_ = located[0].row(located[1])
        whole += [seq] if offset + length <= LOW else []
    assert (await read_past(engine, "t"))[0] == whole
    await engine.close()


async def test_a_checkpoint_stores_readable_records_and_keeps_the_file(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*LARGE), config=FSYNC)
    await engine.write("other", recs(*LARGE), config=FSYNC)
    spoiled = log_file(world)
    world.disk.spoil(spoiled, LOW, HIGH)
    good, bad = await read_past(engine, "t")
    for _ in range(5):
        await engine.checkpoint()
        await engine.write("t", recs("more"))
        engine._wal.shards[0].log.rotate()  # type: ignore[union-attr]
    assert (await read_past(engine, "t"))[1] == bad
    assert f"wal/damaged-{spoiled.rpartition('/')[2]}" in world.files()
    assert spoiled.removeprefix(f"{DATA}/") not in world.files()
    engine = await world.restart()
    assert (await read_past(engine, "t"))[0] == [*good, *range(21, 26)]
    assert len(await read_all(engine, "other")) == 20
    await engine.close()


async def test_a_segment_with_a_bad_sector_is_read_around(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*LARGE, tag="a"), config=FSYNC)
    await engine.write("other", recs(*LARGE), config=FSYNC)
    await engine.checkpoint()
    (data,) = [name for name in world.files() if name.endswith(".data")][:1]
    world.disk.spoil(f"{DATA}/{data}", LOW, HIGH)
    for stop in (None, "restart", "kill"):
        if stop is not None:
            engine = await getattr(world, stop)()
            if stop == "kill":
                world.disk.spoil(f"{DATA}/{data}", LOW, HIGH)
        assert engine.problems == []
        good, bad = await read_past(engine, "t")
        assert good == overlapping(20, bad)
        assert len(await read_all(engine, "other")) == 20
    await engine.close()


@pytest.mark.parametrize("part", ["idx", "del"])
async def test_a_segment_whose_index_cannot_be_read_is_reported_and_the_others_are_served(
    world: World, part: str
) -> None:
    engine = await world.open()
    await engine.write("t", [rec(1), rec(2, tag="b"), rec(3)], config=FSYNC)
    await engine.write("other", recs(1, 2, 3), config=FSYNC)
    await engine.checkpoint()
    await engine.delete("t", match=Predicate(value="b"))
    await engine.close()
    (name,) = [name for name in world.files() if name.endswith(f".{part}")][:1]
    world.disk.spoil(f"{DATA}/{name}", 0, 16)
    engine = await world.open()
    (problem,) = engine.problems
    assert 'topic "t"' in problem
    assert "cannot read" in problem
    assert (await read_past(engine, "t"))[1]
    assert len(await read_all(engine, "other")) == 3
    assert (await engine.write("t", recs("next"))).first_seq == 4
    await engine.close()


@pytest.mark.parametrize("closed", [False, True])
async def test_a_start_reports_a_bad_sector_in_the_log_and_reuses_no_number(
    world: World, closed: bool
) -> None:
    engine = await world.open(checkpoint_bytes=1 << 40)
    await engine.write("t", recs(*LARGE), config=FSYNC)
    await engine.write("other", recs("a"), config=FSYNC)
    if closed:
        world.committers.tend()
    spoiled = log_file(world)
    world.unplug()
    world.disk.spoil(spoiled, LOW, HIGH)
    for is_first in (True, False):
        engine = await world.open()
        # From now on a snapshot covers the loss.
        assert is_first == any(f"cannot read bytes {LOW} to {HIGH}" in problem for problem in engine.problems)
        assert engine.state("t").head_seq >= 20
        assert spoiled.removeprefix(f"{DATA}/") in world.files()
        page = await engine.diff("t", limit=1000)
        assert seqs(page) == list(range(1, len(seqs(page)) + 1))
        assert 3 <= len(seqs(page)) <= 6
        told = page.tombstone or (await engine.diff("t", seqs(page)[-1])).tombstone
        assert told is not None
        assert told.reason == "lost"
        assert told.gap_to >= 20
        engine._lock.__exit__(None, None, None)
        world._stop_ticking()
    engine = await world.open()
    assert (await engine.write("t", recs("next"))).first_seq > 20
    await engine.close()


@pytest.mark.parametrize("name", ["EXTENT", "CURRENT"])
async def test_a_start_reports_files_beside_the_log_and_does_without_them(world: World, name: str) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2), config=FSYNC)
    world.unplug()
    world.disk.spoil(f"{DATA}/wal/{name}", 0, 1)
    report = verify(world.disk, DATA)
    assert any(name in str(finding) for finding in report.problems)
    engine = await world.open()
    assert any(f"wal/{name}" in problem for problem in engine.problems)
    assert len(await read_all(engine, "t")) == 2
    assert (await engine.write("t", recs(3))).first_seq == 3
    await engine.close()


async def test_the_snapshot_before_is_used_when_the_newest_cannot_be_read(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(2))
    await engine.close()
    newest = [name for name in world.files() if name.startswith("meta/")][-1]
    world.disk.spoil(f"{DATA}/{newest}", 0, 1)
    report = verify(world.disk, DATA)
    assert [finding.subject for finding in report.problems] == [newest]
    assert report.topics == 1
    engine = await world.open()
    assert newest.rpartition("/")[2] in engine.problems[0]
    assert len(await read_all(engine, "t")) == 2
    await engine.close()


async def plant(world: World) -> list[str]:
    """Create a directory with two segments and a log, and a bad sector in each of them."""
    engine = await world.open(checkpoint_bytes=1 << 40)
    for topic in ("a", "b", "c"):
        await engine.write(topic, recs(*LARGE), config=FSYNC)
    await engine.checkpoint()
    await engine.write("c", recs(*LARGE))
    world.unplug()
    bad = [f"{DATA}/{name}" for name in world.files() if name.endswith(".data")][:2]
    bad.append(log_file(world))
    world.disk.spoil(bad[0], LOW, HIGH)
    world.disk.spoil(bad[1], LOW, HIGH)
    size = world.disk.stat(bad[2]).size
    world.disk.spoil(bad[2], size // 2, size // 2 + 1)
    return bad


async def test_verify_names_every_bad_file_and_range_and_checks_the_others() -> None:
    world = World(wal_file_bytes=1 << 18)
    bad = await plant(world)
    report = verify(world.disk, DATA)
    for path in bad[:2]:
        found = [one for one in report.problems if path.endswith(one.subject)]
        assert (LOW, HIGH) in [(one.start, one.end) for one in found if "device" in one.text]
        (lost,) = [one for one in found if "records cannot be read" in one.text]
        assert lost.first_seq is not None
        assert lost.last_seq is not None
        assert 1 < lost.first_seq < lost.last_seq < 10
    assert report.stored_records == 60


async def test_backup_names_every_bad_file_and_range() -> None:
    world = World(wal_file_bytes=1 << 18)
    bad = await plant(world)
    with pytest.raises(Damaged, match="there is no backup") as raised:
        backup(world.disk, DATA, "/backup", sleep=lambda _: None)
    for path in bad[:2]:
        assert f"{path}, bytes {LOW} to" in str(raised.value)
    assert world.disk.list_files("/backup") == []


async def test_an_unreadable_segment_is_not_moved() -> None:
    world = World(wal_file_bytes=1 << 18, clock=ManualClock())
    engine = await world.open()
    await engine.write("t", recs(*LARGE), config=FSYNC)
    await engine.write("other", recs(1), config=FSYNC)
    await engine.close()
    (data,) = [name for name in world.files() if name.endswith(".data")][:1]
    world.disk.spoil(f"{DATA}/{data}", LOW, HIGH)
    engine = await world.open(cold_dir=COLD, hot_retain_segments=0, segment_max_events=1)
    await engine.checkpoint()
    assert data in world.files()
    good, bad = await read_past(engine, "t")
    assert good == overlapping(20, bad)
    await engine.close()


async def test_jobs_in_a_bad_sector_are_reported_and_the_others_are_delivered(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("q", TopicConfig(type="queue", durability=Durability.FSYNC))
    await engine.write("q", recs(*LARGE))
    world.disk.spoil(log_file(world), LOW, HIGH)
    claimed = await engine.claim("q", "me", max=20)
    assert 16 <= len(list(claimed.jobs())) <= 18
    await engine.close()


async def test_unreadable_bytes_of_a_broken_file_are_not_delivered_as_records(world: World) -> None:
    """A sync fails, and delivered data that is not durable can no longer be read."""
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=Durability.MEMORY))
    await engine.write("t", recs(*LARGE))
    world.disk.spoil(log_file(world), LOW, HIGH)
    async with failing(world):
        with pytest.raises(CommitFailed):
            await engine.write("t", recs("no"))
    with pytest.raises(CommitFailed, match="cannot read"):
        await engine.write("t", recs("not yet"))
    good, bad = await read_past(engine, "t")
    assert good == overlapping(20, bad)
