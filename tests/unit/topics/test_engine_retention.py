"""Retention of a topic and its reports to readers: caps, age, tombstones."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import World, gather_outcomes, rec, recs, seqs, settle, values

from penstock.topics import Predicate, RecordTooLarge, Tombstone, TopicConfig, TopicFull


@pytest.fixture
def world() -> World:
    return World()


async def test_a_cap_of_three_keeps_the_last_three(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=3))
    for n in range(1, 7):
        await engine.write("t", recs(n))
    state = engine.state("t")
    assert (state.count, state.bytes, state.earliest_seq, state.head_seq) == (3, 3, 4, 6)
    page = await engine.diff("t")
    assert values(page) == [4, 5, 6]
    assert page.tombstone == Tombstone(
        gap_from=1, gap_to=3, reason="cap", missed_estimate=3, earliest_seq=4, head_seq=6
    )
    assert (await engine.diff("t", 2)).tombstone == Tombstone(
        gap_from=3, gap_to=3, reason="cap", missed_estimate=1, earliest_seq=4, head_seq=6
    )
    assert (await engine.diff("t", 3)).tombstone is None


async def test_a_write_larger_than_the_cap_keeps_its_end(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=2))
    result = await engine.write("t", recs(*range(10)))
    assert (result.first_seq, result.last_seq) == (1, 10)
    assert seqs(await engine.diff("t")) == [9, 10]


async def test_the_cap_counts_live_records_not_sequences(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=3))
    await engine.write("t", [rec(1), rec(2, tag="x"), rec(3)])
    await engine.delete("t", match=Predicate(value="x"))
    await engine.write("t", recs(4))
    assert seqs(await engine.diff("t")) == [1, 3, 4]
    assert (await engine.diff("t")).tombstone is None


async def test_the_byte_cap_evicts_the_oldest_until_it_holds(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_bytes=10))
    await engine.write("t", recs("aa", "bb", "cc"))
    assert (engine.state("t").bytes, seqs(await engine.diff("t"))) == (8, [2, 3])
    await engine.write("t", recs("a" * 20))
    assert (engine.state("t").count, engine.state("t").earliest_seq) == (0, 5)
    page = await engine.diff("t")
    assert (page.fragments, page.next_from_seq, page.caught_up) == ([], 4, True)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (1, 4)


async def test_age_is_strict(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(ttl_ms=1000))
    await engine.write("t", recs(1))
    await world.clock.advance(1.0)
    assert seqs(await engine.diff("t")) == [1]
    await world.clock.advance(0.001)
    state = engine.state("t")
    assert (state.count, state.bytes, state.earliest_seq) == (0, 0, 2)
    page = await engine.diff("t")
    assert page.tombstone == Tombstone(
        gap_from=1, gap_to=1, reason="ttl", missed_estimate=1, earliest_seq=2, head_seq=1
    )


async def test_a_reader_that_lost_records_to_both_gets_the_reason_mixed(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(ttl_ms=1000, cap_records=2))
    await engine.write("t", recs(1, 2, 3))
    await world.clock.advance(2.0)
    await engine.write("t", recs(4))
    reasons = [
        tombstone.reason if (tombstone := (await engine.diff("t", cursor)).tombstone) else None
        for cursor in range(5)
    ]
    assert reasons == ["mixed", "ttl", "ttl", None, None]


async def test_a_deletion_never_causes_a_tombstone(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1, 2, 3))
    await engine.delete("t", before_seq=3)
    page = await engine.diff("t")
    assert (seqs(page), page.tombstone, page.earliest_seq) == ([3], None, 3)


async def test_a_cursor_beyond_the_head_means_the_topic_was_recreated(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    page = await engine.diff("t", 9)
    assert page.tombstone == Tombstone(
        gap_from=1, gap_to=0, reason="recreated", missed_estimate=1, earliest_seq=1, head_seq=0
    )
    assert (page.next_from_seq, page.caught_up) == (0, True)
    await engine.write("t", recs(1, 2))
    page = await engine.diff("t", 9)
    assert page.tombstone is not None
    assert (page.tombstone.reason, page.tombstone.missed_estimate) == ("recreated", 2)
    assert seqs(page) == [1, 2]


# ---- discard: reject ---------------------------------------------------------------------------------


async def test_a_full_topic_that_rejects_accepts_nothing_and_uses_no_sequence(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=2, discard="reject"))
    await engine.write("t", recs(1))
    with pytest.raises(TopicFull) as caught:
        await engine.write("t", recs(2, 3))
    assert caught.value.detail == {
        "topic": "t",
        "cap_records": 2,
        "cap_bytes": 0,
        "head_seq": 1,
        "earliest_seq": 1,
    }
    assert (await engine.write("t", recs(2))).first_seq == 2
    with pytest.raises(RecordTooLarge):
        await engine.write("t", recs(1, 2, 3))
    await engine.delete("t", before_seq=2)
    assert (await engine.write("t", recs(3))).first_seq == 3


async def test_a_topic_that_rejects_is_never_evicted_from(world: World) -> None:
    """This holds even if records in the middle are gone, so that the sequences span more than the cap."""
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=3, discard="reject"))
    await engine.write("t", [rec(1), rec(2, tag="x"), rec(3, tag="x")])
    await engine.delete("t", match=Predicate(value="x"))
    await engine.write("t", recs(4, 5))
    assert seqs(await engine.diff("t")) == [1, 4, 5]
    await engine.put_topic("t", TopicConfig(cap_records=1, cap_bytes=1, discard="reject"))
    assert seqs(await engine.diff("t")) == [1, 4, 5]
    engine = await world.kill()
    page = await engine.diff("t")
    assert (seqs(page), page.tombstone) == ([1, 4, 5], None)


async def test_writes_in_flight_count_for_a_topic_that_rejects(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=3, discard="reject"))
    await engine.put_topic("b", TopicConfig(cap_bytes=5, discard="reject"))
    world.committers.hold()
    calls = [engine.write("t", recs(n)) for n in range(5)] + [engine.write("b", recs("x")) for _ in range(2)]
    writes = [asyncio.ensure_future(call) for call in calls]
    await settle()
    world.committers.release()
    outcomes = await gather_outcomes(writes)
    assert [isinstance(one, TopicFull) for one in outcomes] == [False] * 3 + [True] * 2 + [False, True]
    assert engine.state("t").count == 3


async def test_expired_records_make_room_in_a_topic_that_rejects(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=1, ttl_ms=1000, discard="reject"))
    await engine.write("t", recs(1))
    await world.clock.advance(1.001)
    assert (await engine.write("t", recs(2))).first_seq == 2


# ---- changing the caps -------------------------------------------------------------------------------


async def test_lower_caps_take_effect_immediately_and_higher_ones_restore_nothing(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(*range(1, 11)))
    await engine.put_topic("t", TopicConfig(cap_records=4))
    assert engine.state("t").count == 4
    await engine.put_topic("t", TopicConfig(cap_records=100))
    for _ in range(2):
        page = await engine.diff("t")
        assert seqs(page) == [7, 8, 9, 10]
        assert page.tombstone is not None
        assert (page.tombstone.gap_to, page.tombstone.reason) == (6, "cap")
        engine = await world.kill()


async def test_a_shorter_age_takes_effect_immediately(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1))
    await world.clock.advance(5)
    await engine.write("t", recs(2))
    await engine.put_topic("t", TopicConfig(ttl_ms=1000))
    assert engine.state("t").count == 1
    await engine.put_topic("t", TopicConfig())
    engine = await world.kill()
    page = await engine.diff("t")
    assert seqs(page) == [2]
    assert page.tombstone is not None
    assert page.tombstone.reason == "ttl"


@pytest.mark.parametrize("stop", ["restart", "kill", "crash"])
async def test_floors_survive_a_restart(world: World, stop: str) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=2, ttl_ms=10_000, durable=True))
    await engine.write("t", recs(1, 2, 3))
    await world.clock.advance(11)
    await engine.write("t", recs(4))
    before = [(await engine.diff("t", n)).tombstone for n in range(5)]
    engine = await getattr(world, stop)()
    assert [(await engine.diff("t", n)).tombstone for n in range(5)] == before


@pytest.mark.parametrize(("change", "left"), [("delete", [2, 4]), ("config", [2, 3, 4])])
async def test_records_evicted_by_a_write_in_flight_stay_evicted(
    world: World, change: str, left: list[int]
) -> None:
    """1. a write that evicts is submitted; 2. a change makes room; 3. both are committed."""
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durable=True, cap_records=3))
    await engine.write("t", [rec(1), rec(2), rec(3, tag="x")])
    world.committers.hold()
    write = asyncio.create_task(engine.write("t", recs(4)))
    await settle()
    later = asyncio.create_task(
        engine.delete("t", match=Predicate(value="x"))
        if change == "delete"
        else engine.put_topic("t", TopicConfig(durable=True, cap_records=100))
    )
    await settle()
    world.committers.release()
    await asyncio.gather(write, later)
    told = (await engine.diff("t")).tombstone
    assert told is not None
    for stop in ("kill", "crash", "restart"):
        page = await engine.diff("t")
        assert (seqs(page), page.tombstone, engine.state("t").count) == (left, told, len(left))
        engine = await getattr(world, stop)()


async def test_floors_that_moved_without_a_write_are_logged_in_time(world: World) -> None:
    """Expired records must not come back if the age limit is removed after a later crash."""
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(ttl_ms=1000, durable=True))
    await engine.write("t", recs(1, 2))
    await world.clock.advance(1.5)
    assert engine.state("t").count == 0
    await world.clock.advance(2.0)
    world.clock.jump_wall(-60_000)
    engine = await world.kill()
    assert engine.state("t").count == 0
    assert (await engine.diff("t")).tombstone is not None


async def test_a_floor_that_failed_to_be_logged_is_logged_with_the_next_write(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=1, durable=True))
    await engine.write("t", recs(1, 2))
    from tests.unit.topics.test_engine_failures import failing

    async with failing(world):
        with pytest.raises(Exception, match="could not be written"):
            await engine.write("t", recs(3))
    await engine.put_topic("t", TopicConfig(durable=True))
    engine = await world.crash()
    assert seqs(await engine.diff("t")) == [2]
