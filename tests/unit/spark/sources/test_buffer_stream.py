"""The driver's part of a stream on a real queue in a directory, called in the way Spark does."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles
from tests.unit.spark.conftest import Queue

from penstock.errors import InvalidInput
from penstock.spark.sources.buffer import BufferStreamReader, SlicePartition
from penstock.spark.sources.columns import Gap
from penstock.spark.sources.offsets import QueueGap, StoredOffset

ALL = ReadAllAvailable()


def slices(stream: BufferStreamReader, start: StoredOffset, end: StoredOffset) -> list[tuple[int, int]]:
    """Return (first, last) of everything in the tasks, including gaps."""
    found: list[tuple[int, int]] = []
    for partition in stream.partitions(start, end):
        assert isinstance(partition, SlicePartition)
        for part in partition.slices:
            first, last = (part.first, part.last) if isinstance(part, Gap) else (part.sequence,) * 2
            found.append((first, last))
    return found


def test_an_offset_names_the_last_entry_that_was_read(queue: Queue) -> None:
    queue.produce(3)
    stream = queue.stream()
    start = stream.initialOffset()
    assert start == {"0": 0}
    assert stream.latestOffset(start, ReadMaxFiles(2)) == {"0": 2, "after": {"0": queue.location(1)}}


def test_a_start_in_the_middle_knows_the_entry_before_it_even_if_that_has_left(queue: Queue) -> None:
    queue.produce(3)
    gone = queue.location(1)
    assert queue.stream(startingOffsets="2").initialOffset() == {"0": 2, "after": {"0": gone}}
    queue.acknowledge_through(1)
    assert queue.stream().initialOffset() == {"0": 2, "after": {"0": gone}}
    queue.remove("manifest.ledger")
    assert queue.stream().initialOffset() == {"0": 2}


@pytest.mark.parametrize("after", [True, False])
def test_without_new_batches_the_offset_is_returned_unchanged(queue: Queue, after: bool) -> None:
    queue.produce(2)
    start: StoredOffset = {"0": 2, "after": {"0": queue.location(1)}} if after else {"0": 2}
    asked = json.dumps(start)
    assert json.dumps(queue.stream().latestOffset(json.loads(asked), ALL)) == asked


def test_the_entry_is_compared_in_every_call_that_gets_an_offset(queue: Queue) -> None:
    queue.produce(3)
    right = {"0": 1, "after": {"0": queue.location(0)}}
    wrong: StoredOffset = {"0": 2, "after": {"0": queue.location(0)}}
    stream = queue.stream()
    assert slices(stream, right, {"0": 3}) == [(1, 1), (2, 2)]
    with pytest.raises(
        QueueGap, match=r"up to 1, which was .* but .* is there now: the manifest was deleted"
    ):
        stream.latestOffset(wrong, ALL)
    with pytest.raises(QueueGap, match="is there now"):
        stream.partitions(right, wrong)
    with pytest.raises(QueueGap, match="is there now"):
        stream.partitions(wrong, {"0": 3})
    with pytest.raises(QueueGap, match="is there now"):
        stream.commit(wrong)


def test_an_entry_that_has_left_the_queue_is_compared_with_the_ledger(queue: Queue) -> None:
    queue.produce(3)
    right: StoredOffset = {"0": 2, "after": {"0": queue.location(1)}}
    queue.acknowledge_through(1)
    assert queue.stream().latestOffset(right, ALL)["0"] == 3
    with pytest.raises(QueueGap, match="is there now"):
        queue.stream().latestOffset({"0": 2, "after": {"0": "ingest/other.batch"}}, ALL)
    queue.remove("manifest.ledger")
    assert queue.stream().latestOffset({"0": 2, "after": {"0": "ingest/other.batch"}}, ALL)["0"] == 3


def test_an_owner_does_not_acknowledge_under_the_checkpoint_of_another_queue(queue: Queue) -> None:
    queue.produce(3)
    stream = queue.stream(mode="consume")
    with pytest.raises(QueueGap, match="is there now"):
        stream.commit({"0": 2, "after": {"0": "ingest/other.batch"}})
    assert queue.entries().first == 0
    stream.commit({"0": 2, "after": {"0": queue.location(1)}})
    assert queue.entries().first == 2


def test_batches_that_have_left_the_queue_are_passed_in_one_step_and_recorded_once(queue: Queue) -> None:
    queue.produce(6)
    start: StoredOffset = {"0": 1, "after": {"0": queue.location(0)}}
    queue.acknowledge_through(3)
    with pytest.raises(QueueGap, match="begins at 4, but this query continues at 1"):
        queue.stream().latestOffset(start, ALL)
    stream = queue.stream(onGap="record")
    end = stream.latestOffset(start, ReadMaxFiles(1))
    assert end == {"0": 5, "after": {"0": queue.location(4)}}
    assert slices(stream, start, end) == slices(stream, start, end) == [(1, 3), (4, 4)]
    assert slices(stream, end, stream.latestOffset(end, ALL)) == [(5, 5)]


def test_a_gap_up_to_the_end_of_the_queue_is_a_micro_batch_of_its_own(queue: Queue) -> None:
    queue.produce(3)
    queue.acknowledge_through(2)
    stream = queue.stream(onGap="record", startingOffsets="1")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert end["0"] == 3
    assert slices(stream, start, end) == [(1, 2)]
    assert stream.latestOffset(end, ALL) is end


def test_a_gap_never_reaches_beyond_the_end_that_was_fixed_for_this_run(queue: Queue) -> None:
    queue.produce(3)
    stream = queue.stream(onGap="record")
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    queue.produce(3)
    queue.acknowledge_through(4)
    end = stream.latestOffset(start, ALL)
    assert end["0"] == 3
    assert slices(stream, start, end) == [(0, 2)]


def test_another_queue_is_an_error_even_if_gaps_are_recorded(queue: Queue) -> None:
    queue.produce(3)
    stream = queue.stream(onGap="record")
    with pytest.raises(QueueGap, match="is there now"):
        stream.latestOffset({"0": 2, "after": {"0": "ingest/other.batch"}}, ALL)
    with pytest.raises(QueueGap, match="has handed out numbers only up to 2"):
        stream.latestOffset({"0": 9}, ALL)


def test_a_start_that_has_left_the_queue_is_refused_unless_gaps_are_recorded(queue: Queue) -> None:
    queue.produce(3)
    queue.acknowledge_through(1)
    with pytest.raises(InvalidInput, match="0 is outside"):
        queue.stream(startingOffsets="0").initialOffset()
    assert queue.stream(startingOffsets="0", onGap="record").initialOffset() == {"0": 0}


def test_a_start_after_the_planned_end_is_an_error_and_not_an_empty_batch(queue: Queue) -> None:
    queue.produce(2)
    planned = queue.stream().latestOffset({"0": 0}, ALL)
    queue.produce(3)
    stream = queue.stream(startingOffsets="latest", onGap="record")
    moved = stream.initialOffset()
    with pytest.raises(QueueGap, match=r"start at 5 and end at 2: .* startingOffsets .* new checkpoint"):
        stream.partitions(moved, planned)
    assert slices(stream, planned, planned) == []


@pytest.mark.parametrize("stored", ["12", '"12"', '["12"]', '{"topic": {"0": 12}}'])
def test_the_offset_of_another_kind_of_source_is_refused(queue: Queue, stored: str) -> None:
    queue.produce(1)
    with pytest.raises(QueueGap, match="is not an offset of ingest/manifest"):
        queue.stream().latestOffset(json.loads(stored), ALL)


def test_the_ledger_of_an_earlier_queue_is_ignored(queue: Queue) -> None:
    queue.produce(6)
    queue.acknowledge_through(4)
    queue.remove()
    queue.produce(6)
    first = queue.entries().first
    assert first > 5, "no number of the earlier queue is assigned again"
    places: list[StoredOffset] = [
        {"0": n + 1, "after": {"0": queue.location(n)}} for n in range(first, first + 6)
    ]
    queue.acknowledge_through(first)
    stream = queue.stream()
    assert stream.latestOffset(places[0], ALL) == places[5]
    queue.acknowledge_through(first + 2)
    assert stream.latestOffset(places[2], ALL) == places[5]
