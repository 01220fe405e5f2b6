"""The parts of routing that need no engine: frames, hop counts, lost ranges, the graph of routers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Corrupt
from penstock.topics.config import TopicConfig
from penstock.topics.errors import IncompatibleTopic, RouterCycle
from penstock.topics.model import Predicate
from penstock.topics.routers.copy_frame import (
    BY_VALUE,
    CopyFrame,
    CopyRun,
    CopyStyle,
    StoredRecord,
    copies,
    runs_of,
    styled,
)
from penstock.topics.routers.model import RouterConfig, RouterEntry, decode_created, encode_created
from penstock.topics.routers.table import Router, RouterTable
from penstock.topics.topic.topic import Topic
from penstock.topics.topic.watermarks import HopCounts, LostRanges, LowWatermarks

U64 = st.integers(0, 2**64 - 1)
FORWARDS = st.builds(
    CopyFrame,
    router=st.text(max_size=20),
    router_id=U64,
    source=st.text(max_size=20),
    source_id=U64,
    bits=st.integers(0, 255),
    cursor=U64,
    forwarded_total=U64,
    first_seq=U64,
    runs=st.lists(st.builds(CopyRun, U64, U64, st.integers(0, 255)), max_size=4).map(tuple),
)
ENTRY = RouterEntry(
    id=7,
    name="a->ü",
    source="a",
    source_id=1,
    dest="ü",
    dest_id=2,
    bits=27,
    match=("x", True),
    cursor=5,
    forwarded_total=6,
    dest_base=7,
)


@given(FORWARDS)
def test_a_pass_round_trips_through_its_frame(forward: CopyFrame) -> None:
    assert CopyFrame.decode(forward.encode()) == forward


@given(FORWARDS, st.randoms(use_true_random=False))
def test_a_truncated_or_extended_frame_is_corrupt(forward: CopyFrame, rng: random.Random) -> None:
    body = forward.encode()
    with pytest.raises(Corrupt):
        CopyFrame.decode(body[: rng.randrange(len(body))])
    with pytest.raises(Corrupt):
        CopyFrame.decode(body + b"\0")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_or_are_corrupt(body: bytes) -> None:
    for decode in (CopyFrame.decode, lambda raw: decode_created(1, raw)):
        try:
            decode(body)
        except Corrupt:
            continue


def test_a_pass_of_very_many_runs_is_refused_before_it_is_read() -> None:
    body = CopyFrame(
        router="r",
        router_id=1,
        source="a",
        source_id=1,
        bits=0,
        cursor=1,
        forwarded_total=1,
        first_seq=1,
        runs=(),
    ).encode()
    with pytest.raises(Corrupt):
        CopyFrame.decode(body[:-4] + b"\xff\xff\xff\xff")


def test_a_router_round_trips_through_its_frame() -> None:
    assert decode_created(7, encode_created(ENTRY)) == ENTRY
    assert ENTRY.config.bits == ENTRY.bits
    assert ENTRY.config.filter == Predicate(value="x", is_prefix=True)


@given(st.sets(st.integers(1, 60)), st.data())
def test_runs_contain_every_sequence_and_its_hops(seqs: set[int], data: st.DataObject) -> None:
    ordered = sorted(seqs)
    hops = [data.draw(st.integers(1, 3)) for _ in ordered]
    runs = runs_of(ordered, hops)
    told = [(run.source_seq + place, run.hops) for run in runs for place in range(run.records)]
    assert told == list(zip(ordered, hops, strict=True))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 8)), max_size=20))
def test_hop_counts_are_those_that_were_added(added: list[tuple[int, int, int]]) -> None:
    hops, model, at = HopCounts(), {}, 1
    for skipped, count, hop in added:
        at += skipped
        hops.add(at, count, hop)
        model |= dict.fromkeys(range(at, at + count), hop)
        at += count
    for seq in range(at + 2):
        assert hops.of(seq) == model.get(seq, 0)
    hops.forget_below(at // 2)
    assert all(hops.of(seq) == model.get(seq, 0) for seq in range(at // 2, at + 2))


def test_lost_ranges_are_merged_into_the_floor_once_no_live_record_is_before_them() -> None:
    trims, floors = LostRanges(), LowWatermarks()
    trims.add(3, 5)
    trims.add(5, 7)
    trims.add(9, 10)
    trims.settle(floors)
    assert (trims.ranges, floors.floor) == ([(3, 7), (9, 10)], 1)
    assert trims.after(0) == (3, 7)
    assert trims.after(5) == (3, 7)
    assert trims.after(6) == (9, 10)
    assert trims.after(9) is None
    floors.merge(cap=3)
    trims.settle(floors)
    assert (trims.ranges, floors.trim) == ([(9, 10)], 7)
    floors.merge(ttl=12)
    trims.settle(floors)
    assert not trims
    assert floors.floor == 12


def table_of(*edges: str) -> RouterTable:
    """Return a table of routers in the form `a->b`."""
    table = RouterTable()
    topics = {name: Topic(name=name, id=ord(name), config=TopicConfig()) for edge in edges for name in edge}
    for number, edge in enumerate(edges):
        source, dest = edge[0], edge[-1]
        entry = RouterEntry(
            id=number,
            name=edge,
            source=source,
            source_id=ord(source),
            dest=dest,
            dest_id=ord(dest),
            bits=3,
            match=None,
            cursor=0,
            forwarded_total=0,
            dest_base=0,
        )
        table.add(Router(entry, topics[source], topics[dest]))
    return table


def test_the_routers_upstream_of_a_topic_are_listed_farthest_first() -> None:
    table = table_of("a->b", "b->c", "c->d", "x->y")
    assert [router.name for router in table.upstream("d")] == ["a->b", "b->c", "c->d"]
    assert table.upstream("a") == []
    cycle = table_of("a->b", "b->a")
    assert sorted(router.name for router in cycle.upstream("a")) == ["a->b", "b->a"]


@pytest.mark.parametrize(
    ("edge", "cycle"),
    [
        ("c->a", ["c", "a", "b", "c"]),
        ("b->a", ["b", "a", "b"]),
        ("a->c", None),
        ("d->a", None),
    ],
)
def test_a_cycle_is_found_and_named(edge: str, cycle: list[str] | None) -> None:
    table = table_of("a->b", "b->c", "a->e")
    config = RouterConfig(source=edge[0], dest=edge[-1])
    if cycle is None:
        table.check_cycle(edge, config)
        return
    with pytest.raises(RouterCycle) as refused:
        table.check_cycle(edge, config)
    assert refused.value.detail == {"cycle": cycle}
    table.check_cycle(edge, RouterConfig(source=edge[0], dest=edge[-1], allow_cycle=True))


def test_a_router_does_not_conflict_with_itself() -> None:
    table = table_of("a->b", "b->a")
    table.remove(next(router for router in table if router.name == "b->a"))
    table.check_cycle("a->b", RouterConfig(source="a", dest="b"))


def test_a_removed_router_frees_its_destination() -> None:
    table = table_of("a->b")
    with pytest.raises(IncompatibleTopic):
        table.check("c->b", RouterConfig(source="c", dest="b"))
    table.remove(next(iter(table)))
    table.check("c->b", RouterConfig(source="c", dest="b"))
    assert (len(table), table.entering("b"), table.leaving("a")) == (0, (), ())


def test_copies_have_the_accounted_size_of_their_originals() -> None:
    style = CopyStyle(bits=3 | BY_VALUE, router="r", source="a", source_id=1, source_epoch=1)
    plain = StoredRecord(1, b"n", b"t", b'{"d":"\\u00e9","m":{}}', 6, True)
    batch = copies([styled(plain, style)])
    assert (batch.accounted, batch.tags) == ([6], [(0, b"t")])
    bare = styled(plain, CopyStyle(bits=0, router="r", source="a", source_id=1, source_epoch=1))
    assert (bare.node, bare.tag) == (None, None)
