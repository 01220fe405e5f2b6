"""Pages: their content, their end, and missing or wrong bytes."""

from __future__ import annotations

import json

import pytest
from tests.unit.topics.log_doubles import NOW, MemoryTopic, StoredSegment, record

from penstock.topics.errors import Damaged
from penstock.topics.model import Page
from penstock.topics.read import page as page_module
from penstock.topics.read.page import DiffRequest, PageCursor, collect


def written(count: int) -> MemoryTopic:
    topic = MemoryTopic()
    topic.write([record({"n": n + 1}) for n in range(count)])
    return topic


def seqs(page: Page) -> list[int]:
    return [json.loads(fragment)["$seq"] for fragment in page.fragments]


def promoted(topic: MemoryTopic, last_seq: int, *, cold: bool = False) -> StoredSegment:
    segment = topic.segment_of(last_seq)
    topic.promote(segment)
    assert isinstance(segment.source, StoredSegment)
    segment.source.cold = cold
    return segment.source


def test_a_record_is_shown_with_exactly_the_members_it_has() -> None:
    topic = MemoryTopic()
    topic.write([record({"a": 1}), record(None, tag='t"', node="n\u00e9", meta={"m": {"m": 1}})])
    page = topic.read(DiffRequest.of(include_tags=True))
    assert page.fragments == [
        b'{"$seq":1,"$ts":%d,"data":{"a":1}}' % NOW,
        '{"$seq":2,"$ts":%d,"$node":"n\u00e9","$tag":"t\\"","data":null,"meta":{"m":{"m":1}}}'.encode() % NOW,
    ]
    bare = topic.read(DiffRequest.of(1, include_meta=False))
    assert bare.fragments == ['{"$seq":2,"$ts":%d,"$node":"n\u00e9","data":null}'.encode() % NOW]


@pytest.mark.parametrize("stored", ["log", "segment", "cold"])
@pytest.mark.parametrize("count", [5, 40])
def test_pages_are_the_same_in_every_tier(stored: str, count: int) -> None:
    topic = MemoryTopic()
    topic.write(
        [
            record(
                n, tag="t" if n % 2 else None, node="n" if n % 3 else None, meta={"m": n} if n % 5 else None
            )
            for n in range(count)
        ]
    )
    request = DiffRequest.of(2, include_tags=True, limit=count)
    before = topic.read(request)
    if stored != "log":
        promoted(topic, count, cold=stored == "cold")
    after = topic.read(request)
    assert after.fragments == before.fragments
    assert after.cold_segments_read == (stored == "cold")
    assert (after.next_from_seq, after.records_scanned, after.caught_up, after.lag) == (
        count,
        count - 2,
        True,
        0,
    )


def test_limits_have_defaults_and_ceilings() -> None:
    assert (DiffRequest.of().limit, DiffRequest.of(limit=5000).limit) == (256, 1000)
    assert DiffRequest.of().max_batch_bytes == 1024**2
    assert DiffRequest.of(max_batch_bytes=2**40).max_batch_bytes == 8 * 1024**2
    assert DiffRequest.of(nodes=["n"], dedupe_node=False).nodes == frozenset()


@pytest.mark.parametrize("count", [6, 60])
def test_a_page_ends_at_the_last_record_delivered_when_the_limit_ends_it(count: int) -> None:
    topic = written(count)
    topic.index.delete_seqs([3, 4])
    page = topic.read(DiffRequest.of(limit=2))
    assert (seqs(page), page.next_from_seq, page.lag) == ([1, 2], 2, count - 2)
    page = topic.read(DiffRequest.of(2, limit=1))
    assert (seqs(page), page.next_from_seq) == ([5], 5)


@pytest.mark.parametrize("count", [6, 60])
def test_a_page_ends_before_the_record_that_does_not_fit_and_has_at_least_one(count: int) -> None:
    topic = written(count)
    topic.index.delete_seqs([3])
    page = topic.read(DiffRequest.of(max_batch_bytes=16))
    assert (seqs(page), page.next_from_seq) == ([1, 2], 3)
    assert seqs(topic.read(DiffRequest.of(max_batch_bytes=13))) == [1]
    assert seqs(topic.read(DiffRequest.of(max_batch_bytes=1))) == [1]


