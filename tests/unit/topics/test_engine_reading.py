"""Reads: immediate results, and results as soon as there are records."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import COLD, FSYNC, World, read_all, rec, recs, seqs, settle

from penstock.topics import Damaged, Page, ShuttingDown, TopicConfig, TopicNotFound


@pytest.fixture
def world() -> World:
    return World()


async def test_reading_never_creates(world: World) -> None:
    engine = await world.open()
    with pytest.raises(TopicNotFound):
        await engine.diff("t")
    with pytest.raises(TopicNotFound):
        engine.state("t")
    assert not engine.exists("t")


async def test_consecutive_pages_have_no_gap(world: World) -> None:
    engine = await world.open(segment_max_events=7)
    await engine.write("t", recs(*range(25)), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(*range(25, 40)))
    found, cursor = [], 0
    while True:
        page = await engine.diff("t", cursor, limit=9)
        found += seqs(page)
        assert page.lag == 40 - page.next_from_seq
        cursor = page.next_from_seq
        if page.caught_up:
            break
    assert found == list(range(1, 41))


async def test_a_readers_own_records_are_skipped(world: World) -> None:
    engine = await world.open()
    await engine.write("t", [rec(1, node="a"), rec(2, node="b"), rec(3), rec(4, node="a")])
    page = await engine.diff("t", node=["a"])
    assert (seqs(page), page.next_from_seq, page.caught_up) == ([2, 3], 4, True)
    assert seqs(await engine.diff("t", node=["a", "b"])) == [3]
    await engine.put_topic("t", TopicConfig(dedupe_node=False))
    assert seqs(await engine.diff("t", node=["a"])) == [1, 2, 3, 4]


async def test_a_batch_stops_before_it_is_too_large_and_has_at_least_one(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs("aaaa", "bbbb", "c"))
    assert seqs(await engine.diff("t", max_batch_bytes=1)) == [1]
    assert seqs(await engine.diff("t", max_batch_bytes=12)) == [1, 2]
    assert seqs(await engine.diff("t", max_batch_bytes=15)) == [1, 2, 3]


# ---- waiting -----------------------------------------------------------------------------------------


async def test_a_reader_that_waits_is_woken_by_a_commit_and_not_before(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = asyncio.create_task(engine.diff("t", wait_ms=10_000))
    await settle()
    world.committers.hold()
    write = asyncio.create_task(engine.write("t", recs(1)))
    await settle()
    assert not waiting.done()
    world.committers.release()
    await write
    assert seqs(await waiting) == [1]


async def test_a_record_published_between_the_read_and_the_wait_is_not_missed(world: World) -> None:
    """The first read waits for a cold segment. The record arrives during that wait."""
    engine = await world.open(cold_dir=COLD, segment_max_events=1, hot_retain_segments=0)
    await engine.write("t", [rec(1, node="me")], config=FSYNC)
    await engine.checkpoint()
    world.workers.hold()
    waiting = asyncio.create_task(engine.diff("t", node=["me"], wait_ms=10_000))
    await settle()
    assert world.workers.waiting == 1
    await engine.write("t", recs(2))
    world.workers.release()
    assert seqs(await asyncio.wait_for(waiting, 5)) == [2]


async def test_waiting_ends_at_the_timeout(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = asyncio.create_task(engine.diff("t", wait_ms=500))
    await world.clock.advance(0.499)
    assert not waiting.done()
    await world.clock.advance(0.001)
    page = await waiting
    assert (page.fragments, page.caught_up) == ([], True)
    assert len(engine._catalog.get("t").subscribers) == 0


async def test_a_reader_with_records_or_a_tombstone_does_not_wait(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=1))
    await engine.write("t", recs(1, 2))
    assert seqs(await engine.diff("t", 1, wait_ms=30_000)) == [2]
    await engine.delete("t", before_seq=3)
    assert (await engine.diff("t", 0, wait_ms=30_000)).tombstone is not None


async def test_all_of_many_waiting_readers_are_woken(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = [asyncio.create_task(engine.diff("t", wait_ms=10_000)) for _ in range(50)]
    await settle()
    await engine.write("t", recs(1))
    assert [seqs(await one) for one in waiting] == [[1]] * 50


async def test_waiting_ends_with_the_engine(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    waiting = asyncio.create_task(engine.diff("t", wait_ms=10_000))
    await settle()
    await engine.close()
    with pytest.raises(ShuttingDown):
        await waiting


# ---- cold and damaged --------------------------------------------------------------------------------


async def test_cold_records_read_like_others_and_are_counted(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=2, hot_retain_segments=1)
    await engine.write("t", recs(*range(10)), config=FSYNC)
    await engine.checkpoint()
    await engine.write("t", recs(10))
    page = await engine.diff("t")
    assert (seqs(page), page.cold_segments_read) == (list(range(1, 12)), 4)
    assert any(name.endswith(".data") for name, _ in world.disk.list_files(COLD))
    assert (await engine.diff("t", 10)).cold_segments_read == 0
    engine = await world.crash()
    assert len(await read_all(engine, "t")) == 11


async def test_records_removed_during_a_fetch_are_not_damage(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=2, hot_retain_segments=0)
    await engine.write("t", recs(1, 2, 3, 4), config=FSYNC)
    await engine.checkpoint()
    world.workers.hold()
    reading = asyncio.create_task(engine.diff("t"))
    await settle()
    await engine.delete("t", before_seq=3)
    for name, _ in list(world.disk.list_files(COLD)):
        if "seg-0000000000000001" in name:
            world.disk.unlink(f"{COLD}/{name}")
    world.workers.release()
    assert seqs(await reading) == [3, 4]


async def test_a_topic_deleted_during_a_read_is_not_found(world: World) -> None:
    engine = await world.open(cold_dir=COLD, segment_max_events=2, hot_retain_segments=0)
    await engine.write("t", recs(1, 2), config=FSYNC)
    await engine.checkpoint()
    fetch, world.workers.fetch = world.workers.fetch, None  # type: ignore[method-assign,assignment]
    gate = asyncio.Event()

    async def late(work):  # type: ignore[no-untyped-def]
        await gate.wait()
        return await fetch(work)

    world.workers.fetch = late  # type: ignore[method-assign]
    reading = asyncio.create_task(engine.diff("t"))
    await settle()
    await engine.remove_topic("t")
    await settle()
    gate.set()
    with pytest.raises(TopicNotFound):
        await reading


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("nodes", [[], ["n"]])
async def test_a_missing_segment_is_reported_at_its_first_record(
    world: World, cold: bool, nodes: list[str]
) -> None:
    engine = await world.open(
        cold_dir=COLD if cold else None, segment_max_events=3, hot_retain_segments=0 if cold else 9
    )
    await engine.write("t", [rec(n, node="m") for n in range(9)], config=FSYNC)
    await engine.checkpoint()
    await engine.close()
    root = COLD if cold else "/data"
    for name, _ in list(world.disk.list_files(root)):
        if name.endswith("seg-0000000000000004.data"):
            world.disk.unlink(f"{root}/{name}")
    engine = await world.open()
    page = await engine.diff("t", node=nodes)
    assert (seqs(page), page.next_from_seq, page.caught_up) == ([1, 2, 3], 3, False)
    with pytest.raises(Damaged) as caught:
        await engine.diff("t", 3, node=nodes)
    assert caught.value.detail is not None
    assert caught.value.detail["first_seq"] == 4
    assert seqs(await engine.diff("t", 6)) == [7, 8, 9]
    await engine.delete("t", before_seq=7)
    assert seqs(await engine.diff("t")) == [7, 8, 9]


async def _waiting_for_the_cold_tier(world: World, limit: int) -> asyncio.Task[Page]:
    """Return a reader of a topic of 30 records in 3 cold segments, which waits for the first one."""
    engine = await world.open(cold_dir=COLD, segment_max_events=10, hot_retain_segments=0)
    await engine.put_topic("t", TopicConfig(durable=True, cap_records=40))
    await engine.write("t", recs(*range(1, 31)))
    await engine.checkpoint()
    world.workers.hold()
    reading = asyncio.create_task(engine.diff("t", limit=limit))
    await settle()
    assert world.workers.waiting == 1
    return reading


async def test_a_reader_gets_a_tombstone_for_losses_during_a_cold_read(world: World) -> None:
    reading = await _waiting_for_the_cold_tier(world, limit=5)
    await world.engine.write("t", recs(*range(31, 56)))
    world.workers.release()
    page = await reading
    assert (seqs(page), page.next_from_seq) == ([16, 17, 18, 19, 20], 20)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (1, 15, "cap")


async def test_a_page_with_records_ends_before_a_loss_meanwhile(world: World) -> None:
    reading = await _waiting_for_the_cold_tier(world, limit=25)
    world.workers.release()
    world.workers.hold()
    await settle()
    assert world.workers.waiting == 1, "for the second segment"
    await world.engine.write("t", recs(*range(31, 56)))
    world.workers.release()
    page = await reading
    assert (seqs(page), page.next_from_seq, page.tombstone) == (list(range(1, 11)), 10, None)
    page = await world.engine.diff("t", page.next_from_seq, limit=2)
    assert seqs(page) == [16, 17]
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (11, 15)
