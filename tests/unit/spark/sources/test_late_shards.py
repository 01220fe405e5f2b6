"""A query that starts before the producers store the number of shards."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.unit.spark.conftest import Queue

from penstock.buffer import FencedError, sharded
from penstock.errors import ConfigError
from penstock.objects import ObjectStore
from penstock.spark.sources.buffer import BufferStreamReader, SlicePartition
from penstock.spark.sources.columns import BatchSlice
from penstock.spark.sources.offsets import QueueGap, QueueOffsets, StoredOffset

ALL = ReadAllAvailable()
NOTHING: StoredOffset = {"0": 0}


def places(stream: BufferStreamReader, start: StoredOffset, end: StoredOffset) -> list[tuple[int, int]]:
    """Return (shard, sequence) of everything in the tasks."""
    found: list[tuple[int, int]] = []
    for partition in stream.partitions(start, end):
        assert isinstance(partition, SlicePartition)
        for part in partition.slices:
            assert isinstance(part, BatchSlice)
            found.append((part.shard, part.sequence))
    return sorted(found)


def numbers(stored: StoredOffset) -> StoredOffset:
    return {shard: place for shard, place in stored.items() if shard != "after"}


def epochs(queue: Queue, shards: int) -> list[int]:
    return [queue.entries(f"ingest/manifest.shards/{shard:04d}").footer.epoch for shard in range(shards)]


@pytest.mark.parametrize("mode", ["read", "consume"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_that_come_later_are_read_from_their_beginning(queue: Queue, mode: str, shards: int) -> None:
    stream = queue.stream(mode=mode)
    start = stream.initialOffset()
    assert start == NOTHING
    assert stream.latestOffset(start, ALL) is start
    queue.produce_sharded(2 * shards, shards)
    end = stream.latestOffset(start, ALL)
    assert numbers(end) == {str(shard): 2 for shard in range(shards)}
    assert len(QueueOffsets("q").read(end)[1]) == shards
    assert places(stream, start, end) == [(shard, n) for shard in range(shards) for n in range(2)]
    queue.produce_sharded(shards, shards)
    assert places(stream, end, stream.latestOffset(end, ALL)) == [(shard, 2) for shard in range(shards)]
    assert epochs(queue, shards) == [int(mode == "consume")] * shards


def test_the_shards_of_an_owner_are_acknowledged(queue: Queue) -> None:
    stream = queue.stream(mode="consume")
    start = stream.initialOffset()
    queue.produce_sharded(4, shards=2)
    end = stream.latestOffset(start, ALL)
    stream.commit(start)
    stream.commit(end)
    firsts = [queue.entries(f"ingest/manifest.shards/000{shard}").first for shard in range(2)]
    assert firsts == [2, 2]


def test_a_checkpoint_that_has_read_nothing_continues_with_the_shards(queue: Queue) -> None:
    queue.produce_sharded(2, shards=2)
    stream = queue.stream()
    assert places(stream, stream.initialOffset(), NOTHING) == []
    assert numbers(stream.latestOffset(NOTHING, ALL)) == {"0": 1, "1": 1}


def test_new_shards_without_records_do_not_change_the_offset(queue: Queue) -> None:
    stream = queue.stream()
    start = stream.initialOffset()
    queue.produce_sharded(0, shards=2)
    assert stream.latestOffset(start, ALL) is start
    queue.produce_sharded(1, shards=2)
    assert numbers(stream.latestOffset(start, ALL)) == {"0": 1, "1": 0}


def test_shards_that_come_after_the_end_was_fixed_are_for_the_next_run(queue: Queue) -> None:
    stream = queue.stream()
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    queue.produce_sharded(2, shards=2)
    assert stream.latestOffset(start, ALL) is start


def test_an_older_query_does_not_take_the_shards_from_a_newer_one(queue: Queue) -> None:
    older = queue.stream(mode="consume")
    start = older.initialOffset()
    queue.produce_sharded(2, shards=2)
    newer = queue.stream(mode="consume")
    end = newer.latestOffset(start, ALL)
    with pytest.raises(FencedError, match=r"no longer owns ingest/manifest .* mode=read"):
        older.latestOffset(start, ALL)
    newer.commit(end)
    assert epochs(queue, 2) == [1, 1]


@pytest.mark.parametrize("mode", ["read", "consume"])
def test_the_search_for_shards_ends_with_the_first_sequence(
    queue: Queue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    read_layout = sharded.read_layout

    async def counted(store: ObjectStore, manifest_path: str) -> int | None:
        looks.append(manifest_path)
        return await read_layout(store, manifest_path)

    monkeypatch.setattr(sharded, "read_layout", counted)
    stream = queue.stream(mode=mode)
    start = stream.initialOffset()
    looks.clear()
    stream.latestOffset(start, ALL)
    assert looks == ["ingest/manifest"]
    queue.produce(1)
    assert stream.latestOffset(start, ALL)["0"] == 1
    assert looks == ["ingest/manifest"]


@pytest.mark.parametrize("mode", ["read", "consume"])
def test_there_is_no_search_for_shards_that_the_user_excludes(
    queue: Queue, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = queue.stream(mode=mode, sharded="false")
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "read_layout", None)
        start = stream.initialOffset()
    queue.produce_sharded(2, shards=2)
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "read_layout", None)
        assert stream.latestOffset(start, ALL) is start


@pytest.mark.parametrize("given", ["0", '{"0": 0}', "earliest"])
def test_a_start_at_zero_is_the_beginning_of_every_shard(queue: Queue, given: str) -> None:
    assert queue.stream(startingOffsets=given).initialOffset() == NOTHING
    queue.produce_sharded(2, shards=2)
    assert queue.stream(startingOffsets=given).initialOffset() == {"0": 0, "1": 0}


@pytest.mark.parametrize("given", ["1", '{"1": 1}', '{"0": "latest"}', '{"0": 0, "2": 0}'])
def test_any_other_start_still_names_each_shard(queue: Queue, given: str) -> None:
    queue.produce_sharded(2, shards=2)
    with pytest.raises(ConfigError, match="shard"):
        queue.stream(startingOffsets=given).initialOffset()


def test_an_offset_at_zero_is_the_beginning_of_a_queue_with_more_shards() -> None:
    offsets = QueueOffsets("q")
    for stored in ({"0": 0}, {"1": 0, "0": 0}):
        assert offsets.fit(*offsets.read(stored), [0, 1, 2]) == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize(
    "stored", ['{"0": 1}', '{"0": 0, "after": {"0": "x"}}', '{"7": 0}', "{}", '{"0": 0, "1": 0, "2": 0}']
)
def test_any_other_offset_of_another_number_of_shards_is_refused(stored: str) -> None:
    offsets = QueueOffsets("q")
    numbers, marks = offsets.read(json.loads(stored))
    with pytest.raises(QueueGap, match="has 2: "):
        offsets.fit(numbers, marks, [0, 1])