@pytest.mark.parametrize("count", [6, 60])
def test_a_reader_that_wrote_everything_gets_nothing_and_is_caught_up(count: int) -> None:
    topic = MemoryTopic()
    topic.write([record(n) for n in range(count)], node="me")
    page = topic.read(DiffRequest.of(nodes=["you", "me"]))
    assert (page.fragments, page.next_from_seq, page.caught_up, page.tombstone) == ([], count, True, None)
    assert page.records_scanned == count
    assert len(topic.read(DiffRequest.of(nodes=["m", "mee", ""], limit=count)).fragments) == count


def test_expired_records_are_skipped_even_before_the_floor_moved() -> None:
    topic = written(3)
    topic.now_ms += 100
    topic.write([record(4)])
    assert seqs(topic.read(DiffRequest.of(), ttl_ms=100)) == [1, 2, 3, 4]
    topic.now_ms += 1
    page = topic.read(DiffRequest.of(), ttl_ms=100)
    assert (seqs(page), page.next_from_seq, page.tombstone) == ([4], 4, None)


def test_a_reader_before_the_floor_gets_a_tombstone_and_continues() -> None:
    topic = written(6)
    topic.evict(count=3)
    page = topic.read(DiffRequest.of())
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (1, 3)
    assert (seqs(page), page.earliest_seq) == ([4, 5, 6], 4)


def test_a_reader_of_a_former_topic_starts_again() -> None:
    topic = written(3)
    page = topic.read(DiffRequest.of(10))
    assert page.tombstone is not None
    assert (page.tombstone.reason, seqs(page)) == ("recreated", [1, 2, 3])
    empty = MemoryTopic().read(DiffRequest.of(10))
    assert (empty.fragments, empty.next_from_seq, empty.head_seq) == ([], 0, 0)


def test_a_deleted_tail_is_skipped() -> None:
    topic = written(5)
    topic.index.delete_seqs([4, 5])
    assert topic.read(DiffRequest.of(3)).next_from_seq == 5
    topic.index.drop_dead_runs()
    topic.index.skip_to(9)
    assert topic.read(DiffRequest.of(3)).next_from_seq == 9
    assert topic.read(DiffRequest.of(0)).next_from_seq == 9


@pytest.mark.parametrize("bad", [1, 20, 40])
@pytest.mark.parametrize("cold", [False, True])
def test_records_before_a_damaged_one_are_delivered_and_then_it_is_an_error(bad: int, cold: bool) -> None:
    topic = written(40)
    stored = promoted(topic, 40, cold=cold)
    offset, length, *_ = topic.index.runs[0].row(bad - 1)
    for at in (offset, offset + 6, offset + length - 12, offset + length - 1):
        stored.data[at] ^= 0x40
        if bad > 1:
            page = topic.read(DiffRequest.of())
            assert (seqs(page), page.next_from_seq) == (list(range(1, bad)), bad - 1)
        with pytest.raises(Damaged, match=f"stored record {bad} cannot be read") as caught:
            topic.read(DiffRequest.of(bad - 1))
        assert caught.value.detail == {"first_seq": bad, "last_seq": bad}
        stored.data[at] ^= 0x40
    assert len(topic.read(DiffRequest.of()).fragments) == 40


def test_a_segment_with_truncated_data_is_damaged_from_there_on() -> None:
    topic = written(40)
    stored = promoted(topic, 40)
    del stored.data[topic.index.runs[0].row(30)[0] + 5 :]
    assert seqs(topic.read(DiffRequest.of())) == list(range(1, 31))
    with pytest.raises(Damaged):
        topic.read(DiffRequest.of(30, nodes=["n"]))


