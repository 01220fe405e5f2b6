"""Routers: what is copied, how copies look, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from tests.unit.topics.engine_doubles import World, read_all, rec, recs, seqs, settle, values

from penstock.topics import (
    Durability,
    Engine,
    IncompatibleTopic,
    InvalidRequest,
    Predicate,
    RouterConfig,
    RouterCycle,
    RouterNotFound,
    Throttled,
    TopicConfig,
    TopicNotFound,
)

AB = RouterConfig(source="a", dest="b")


async def routed(**config: object) -> World:
    world = World(**config)
    engine = await world.open()
    await engine.put_router("a->b", AB)
    return world


async def test_records_appended_to_the_source_are_in_the_next_diff_of_the_destination() -> None:
    world = await routed()
    await world.engine.write("a", [rec(1, tag="t", node="n", meta={"k": 1}), rec({"x": "ä"})])
    page = await world.engine.diff("b", include_tags=True)
    first, second = page.records()
    assert (first.seq, first.tag, first.node, bytes(first.data)) == (1, "t", "n", b"1")
    assert first.meta is not None
    assert json.loads(bytes(first.meta)) == {"k": 1}
    assert (second.seq, second.tag, second.node, second.meta) == (2, None, None, None)
    state = world.engine.state("b")
    assert (state.count, state.bytes) == (2, world.engine.state("a").bytes)
    assert (await world.engine.router("a->b")).forwarded_total == 2
    await world.engine.close()


async def test_a_router_starts_at_the_head_of_its_source() -> None:
    world = World()
    engine = await world.open()
    await engine.write("a", recs(1, 2))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(3))
    assert values(await engine.diff("b")) == [3]
    await engine.close()


async def test_flags_decide_what_a_copy_keeps() -> None:
    world = World()
    engine = await world.open()
    await engine.put_router("r", RouterConfig(source="a", dest="b", preserve_node=False, preserve_tag=False))
    await engine.write("a", [rec(1, tag="t", node="n")])
    (copy,) = (await engine.diff("b", include_tags=True)).records()
    assert (copy.tag, copy.node) == (None, None)
    assert (await engine.delete("b", match=Predicate(value="t"))).deleted == 0
    await engine.close()


@pytest.mark.parametrize(
    ("match", "passed"),
    [(Predicate(value="x"), [1]), (Predicate(value="x", is_prefix=True), [1, 2])],
)
async def test_a_filter_lets_matching_tags_through(match: Predicate, passed: list[int]) -> None:
    world = World()
    engine = await world.open()
    await engine.put_router("r", RouterConfig(source="a", dest="b", filter=match))
    await engine.write("a", [rec(1, tag="x"), rec(2, tag="xy"), rec(3, tag="y"), rec(4)])
    page = await engine.diff("b")
    assert (values(page), seqs(page)) == (passed, list(range(1, len(passed) + 1)))
    assert (await engine.router("r")).forwarded_total == len(passed)
    await engine.close()


async def test_copies_carry_tags_that_a_delete_finds() -> None:
    world = await routed()
    await world.engine.write("a", [rec(1, tag="x"), rec(2)])
    await world.engine.drain("b")
    assert (await world.engine.delete("b", match=Predicate(value="x"))).deleted == 1
    assert values(await world.engine.diff("a")) == [1, 2]
    await world.engine.close()


async def test_a_deletion_in_the_source_leaves_the_copy() -> None:
    world = await routed()
    await world.engine.write("a", recs(1, 2))
    await world.engine.drain("b")
    await world.engine.delete("a", before_seq=3)
    assert values(await world.engine.diff("b")) == [1, 2]
    await world.engine.close()


async def test_records_deleted_before_they_are_copied_are_not_copied() -> None:
    world = await routed()
    await world.engine.write("a", recs(1, 2, 3))
    await world.engine.delete("a", before_seq=3)
    page = await world.engine.diff("b")
    assert (values(page), seqs(page), page.tombstone) == ([3], [1], None)
    await world.engine.close()


async def test_direct_writes_and_copies_share_one_sequence() -> None:
    world = await routed()
    for value in range(3):
        await world.engine.write("a", recs(f"a{value}"))
        await world.engine.drain("b")
        await world.engine.write("b", recs(f"b{value}"))
    page = await world.engine.diff("b")
    assert values(page) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert seqs(page) == [1, 2, 3, 4, 5, 6]
    await world.engine.close()


async def test_a_chain_is_drained_from_its_beginning() -> None:
    world = await routed()
    await world.engine.put_router("b->c", RouterConfig(source="b", dest="c"))
    await world.engine.write("a", recs(1, 2))
    assert values(await world.engine.diff("c")) == [1, 2]
    await world.engine.close()


async def test_two_routers_of_one_source_may_share_a_destination() -> None:
    world = await routed()
    await world.engine.put_router("again", AB)
    await world.engine.write("a", recs(1))
    assert values(await world.engine.diff("b")) == [1, 1]
    await world.engine.close()


async def test_a_second_source_is_refused() -> None:
    world = await routed()
    with pytest.raises(IncompatibleTopic) as refused:
        await world.engine.put_router("c->b", RouterConfig(source="c", dest="b"))
    assert refused.value.detail == {"topic": "b", "reason": "router_dest_fan_in"}
    assert not world.engine.exists("c")
    await world.engine.close()


async def test_a_router_cannot_be_pointed_elsewhere() -> None:
    world = await routed()
    with pytest.raises(IncompatibleTopic) as refused:
        await world.engine.put_router("a->b", RouterConfig(source="a", dest="c"))
    assert refused.value.detail == {
        "router": "a->b",
        "reason": "router_repoint_forbidden",
        "existing_source": "a",
        "existing_dest": "b",
    }
    await world.engine.close()


async def test_a_cycle_is_refused_and_named() -> None:
    world = await routed()
    await world.engine.put_router("b->c", RouterConfig(source="b", dest="c"))
    with pytest.raises(RouterCycle) as refused:
        await world.engine.put_router("c->a", RouterConfig(source="c", dest="a"))
    assert refused.value.detail == {"cycle": ["c", "a", "b", "c"]}
    await world.engine.close()


async def test_a_record_passes_a_cycle_eight_times() -> None:
    world = await routed()
    await world.engine.put_router("b->a", RouterConfig(source="b", dest="a", allow_cycle=True))
    await world.engine.write("a", recs("x"))
    assert len(await read_all(world.engine, "a")) == 5
    assert len(await read_all(world.engine, "b")) == 4
    assert len(await read_all(world.engine, "a")) == 5
    await world.engine.close()


async def test_hops_outlive_a_crash() -> None:
    world = await routed()
    await world.engine.put_router("b->a", RouterConfig(source="b", dest="a", allow_cycle=True))
    await world.engine.write("a", recs("x"))
    await world.engine.drain("a")
    engine = await world.kill()
    await engine.drain("a")
    assert (engine.state("a").count, engine.state("b").count) == (5, 4)
    await engine.close()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("-r", AB),
        ("", AB),
        ("r" * 256, AB),
        ("r", RouterConfig(source="a", dest="a")),
        ("r", RouterConfig(source="a b", dest="b")),
        ("r", RouterConfig(source="a", dest="")),
    ],
)
async def test_a_bad_name_is_refused_and_creates_nothing(name: str, config: RouterConfig) -> None:
    world = World()
    engine = await world.open()
    with pytest.raises(InvalidRequest):
        await engine.put_router(name, config)
    assert engine.topic_count == 0
    await engine.close()


async def test_a_missing_destination_may_be_refused() -> None:
    world = World()
    engine = await world.open()
    with pytest.raises(TopicNotFound) as refused:
        await engine.put_router("r", RouterConfig(source="a", dest="b", create_dest=False))
    assert refused.value.detail == {"topic": "b"}
    assert engine.topic_count == 0
    await engine.close()


async def test_the_number_of_routers_is_limited() -> None:
    world = await routed(max_routers=1)
    with pytest.raises(Throttled) as refused:
        await world.engine.put_router("other", RouterConfig(source="a", dest="c"))
    assert refused.value.detail == {"limit": "max_routers", "max": 1}
    assert not world.engine.exists("c")
    assert not (await world.engine.put_router("a->b", AB)).created
    await world.engine.close()


async def test_a_router_that_would_create_too_many_topics_creates_none() -> None:
    world = World(max_topics=1)
    engine = await world.open()
    with pytest.raises(Throttled):
        await engine.put_router("a->b", AB)
    assert engine.topic_count == 0
    await engine.close()


async def test_putting_a_router_again_keeps_its_cursor_and_total() -> None:
    world = await routed()
    await world.engine.write("a", recs(1, 2))
    await world.engine.drain("b")
    assert not (await world.engine.put_router("a->b", AB)).created
    changed = RouterConfig(source="a", dest="b", filter=Predicate(value="x"))
    assert not (await world.engine.put_router("a->b", changed)).created
    await world.engine.write("a", [rec(3), rec(4, tag="x")])
    assert values(await world.engine.diff("b")) == [1, 2, 4]
    assert (await world.engine.router("a->b")).forwarded_total == 3
    await world.engine.close()


async def test_a_removed_router_copies_nothing_and_leaves_its_copies() -> None:
    world = await routed()
    await world.engine.write("a", recs(1))
    assert (await world.engine.remove_router("a->b")).deleted
    assert not (await world.engine.remove_router("a->b")).deleted
    await world.engine.write("a", recs(2))
    assert values(await world.engine.diff("b")) == [1]
    with pytest.raises(RouterNotFound):
        await world.engine.router("a->b")
    await world.engine.close()


@pytest.mark.parametrize("topic", ["a", "b"])
async def test_routers_are_removed_with_their_topics(topic: str) -> None:
    world = await routed()
    await world.engine.put_router("also", AB)
    assert (await world.engine.remove_topic(topic)).routers_removed == ("a->b", "also")
    assert world.engine.routers() == ([], None)
    engine = await world.crash()
    assert engine.routers() == ([], None)
    await engine.close()


async def test_acknowledged_records_are_copied_before_their_topic_is_deleted() -> None:
    world = await routed()
    await world.engine.write("a", recs(1, 2))
    await world.engine.remove_topic("a")
    assert values(await world.engine.diff("b")) == [1, 2]
    await world.engine.close()


async def test_a_trimmed_source_leaves_a_reported_gap() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(cap_records=3))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(*range(10)))
    page = await engine.diff("b")
    assert (values(page), seqs(page)) == ([7, 8, 9], [8, 9, 10])
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (1, 7)
    assert (page.tombstone.reason, page.tombstone.earliest_seq, page.earliest_seq) == ("source_trim", 8, 8)
    assert (await engine.router("a->b")).forwarded_total == 10
    await engine.close()


@pytest.mark.parametrize("how", ["on", "checkpoint", "crash", "restart"])
async def test_a_gap_after_live_records_is_reported_when_it_is_reached(how: str) -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(durable=True, cap_records=2))
    await engine.put_topic("b", TopicConfig(durable=True))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2))
    await engine.drain("b")
    await engine.write("a", recs(3, 4, 5, 6))
    await engine.drain("b")
    if how == "checkpoint":
        await engine.checkpoint()
        engine = await world.kill()
    elif how == "crash":
        engine = await world.crash()
    elif how == "restart":
        engine = await world.restart()
    first = await engine.diff("b")
    assert (values(first), first.tombstone, first.next_from_seq) == ([1, 2], None, 2)
    second = await engine.diff("b", 2)
    assert (values(second), seqs(second), second.caught_up) == ([5, 6], [5, 6], True)
    assert second.tombstone is not None
    assert (second.tombstone.gap_from, second.tombstone.gap_to) == (3, 4)
    assert second.tombstone.reason == "source_trim"
    middle = await engine.diff("b", 3)
    assert middle.tombstone is not None
    assert (middle.tombstone.gap_from, middle.tombstone.gap_to) == (4, 4)
    assert (await engine.diff("b", 4)).tombstone is None
    await engine.delete("b", before_seq=3)
    told = (await engine.diff("b")).tombstone
    assert told is not None
    assert (told.gap_from, told.gap_to) == (3, 4)
    await engine.close()


async def test_a_full_destination_delays_the_router_and_loses_nothing() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("b", TopicConfig(cap_records=2, discard="reject"))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2, 3, 4, 5))
    assert values(await engine.diff("b")) == [1, 2]
    assert (await engine.router("a->b")).forwarded_total == 2
    await engine.delete("b", before_seq=3)
    page = await engine.diff("b")
    assert (values(page), seqs(page)) == ([3, 4], [3, 4])
    await engine.delete("b", before_seq=5)
    assert values(await engine.diff("b")) == [5]
    await engine.close()


async def test_caps_of_the_destination_evict_copies_and_report_it() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("b", TopicConfig(cap_records=2))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2, 3, 4, 5))
    page = await engine.diff("b")
    assert (values(page), seqs(page)) == ([4, 5], [4, 5])
    assert page.tombstone is not None
    assert page.tombstone.reason == "cap"
    await engine.close()


async def test_records_that_expired_before_they_were_copied_are_skipped() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(ttl_ms=1000))
    await engine.put_topic("b", TopicConfig(cap_records=1, discard="reject"))
    await engine.write("b", recs("full"))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1))
    await world.clock.advance(2.0)
    await engine.write("a", recs(2))
    await engine.delete("b", before_seq=2)
    page = await engine.diff("b")
    assert (values(page), seqs(page), page.tombstone) == ([2], [2], None)
    await engine.close()


async def test_exactly_once_copies_contain_their_origin() -> None:
    world = World()
    engine = await world.open()
    config = RouterConfig(source="a", dest="b", guarantee="exactly_once")
    await engine.put_router("r", config)
    full = {str(key): key for key in range(64)}
    await engine.write("a", [rec(1), rec(2, meta={"k": "\u00e9"}), rec(3, meta=[1]), rec(4, meta=full)])
    metas = [json.loads(bytes(record.meta or b"")) for record in (await engine.diff("b")).records()]
    origin = {
        "idempotency_key": "router:r:1:1:2",
        "router": "r",
        "source_topic": "a",
        "source_topic_id": 1,
        "source_epoch": 1,
        "source_seq": 2,
    }
    assert metas[1] == {"k": "é", "_topics_router": origin}
    assert set(metas[0]) == {"_topics_router"}
    assert metas[2]["_topics_original_meta"] == [1]
    assert metas[3]["_topics_original_meta"] == full
    before = engine.state("b")
    engine = await world.kill()
    assert (engine.state("b").count, engine.state("b").bytes) == (before.count, before.bytes)
    await engine.close()


def origin_of(seq: int, *, router: str = "r") -> dict[str, object]:
    return {
        "_topics_router": {
            "idempotency_key": f"router:{router}:1:1:{seq}",
            "router": router,
            "source_topic": "a",
            "source_topic_id": 1,
            "source_epoch": 1,
            "source_seq": seq,
        }
    }


async def once() -> World:
    world = World()
    engine = await world.open()
    # A crash leaves no gap in the numbers.
    await engine.put_topic("a", TopicConfig(durability=Durability.FSYNC))
    await engine.put_router("r", RouterConfig(source="a", dest="b", guarantee="exactly_once"))
    await engine.write("a", recs(1))
    assert values(await engine.diff("b")) == [1]
    return world


async def test_exactly_once_makes_no_copy_whose_origin_is_in_the_destination() -> None:
    world = await once()
    engine = world.engine
    await engine.write("b", [rec("direct", meta=origin_of(3))])
    await engine.write("a", recs(2, 3, 4))
    assert values(await engine.diff("b")) == [1, "direct", 2, 4]
    assert (await engine.router("r")).forwarded_total == 3
    engine = await world.kill()
    await engine.write("a", recs(5))
    assert values(await engine.diff("b")) == [1, "direct", 2, 4, 5]
    await engine.close()


async def test_an_origin_written_before_a_crash_is_found_after_it() -> None:
    world = await once()
    await world.engine.write("b", [rec("direct", meta=origin_of(2))])
    engine = await world.kill()
    await engine.write("a", recs(2, 3))
    assert values(await engine.diff("b")) == [1, "direct", 3]
    await engine.close()


async def test_an_origin_that_a_checkpoint_moved_is_found_while_the_server_runs() -> None:
    world = await once()
    engine = world.engine
    await engine.write("b", [rec("direct", meta=origin_of(2))])
    await engine.checkpoint()
    await engine.write("a", recs(2, 3))
    assert values(await engine.diff("b")) == [1, "direct", 3]
    await engine.close()


async def test_only_a_live_record_with_the_same_origin_prevents_a_copy() -> None:
    world = await once()
    engine = world.engine
    wrong = origin_of(3)
    wrong["_topics_router"] = {"idempotency_key": "router:r:1:1:4", "source_seq": 3}
    await engine.write("b", [rec("deleted", meta=origin_of(2), tag="x"), rec("wrong", meta=wrong)])
    await engine.write("b", [rec("other", meta=origin_of(3, router="q"))])
    await engine.write("b", [rec("odd", meta=["_topics_router"])])
    await engine.delete("b", match=Predicate(value="x"))
    await engine.write("a", recs(2, 3, 4))
    assert values(await engine.diff("b")) == [1, "wrong", "other", "odd", 2, 3, 4]
    await engine.close()


async def test_a_deleted_origin_does_not_prevent_a_copy() -> None:
    world = await once()
    engine = world.engine
    await engine.write("b", [rec("direct", meta=origin_of(3), tag="x")])
    await engine.write("a", recs(2))
    assert values(await engine.diff("b")) == [1, "direct", 2]
    await engine.delete("b", match=Predicate(value="x"))
    await engine.write("a", recs(3))
    assert values(await engine.diff("b")) == [1, 2, 3]
    await engine.close()


async def test_an_origin_counts_even_after_a_failed_pass() -> None:
    from penstock.testing.disk import DiskFault, PlannedFault

    world = await once()
    engine = world.engine
    await engine.write("b", [rec("direct", meta=origin_of(2))])
    await engine.write("a", recs(2, 3))
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    await engine.drain("b")
    world.disk.plan = None
    assert list((await read_all(engine, "b")).values()) == [1, "direct", 3]
    await engine.close()


async def test_an_at_least_once_router_ignores_origins_in_the_destination() -> None:
    world = await routed()
    await world.engine.write("b", [rec("direct", meta=origin_of(1, router="a->b"))])
    await world.engine.write("a", recs(1))
    assert values(await world.engine.diff("b")) == ["direct", 1]
    await world.engine.close()


async def test_a_long_poll_at_a_destination_is_woken_by_a_copy() -> None:
    world = await routed()
    poll = asyncio.ensure_future(world.engine.diff("b", wait_ms=1000))
    await settle()
    assert not poll.done()
    await world.engine.write("a", recs(1))
    assert values(await poll) == [1]
    await world.engine.close()


async def test_a_destination_without_readers_is_filled_by_the_tick() -> None:
    world = await routed()
    await world.engine.write("a", recs(1))
    await settle()
    assert world.engine.state("b").count == 0
    for _ in range(3):
        await world.clock.advance(0.05)
        await settle()
    assert world.engine.state("b").count == 1
    await world.engine.close()


async def test_copies_are_not_written_to_the_log() -> None:
    world = await routed(wal_file_bytes=1 << 20)
    await world.engine.write("a", recs("x" * 5000))
    before = world.engine.stats().wal.bytes_written
    await world.engine.drain("b")
    assert world.engine.stats().wal.bytes_written - before < 500
    assert values(await world.engine.diff("b")) == ["x" * 5000]
    await world.engine.close()


CLASSES = [Durability.EPHEMERAL, Durability.MEMORY, Durability.DISK, Durability.FSYNC]


@pytest.mark.parametrize("source", CLASSES)
@pytest.mark.parametrize("dest", CLASSES)
async def test_copies_are_as_durable_as_their_destination(source: Durability, dest: Durability) -> None:
    world = World(wal_shards=2)
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(durability=source))
    await engine.put_topic("b", TopicConfig(durability=dest))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2, 3))
    assert values(await engine.diff("b")) == [1, 2, 3]
    await engine.delete("a", before_seq=3)
    engine = await world.crash()
    assert engine.problems == []
    if dest is Durability.FSYNC:
        assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    await engine.write("a", recs(9))
    found = await read_all(engine, "b")
    assert list(found.values())[-1] == 9
    await engine.close()


async def test_copies_that_were_read_survive_a_kill_whatever_happens_to_the_source() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("a", TopicConfig(cap_records=2))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2))
    await engine.checkpoint()
    await engine.write("b", recs("direct"))
    await engine.write("a", recs(3, 4))
    expected = await read_all(engine, "b")
    await engine.delete("a", before_seq=5)
    await engine.write("a", recs(5, 6, 7))
    expected |= await read_all(engine, "b")
    for _ in range(3):
        engine = await world.kill()
        assert engine.problems == []
        assert await read_all(engine, "b") == expected
    await engine.remove_topic("a")
    for _ in range(2):
        engine = await world.kill()
        assert await read_all(engine, "b") == expected
    await engine.checkpoint()
    engine = await world.kill()
    assert await read_all(engine, "b") == expected
    await engine.close()


async def test_the_segments_of_a_deleted_source_stay_until_its_copies_are_stored() -> None:
    world = World()
    engine = await world.open()
    await engine.put_topic("b", TopicConfig(cap_records=1, discard="reject"))
    await engine.put_router("a->b", AB)
    await engine.write("a", recs(1, 2, 3))
    await engine.drain("b")
    await engine.checkpoint()
    await engine.put_topic("b", TopicConfig())
    assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    await engine.remove_topic("a")
    await settle()
    for _ in range(2):
        engine = await world.kill()
        assert engine.problems == []
        assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    await engine.checkpoint()
    await engine.close()
    engine = await world.open()
    assert await read_all(engine, "b") == {1: 1, 2: 2, 3: 3}
    await engine.close()


async def test_a_failed_commit_copies_nothing_and_is_repeated() -> None:
    from penstock.testing.disk import DiskFault, PlannedFault

    world = await routed()
    await world.engine.write("a", recs(1, 2))
    world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
    await world.engine.drain("b")
    world.disk.plan = None
    assert await read_all(world.engine, "b") == {1: 1, 2: 2}
    assert (await world.engine.router("a->b")).forwarded_total == 2
    await world.engine.close()


def listed(engine: Engine, **query: object) -> list[str]:
    return [state.router for state in engine.routers(**query)[0]]  # type: ignore[arg-type]


async def test_routers_are_listed_by_name_page_by_page() -> None:
    world = World()
    engine = await world.open()
    for source, dest in (("a", "b"), ("a", "c"), ("d", "e")):
        await engine.put_router(f"{source}->{dest}", RouterConfig(source=source, dest=dest))
    assert listed(engine) == ["a->b", "a->c", "d->e"]
    assert listed(engine, source="a") == ["a->b", "a->c"]
    assert listed(engine, dest="e") == ["d->e"]
    assert listed(engine, prefix="a") == ["a->b", "a->c"]
    first, after = engine.routers(limit=2)
    assert ([state.router for state in first], after) == (["a->b", "a->c"], "a->c")
    assert listed(engine, after="a->c") == ["d->e"]
    await engine.close()


@pytest.mark.parametrize("seed", range(30))
async def test_every_record_is_read_and_every_lost_range_reported_for_all_page_sizes(seed: int) -> None:
    rng = random.Random(seed)
    world = World(segment_max_events=4)
    engine = await world.open()
    await engine.put_topic("b", TopicConfig(durability=Durability.EPHEMERAL))
    topic = engine._catalog.get("b")
    lost: set[int] = set()
    for _ in range(rng.randint(2, 9)):
        if rng.random() < 0.5:
            await engine.write("b", recs(*range(rng.randint(1, 4))))
        else:
            count = rng.randint(1, 3)
            lost |= set(range(topic.log.index.head_seq + 1, topic.log.index.head_seq + 1 + count))
            topic.mark_lost(count)
            topic.log.forget_in_flight()
        if rng.random() < 0.3 and topic.log.index.head_seq:
            topic.log.index.delete_seqs([rng.randint(1, topic.log.index.head_seq)])
        if rng.random() < 0.2:
            await engine.delete("b", before_seq=rng.randint(1, topic.log.index.head_seq + 1))
    live = {seq for seq in range(1, topic.log.index.head_seq + 1) if topic.log.index.locate(seq) is not None}
    for start in range(topic.log.index.head_seq + 1):
        at, got, told = start, [], set()
        while True:
            page = await engine.diff("b", at, limit=rng.randint(1, 5))
            got += seqs(page)
            if page.tombstone is not None:
                assert page.tombstone.reason == "source_trim"
                told |= set(range(page.tombstone.gap_from, page.tombstone.gap_to + 1))
            assert page.next_from_seq >= at
            if page.caught_up:
                break
            assert page.next_from_seq > at
            at = page.next_from_seq
        assert got == sorted(seq for seq in live if seq > start)
        assert {seq for seq in lost if seq > start} <= told
        assert not told & set(got)
    await engine.close()
