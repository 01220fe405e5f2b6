"""The index of a topic: exact numbers after any sequence of changes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.topics.log_doubles import NOW, MemoryTopic, StoredSegment, record

from penstock.topics.segments.columns import Columns, pack_row
from penstock.topics.segments.format import HOLE
from penstock.topics.topic.index import HOLE_ROWS_MAX, NOTHING, RUN_ROWS_MAX, TopicIndex


def written(count: int, at_once: int = 10) -> MemoryTopic:
    topic = MemoryTopic()
    for first in range(0, count, at_once):
        topic.write([record("x" * 8) for _ in range(min(at_once, count - first))])
        topic.now_ms += 10
    return topic


def test_a_fresh_index_is_empty() -> None:
    index = TopicIndex()
    assert (index.head_seq, index.earliest_seq, index.base_seq, index.live, index.live_bytes) == (
        0,
        1,
        1,
        0,
        0,
    )
    assert index.evict_to_count(0) == index.evict_to_bytes(0) == index.expire(NOW, 1) == NOTHING
    assert index.delete_prefix(5) == index.delete_seqs([1, 2]) == NOTHING
    assert index.locate(1) is None
    assert index.run_from(1) is None
    assert index.are_live(np.array([1], np.uint64)).tolist() == [False]


def test_writes_continue_where_the_last_one_ended() -> None:
    topic = written(3)
    batch = topic.write([record(1)])
    with pytest.raises(AssertionError):
        topic.index.append(batch, file=1, base=0)


@pytest.mark.parametrize("excess", [1, 5, 8, 9, 25, 30])
def test_a_cap_counts_live_records_only(excess: int) -> None:
    topic = written(40)
    topic.index.delete_seqs([1, 2, 7, 20])
    removed = topic.index.evict_to_count(36 - excess)
    gone = [seq for seq in range(1, 41) if seq not in (1, 2, 7, 20)][:excess]
    assert removed == (excess, excess * 10, gone[-1] + 1)
    assert topic.index.live == 36 - excess
    assert topic.index.earliest_seq == next(s for s in range(gone[-1] + 1, 41) if s not in (7, 20))


def test_a_byte_cap_removes_until_the_rest_fits() -> None:
    topic = MemoryTopic()
    for size in (10, 20, 30, 40):
        topic.write([record("x" * (size - 2))])
    assert topic.index.evict_to_bytes(100) == NOTHING
    assert topic.index.evict_to_bytes(90) == (1, 10, 2)
    assert topic.index.evict_to_bytes(69) == (2, 50, 4)
    assert topic.index.evict_to_bytes(39) == (1, 40, 5)
    assert (topic.index.live, topic.index.live_bytes, topic.index.earliest_seq) == (0, 0, 5)


def test_records_expire_when_they_are_older_than_the_ttl_and_not_before() -> None:
    topic = written(30)
    assert topic.index.expire(NOW + 100, 100) == NOTHING
    assert topic.index.expire(NOW + 101, 100) == (10, 100, 11)
    assert topic.index.expire(NOW + 1000, 0) == NOTHING
    assert topic.index.expire(NOW + 1000, 10) == (20, 200, 31)
    assert topic.index.earliest_seq == 31


def test_only_the_expired_prefix_is_removed() -> None:
    topic = MemoryTopic()
    for step in (5, 0, -50, 5):
        topic.now_ms = NOW + step
        topic.write([record(1)])
    assert topic.index.expire(NOW + 12, 10) == NOTHING
    assert topic.index.live == 4


def test_a_prefix_is_removed_across_segments_and_log() -> None:
    topic = written(50)
    topic.promote(topic.segment_of(20))
    topic.promote(topic.segment_of(40))
    assert topic.index.delete_prefix(46) == (45, 450, 46)
    assert [run.live for run in topic.index.runs] == [0, 0, 5]
    assert topic.index.delete_prefix(2**64) == (5, 50, 51)
    assert topic.index.earliest_seq == 51


def test_deleting_twice_counts_once() -> None:
    topic = written(10)
    assert topic.index.delete_seqs([3, 3, 0, 99]).records == 1
    assert topic.index.delete_seqs(np.array([3, 4], np.uint64)).records == 1
    assert not topic.index.delete_one(4)
    assert topic.index.delete_one(1)
    assert topic.index.earliest_seq == 2
    assert topic.index.live == 7


def test_numbers_without_records_cost_nothing_and_are_not_live() -> None:
    topic = written(3)
    topic.index.skip_to(1_000_000)
    topic.index.skip_to(5)
    topic.write([record(1)])
    assert topic.index.head_seq == 1_000_001
    assert sum(run.count for run in topic.index.runs) == 4
    assert topic.index.locate(500) is None
    assert topic.index.locate(1_000_001) is not None
    topic.index.delete_prefix(4)
    assert topic.index.earliest_seq == 1_000_001
    topic.index.delete_one(1_000_001)
    topic.index.skip_to(1_000_010)
    assert topic.index.earliest_seq == 1_000_011


def test_long_holes_split_a_range_and_short_ones_do_not() -> None:
    topic = written(30)
    topic.index.skip_to(40)
    topic.write([record(1)])
    assert topic.index.stretches(1, 41) == [(1, 41)]
    topic.index.skip_to(41 + HOLE_ROWS_MAX)
    topic.write([record(2)])
    head = topic.index.head_seq
    assert topic.index.stretches(1, head) == [(1, head)]
    topic.index.skip_to(head + HOLE_ROWS_MAX + 1)
    after = topic.write([record(3)]).first_seq
    assert topic.index.stretches(1, after) == [(1, head), (after, after)]
    assert topic.index.stretches(20, after - 1) == [(20, head)]
    assert topic.index.stretches(head + 1, after) == [(after, after)]
    topic.index.skip_to(after + 10)
    assert topic.index.stretches(after, after + 10) == [(after, after + 10)]
    topic.index.skip_to(after + 10_000)
    assert topic.index.stretches(after, after + 10_000) == [(after, after)]
    assert topic.index.stretches(after + 1, after + 10_000) == []


def test_a_promoted_segment_keeps_what_was_deleted_while_it_was_built() -> None:
    topic = written(30)
    topic.index.delete_seqs([2])
    rows = topic.index.copy(1, 20)
    topic.index.delete_seqs([5, 20])
    topic.evict(count=24)
    live, size, earliest = topic.index.live, topic.index.live_bytes, topic.index.earliest_seq
    topic.promote(topic.segment_of(20, rows))
    assert (topic.index.live, topic.index.live_bytes, topic.index.earliest_seq) == (live, size, earliest)
    segment, log = topic.index.runs
    assert (segment.segment, segment.first_seq, segment.count) == (True, 1, 20)
    assert (log.segment, log.first_seq, log.count) == (False, 21, 10)
    assert topic.index.first_log_seq == 21
    assert topic.index.locate(5) is None
    assert topic.index.locate(6) is not None


def test_a_segment_can_grow() -> None:
    topic = written(30)
    topic.promote(topic.segment_of(10))
    topic.index.delete_seqs([4, 15])
    topic.promote(topic.extended(topic.index.runs[0], 25))
    assert [(run.first_seq, run.count, run.live) for run in topic.index.runs] == [(1, 25, 23), (26, 5, 5)]
    assert topic.index.locate(4) is None


def test_a_segment_that_lacks_a_live_record_is_not_accepted() -> None:
    topic = written(5)
    rows = b"".join(pack_row(0, 0, NOW, HOLE, 0) for _ in range(5))
    with pytest.raises(AssertionError, match="missing in the segment"):
        topic.index.promote(Columns.of_segment(1, rows))


def test_dead_runs_are_dropped_wherever_they_are() -> None:
    topic = written(40)
    for last in (10, 20, 30):
        topic.promote(topic.segment_of(last))
    topic.index.delete_seqs(range(11, 21))
    assert [run.first_seq for run in topic.index.drop_dead_runs()] == [11]
    assert topic.index.drop_dead_runs() == []
    assert [run.first_seq for run in topic.index.runs] == [1, 21, 31]
    topic.index.delete_prefix(15)
    assert topic.index.earliest_seq == 21
    assert [run.first_seq for run in topic.index.drop_dead_runs()] == [1]
    assert topic.index.base_seq == 21
    topic.index.delete_prefix(41)
    assert len(topic.index.drop_dead_runs()) == 2
    assert topic.index.base_seq == 41
    topic.write([record(1)])
    assert (topic.index.live, topic.index.earliest_seq) == (1, 41)


def test_an_index_is_built_from_segments_and_replayed_rows() -> None:
    topic = written(30)
    topic.promote(topic.segment_of(20))
    segment, log = topic.index.runs
    index = TopicIndex()
    index.add_run(Columns.of_segment(1, segment.index_rows()))
    index.append_rows(log.index_rows().tobytes(), file=1)
    index.skip_to(35)
    index.delete_prefix(8)
    assert (index.head_seq, index.earliest_seq, index.live, index.live_bytes) == (35, 8, 23, 230)


def test_damaged_records_count_until_they_are_removed() -> None:
    topic = written(2)
    topic.index.append_damaged(3, NOW)
    assert (topic.index.live, topic.index.live_bytes, topic.index.head_seq) == (5, 20, 5)
    topic.index.delete_prefix(5)
    assert (topic.index.live, topic.index.earliest_seq) == (1, 5)


def test_holes_among_replayed_rows_are_not_counted() -> None:
    index = TopicIndex()
    index.append_rows(pack_row(0, 0, NOW, HOLE, 0) + pack_row(0, 60, NOW, 0, 50), file=1)
    assert (index.head_seq, index.earliest_seq, index.live, index.live_bytes) == (2, 2, 1, 10)


def test_a_copy_shows_gaps_as_holes_and_dead_records_as_deleted() -> None:
    topic = written(10)
    topic.index.skip_to(14)
    topic.write([record(1)])
    topic.index.delete_seqs([5])
    topic.index.delete_prefix(3)
    copied = topic.index.copy(1, 15)
    assert (copied.first_seq, copied.count, copied.live) == (1, 15, 8)
    assert np.flatnonzero(copied.is_live(0, 15)).tolist() == [2, 3, 5, 6, 7, 8, 9, 14]
    assert (np.diff(copied.ts.astype(np.int64)) >= 0).all()


def test_files_are_needed_while_a_live_record_may_be_in_them() -> None:
    topic = written(60)
    assert topic.index.files() == set(topic.files)
    topic.index.delete_prefix(55)
    assert topic.index.files() == {max(topic.files)}
    topic.promote(topic.segment_of(60))
    assert topic.index.files() == set()


def test_the_log_rows_of_a_topic_are_in_runs_of_bounded_size() -> None:
    index = TopicIndex()
    row = pack_row(0, 60, NOW, 0, 50)
    for _ in range(5):
        index.append_rows(row * 10_000, file=1)
    assert [run.count for run in index.runs] == [20_000, 20_000, 10_000]
    assert all(run.count < RUN_ROWS_MAX + 10_000 for run in index.runs)
    assert index.evict_to_count(12_345) == (37_655, 376_550, 37_656)
    assert index.earliest_seq == 37_656


def test_a_source_belongs_to_its_owner() -> None:
    topic = written(5)
    topic.promote(topic.segment_of(5))
    assert isinstance(topic.index.runs[0].source, StoredSegment)