@pytest.mark.parametrize("more", [0, 30])
def test_a_record_known_to_be_lost_is_an_error_until_it_is_deleted(more: int) -> None:
    topic = written(2)
    topic.index.append_damaged(1, NOW)
    if more:
        topic.write([record(n) for n in range(more)])
    assert seqs(topic.read(DiffRequest.of())) == [1, 2]
    with pytest.raises(Damaged):
        topic.read(DiffRequest.of(2))
    topic.index.delete_one(3)
    assert len(topic.read(DiffRequest.of(2)).fragments) == more


def test_a_cold_read_fetches_no_more_than_fits_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = written(100)
    promoted(topic, 100, cold=True)
    walk = PageCursor(topic.index, topic.floors, DiffRequest.of(10, limit=5), now_ms=NOW, ttl_ms=0)
    needed = walk.step(topic.view)
    assert needed is not None
    assert needed.start == topic.index.runs[0].row(10)[0]
    assert needed.stop == topic.index.runs[0].row(15)[0]
    monkeypatch.setattr(page_module, "RANGE_BYTES_MAX", 100)
    page = topic.read(DiffRequest.of(limit=20))
    assert seqs(page) == list(range(1, 21))
    assert page.cold_segments_read > 5


def test_records_deleted_or_evicted_during_a_fetch_are_not_delivered() -> None:
    topic = written(20)
    stored = promoted(topic, 10, cold=True)
    walk = PageCursor(topic.index, topic.floors, DiffRequest.of(), now_ms=NOW, ttl_ms=0)
    needed = walk.step(topic.view)
    assert needed is not None
    topic.index.delete_seqs([5])
    topic.evict(count=17)
    topic.write([record("new")])
    walk.supply(memoryview(stored.data)[needed.start : needed.stop])
    while not walk.done:
        assert walk.step(topic.view) is None
    page = walk.page("t")
    assert seqs(page) == [3, 4, *range(6, 22)]
    assert page.next_from_seq == 21


def test_a_segment_that_takes_the_place_of_the_log_between_two_steps_changes_nothing() -> None:
    topic = MemoryTopic()
    for n in range(40):
        topic.write([record(n)])
    walk = PageCursor(topic.index, topic.floors, DiffRequest.of(), now_ms=NOW, ttl_ms=0)
    walk.step(topic.view)
    promoted(topic, 35)
    topic.index.drop_dead_runs()
    while not walk.done:
        walk.step(topic.view)
    assert seqs(walk.page("t")) == list(range(1, 41))


def test_many_records_of_the_reader_are_skipped_in_steps_of_bounded_size() -> None:
    topic = MemoryTopic()
    for _ in range(3):
        topic.write([record(n) for n in range(3000)], node="me")
    walk = PageCursor(topic.index, topic.floors, DiffRequest.of(nodes=["me"]), now_ms=NOW, ttl_ms=0)
    steps = 0
    while not walk.done:
        walk.step(topic.view)
        steps += 1
    assert steps > 2
    assert walk.page("t").next_from_seq == 9000


def test_bytes_that_must_be_fetched_cannot_be_collected() -> None:
    topic = written(5)
    promoted(topic, 5, cold=True)
    with pytest.raises(AssertionError):
        collect("t", topic.index, topic.floors, topic.view, DiffRequest.of(), now_ms=NOW, ttl_ms=0)


@pytest.mark.parametrize("cold", [False, True])
def test_a_record_lost_before_its_segment_was_written_is_an_error_there(cold: bool) -> None:
    topic = written(10)
    topic.index.append_damaged(2, NOW)
    topic.write([record(n) for n in range(10)])
    promoted(topic, topic.index.head_seq, cold=cold)
    assert (topic.index.live, topic.index.live_bytes) == (22, 10 * 7 + 1 + 10)
    assert seqs(topic.read(DiffRequest.of())) == list(range(1, 11))
    for lost in (11, 12):
        with pytest.raises(Damaged, match=f"record {lost} "):
            topic.read(DiffRequest.of(lost - 1))
    topic.index.delete_seqs([11, 12])
    assert seqs(topic.read(DiffRequest.of(10))) == list(range(13, 23))
