"""The promises of a write: dense sequences, atomic, and visible only after its commit."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.topics.engine_doubles import FSYNC, World, gather_outcomes, rec, recs, seqs, settle, values

from penstock.topics import (
    BatchTooLarge,
    Durability,
    InvalidRequest,
    RecordTooLarge,
    ShuttingDown,
    Throttled,
    TopicConfig,
    TopicFull,
    TopicNotFound,
    WriteResult,
)


@pytest.fixture
def world() -> World:
    return World()


async def test_sequences_start_at_one_and_have_no_gap(world: World) -> None:
    engine = await world.open()
    first = await engine.write("t", recs("a", "b"))
    assert (first.first_seq, first.last_seq, first.head_seq, first.count) == (1, 2, 2, 2)
    assert (first.created, first.deduped) == (True, False)
    second = await engine.write("t", recs("c"))
    assert (second.first_seq, second.last_seq, second.created) == (3, 3, False)
    page = await engine.diff("t")
    assert (seqs(page), values(page)) == ([1, 2, 3], ["a", "b", "c"])
    assert (page.next_from_seq, page.head_seq, page.caught_up, page.lag) == (3, 3, True, 0)


async def test_records_keep_all_their_fields(world: World) -> None:
    engine = await world.open()
    await engine.write(
        "t",
        [rec({"b": 1, "a": [1, 2.5, None, "é"]}, tag="x", node="own", meta={"k": "v"}), rec(None)],
        node="batch",
    )
    one, two = (await engine.diff("t", include_tags=True)).records()
    assert bytes(one.data) == b'{"b":1,"a":[1,2.5,null,"\\u00e9"]}'
    assert (one.tag, one.node, bytes(one.meta or b"")) == ("x", "own", b'{"k":"v"}')
    assert (bytes(two.data), two.tag, two.node, two.meta) == (b"null", None, "batch", None)
    assert one.ts_ms == two.ts_ms == world.clock.now_ms()


async def test_timestamps_never_decrease_with_the_sequence(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1))
    world.clock.jump_wall(-5000)
    await engine.write("t", recs(2))
    await engine.checkpoint()
    engine = await world.restart()
    world.clock.jump_wall(-5000)
    await engine.write("t", recs(3))
    engine = await world.kill()
    world.clock.jump_wall(-5000)
    await engine.write("t", recs(4))
    stamps = [record.ts_ms for record in (await engine.diff("t")).records()]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
async def test_nothing_is_visible_before_its_commit(world: World, durability: str) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(durability=Durability(durability)))
    world.committers.hold()
    writes = [asyncio.create_task(engine.write("t", recs(n))) for n in range(3)]
    await settle()
    assert engine.state("t").head_seq == 0
    assert (await engine.diff("t")).fragments == []
    assert not any(write.done() for write in writes)
    world.committers.release()
    assert [(await write).first_seq for write in writes] == [1, 2, 3]
    assert values(await engine.diff("t")) == [0, 1, 2]


async def test_head_seq_of_a_response_covers_its_own_records(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    world.committers.hold()
    writes = [asyncio.create_task(engine.write("t", recs(n))) for n in range(2)]
    await settle()
    world.committers.release()
    assert [(await write).head_seq >= (await write).last_seq for write in writes] == [True, True]


@pytest.mark.parametrize("durability", list(Durability))
async def test_only_the_fsync_class_reports_time_for_a_sync(world: World, durability: Durability) -> None:
    engine = await world.open()
    for n in range(3):
        result = await engine.write("t", recs(n), config=TopicConfig(durability=durability))
        if durability is Durability.FSYNC:
            assert result.fsync_ms > 0.0
        else:
            assert result.fsync_ms == 0.0


async def test_an_empty_or_too_large_write_is_refused_and_creates_nothing(world: World) -> None:
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        await engine.write("t", [])
    with pytest.raises(BatchTooLarge):
        await engine.write("t", [rec(1)] * 10_001)
    with pytest.raises(RecordTooLarge):
        await engine.write("t", [rec("x" * (1 << 20))])
    with pytest.raises(InvalidRequest):
        await engine.write("no/name", recs(1))
    assert not engine.exists("t")


async def test_the_writer_chooses_whether_a_missing_topic_is_created(world: World) -> None:
    engine = await world.open()
    with pytest.raises(TopicNotFound):
        await engine.write("t", recs(1), create=False)
    with pytest.raises(TopicNotFound):
        await engine.write("t", recs(1), config=TopicConfig(auto_create=False))
    made = await engine.write("t", recs(1), create=True, config=TopicConfig(auto_create=False, cap_records=5))
    assert made.created
    assert engine.state("t").config.cap_records == 5
    again = await engine.write("t", recs(1), create=False, config=TopicConfig(cap_records=9))
    assert not again.created
    assert engine.state("t").config.cap_records == 5


async def test_concurrent_first_writes_create_one_topic(world: World) -> None:
    engine = await world.open()
    results = await asyncio.gather(*(engine.write("t", recs(n)) for n in range(5)))
    assert sum(result.created for result in results) == 1
    assert sorted(result.first_seq for result in results) == [1, 2, 3, 4, 5]
    assert len(engine.topics()[0]) == 1


async def test_a_full_queue_throttles_and_costs_no_sequence(world: World) -> None:
    engine = await world.open(wal_queue_max=2)
    await engine.put_topic("t", TopicConfig())
    world.committers.hold()
    writes = [asyncio.create_task(engine.write("t", recs(n))) for n in range(2)]
    await settle()
    with pytest.raises(Throttled):
        await engine.write("t", recs("no"))
    with pytest.raises(Throttled):
        await engine.put_topic("u", FSYNC)
    world.committers.release()
    assert [(await write).first_seq for write in writes] == [1, 2]
    assert (await engine.write("t", recs(2))).first_seq == 3
    assert (await engine.put_topic("u", FSYNC)).created
    assert engine.stats().wal.submit_full == 2


async def test_a_throttled_write_leaves_no_reservation(world: World) -> None:
    """1. a write that must reserve finds the queue full; 2. the next write must reserve instead."""
    engine = await world.open(wal_queue_max=1)
    await engine.put_topic("t", TopicConfig())
    await engine.put_topic("other", FSYNC)
    world.committers.hold()
    waiting = asyncio.create_task(engine.write("other", recs(0)))
    await settle()
    with pytest.raises(Throttled):
        await engine.write("t", recs("no"))
    world.committers.release()
    await waiting
    acked = await engine.write("t", recs("yes"))
    engine = await world.crash()
    assert (await engine.write("t", recs("later"))).first_seq > acked.last_seq


async def test_the_bytes_of_all_topics_are_bounded_including_writes_in_flight(world: World) -> None:
    engine = await world.open(max_total_bytes=10)
    await engine.put_topic("a", TopicConfig())
    await engine.put_topic("b", TopicConfig())
    world.committers.hold()
    writes = [asyncio.ensure_future(engine.write(name, recs("1234"))) for name in ("a", "b")]
    await settle()
    world.committers.release()
    outcomes = await gather_outcomes(writes)
    assert [isinstance(outcome, Throttled) for outcome in outcomes] == [False, True]
    with pytest.raises(Throttled) as caught:
        await engine.write("b", recs("1234"))
    assert caught.value.detail == {"limit": "max_total_bytes", "max": 10}
    await engine.delete("a", before_seq=2)
    await engine.write("b", recs("1234"))
    await engine.remove_topic("b")
    await engine.write("a", recs("1234"))
    engine = await world.restart()
    with pytest.raises(Throttled):
        await engine.write("a", recs("1234"))


async def test_a_write_whose_caller_is_cancelled_is_still_published(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", FSYNC)
    world.committers.hold()
    write = asyncio.create_task(engine.write("t", recs(1)))
    await settle()
    write.cancel()
    await settle()
    world.committers.release()
    await settle()
    assert values(await engine.diff("t")) == [1]
    assert (await engine.write("t", recs(2))).first_seq == 2


# ---- idempotency -------------------------------------------------------------------------------------


async def test_the_same_key_appends_once(world: World) -> None:
    engine = await world.open()
    first = await engine.write("t", recs(1, 2), idempotency_key="k")
    await engine.write("t", recs(3))
    again = await engine.write("t", recs("other"), idempotency_key="k")
    assert (again.first_seq, again.last_seq, again.head_seq) == (first.first_seq, first.last_seq, 2)
    assert (again.created, again.deduped) == (False, True)
    assert values(await engine.diff("t")) == [1, 2, 3]


async def test_concurrent_writes_with_one_key_append_once(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    world.committers.hold()
    writes = [asyncio.create_task(engine.write("t", recs(n), idempotency_key="k")) for n in range(4)]
    await settle()
    world.committers.release()
    results = [await write for write in writes]
    assert [result.deduped for result in results] == [False, True, True, True]
    assert {result.first_seq for result in results} == {1}
    assert values(await engine.diff("t")) == [0]


async def test_a_key_lives_as_long_as_its_window_and_no_longer(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(idempotency_window_ms=1000))
    await engine.write("t", recs(1), idempotency_key="k")
    await world.clock.advance(1.0)
    assert (await engine.write("t", recs(1), idempotency_key="k")).deduped
    await world.clock.advance(0.001)
    assert (await engine.write("t", recs(1), idempotency_key="k")).first_seq == 2


async def test_keys_belong_to_a_topic_and_end_with_it_or_the_process(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1), idempotency_key="k")
    assert not (await engine.write("u", recs(1), idempotency_key="k")).deduped
    await engine.remove_topic("t")
    assert not (await engine.write("t", recs(1), idempotency_key="k")).deduped
    engine = await world.restart()
    assert (await engine.write("u", recs(2), idempotency_key="k")).first_seq == 2


async def test_a_refused_write_does_not_use_up_its_key(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(cap_records=1, discard="reject"))
    await engine.write("t", recs(1))
    with pytest.raises(TopicFull):
        await engine.write("t", recs(2), idempotency_key="k")
    await engine.delete("t", before_seq=2)
    assert not (await engine.write("t", recs(2), idempotency_key="k")).deduped


async def test_a_cancelled_caller_still_leaves_the_outcome_for_its_retry(world: World) -> None:
    engine = await world.open()
    await engine.put_topic("t", TopicConfig())
    world.committers.hold()
    write = asyncio.create_task(engine.write("t", recs(1), idempotency_key="k"))
    await settle()
    write.cancel()
    await settle()
    world.committers.release()
    await settle()
    assert (await engine.write("t", recs(1), idempotency_key="k")).deduped
    assert values(await engine.diff("t")) == [1]


async def test_a_write_that_waited_for_its_key_goes_to_the_current_topic(world: World) -> None:
    """1. two writes with one key; 2. the topic is deleted after the first; 3. the window ends immediately."""
    engine = await world.open()
    await engine.put_topic("t", TopicConfig(idempotency_window_ms=0))
    world.committers.hold()
    first = asyncio.create_task(engine.write("t", recs(1), idempotency_key="k"))
    await settle()
    second = asyncio.create_task(engine.write("t", recs(2), idempotency_key="k"))
    removal = asyncio.create_task(engine.remove_topic("t"))
    await settle()
    world.clock.jump_wall(1)
    world.committers.release()
    await removal
    assert (await first).first_seq == 1
    if not (await second).deduped:
        assert values(await engine.diff("t")) == [2]


@pytest.mark.parametrize("key", ["", "k" * 257])
async def test_an_invalid_key_is_refused(world: World, key: str) -> None:
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        await engine.write("t", recs(1), idempotency_key=key)
    assert not engine.exists("t")


async def test_a_closed_engine_refuses_writes(world: World) -> None:
    engine = await world.open()
    await engine.write("t", recs(1))
    await engine.close()
    await engine.close()
    with pytest.raises(ShuttingDown):
        await engine.write("t", recs(2))
    with pytest.raises(ShuttingDown):
        engine.state("t")


async def test_append_has_its_position_unless_it_waits_for_its_topic_or_key(world: World) -> None:
    engine = await world.open()
    outcomes: list[WriteResult | Exception] = []
    assert not engine.append("t", recs(1), outcomes.append, create=False)
    await settle()
    assert [type(outcome) for outcome in outcomes] == [TopicNotFound]
    assert not engine.append("t", recs(1), outcomes.append, idempotency_key="k")
    assert not engine.append("t", recs(2), outcomes.append, idempotency_key="k")
    await settle()
    assert engine.append("t", recs(3), outcomes.append, idempotency_key="k")
    assert engine.append("t", recs(4), outcomes.append)
    await settle()
    written = [outcome for outcome in outcomes[1:] if isinstance(outcome, WriteResult)]
    assert [(one.first_seq, one.created, one.deduped) for one in written] == [
        (1, True, False),
        (1, False, True),
        (1, False, True),
        (2, False, False),
    ]


async def test_append_raises_what_is_known_before_it_waits(world: World) -> None:
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        engine.append("t", [], lambda outcome: None)
    with pytest.raises(InvalidRequest, match="idempotency_key is empty"):
        engine.append("t", recs(1), lambda outcome: None, idempotency_key="")
