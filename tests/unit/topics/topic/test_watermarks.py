"""Tombstones for readers that miss records."""

from __future__ import annotations

import pytest
from tests.unit.topics.log_doubles import MemoryTopic, record

from penstock.topics.topic.index import NOTHING, Removed
from penstock.topics.topic.watermarks import LowWatermarks, tombstone_for


def written(count: int) -> MemoryTopic:
    topic = MemoryTopic()
    topic.write([record(n) for n in range(count)])
    return topic


def test_a_cap_of_three_after_six_writes() -> None:
    topic = written(6)
    topic.evict(count=3)
    tombstone = tombstone_for(topic.floors, 0, topic.index.earliest_seq, topic.index.head_seq)
    assert tombstone is not None
    assert (tombstone.gap_from, tombstone.gap_to, tombstone.reason) == (1, 3, "cap")
    assert tombstone.missed_estimate == 3
    assert tombstone.earliest_seq == topic.index.earliest_seq == 4
    assert tombstone.head_seq == 6


def test_deletion_is_silent_and_never_moves_the_floor() -> None:
    topic = written(6)
    topic.index.delete_prefix(4)
    topic.index.delete_seqs([5])
    assert topic.floors.floor == 1
    assert tombstone_for(topic.floors, 0, topic.index.earliest_seq, 6) is None


def test_deleted_records_before_an_evicted_one_are_part_of_the_gap_but_those_after_it_are_not() -> None:
    topic = written(6)
    topic.index.delete_seqs([1, 4])
    topic.evict(count=2)
    assert topic.floors.floor == 4
    assert topic.index.earliest_seq == 5


@pytest.mark.parametrize(
    ("cap", "ttl", "trim", "reason"),
    [
        (5, 1, 1, "cap"),
        (1, 5, 1, "ttl"),
        (5, 4, 1, "mixed"),
        (1, 1, 5, "source_trim"),
        (3, 1, 9, "cap"),
        (5, 2, 1, "cap"),
    ],
)
def test_the_reason_is_the_loss_that_reaches_the_gap(cap: int, ttl: int, trim: int, reason: str) -> None:
    tombstone = tombstone_for(LowWatermarks(cap=cap, ttl=ttl, trim=trim), 1, 9, 9)
    assert tombstone is not None
    assert tombstone.reason == reason
    assert tombstone.gap_to == max(cap, ttl, trim) - 1


def test_a_reader_at_the_floor_gets_no_tombstone() -> None:
    floors = LowWatermarks(cap=4)
    assert tombstone_for(floors, 3, 4, 6) is None
    assert tombstone_for(floors, 6, 4, 6) is None
    assert tombstone_for(floors, 2, 4, 6) is not None


def test_a_reader_beyond_the_head_gets_the_reason_recreated() -> None:
    tombstone = tombstone_for(LowWatermarks(cap=3), 7, 4, 6)
    assert tombstone is not None
    assert (tombstone.reason, tombstone.gap_from, tombstone.gap_to) == ("recreated", 1, 6)
    assert (tombstone.missed_estimate, tombstone.earliest_seq) == (6, 4)
    empty = tombstone_for(LowWatermarks(), 1, 1, 0)
    assert empty is not None
    assert (empty.gap_to, empty.missed_estimate) == (0, 1)


def test_floors_only_rise() -> None:
    floors = LowWatermarks()
    assert floors.raise_cap(Removed(2, 10, 5))
    assert not floors.raise_cap(Removed(1, 10, 4))
    assert not floors.raise_ttl(NOTHING)
    assert floors.merge(trim=9)
    assert (floors.cap, floors.ttl, floors.trim, floors.floor) == (5, 1, 9, 9)
