from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from tests.spark.conftest import Plant, records

from penstock.buffer import Consumer, ConsumerConfig
from penstock.errors import Corrupt
from penstock.spark.session.failures import explain


def values(batches: list[list[tuple[int, int, bytes]]]) -> Counter[bytes]:
    return Counter(value for batch in batches for _, _, value in batch)


def test_a_stream_delivers_what_was_produced_each_record_once(plant: Plant) -> None:
    produced = plant.produce(records(7, 50))
    output = str(plant.root / "table")
    plant.run(output)
    produced += plant.produce(records(3, 50, "later"))
    plant.run(output)
    assert Counter(bytes(row.value) for row in plant.spark.read.parquet(output).collect()) == Counter(
        produced
    )


def test_the_batches_of_a_trigger_are_limited_in_number(plant: Plant) -> None:
    produced = plant.produce(records(7, 2))
    seen = plant.drain(maxBatchesPerTrigger="3")
    assert [sorted({sequence for sequence, _, _ in batch}) for batch in seen] == [[0, 1, 2], [3, 4, 5], [6]]
    assert values(seen) == Counter(produced)


def test_the_batches_of_a_trigger_are_limited_in_bytes_but_one_always_comes(plant: Plant) -> None:
    produced = plant.produce([[b"x" * 1000], [b"y" * 1000], [b"z" * 9000], [b"w"]])
    seen = plant.drain(maxBytesPerTrigger="2500")
    assert [[sequence for sequence, _, _ in batch] for batch in seen] == [[0, 1], [2], [3]]
    assert values(seen) == Counter(produced)


def test_progress_shows_how_many_batches_are_left(plant: Plant) -> None:
    plant.produce(records(4, 1))
    query = plant.run(str(plant.root / "table"), maxBatchesPerTrigger="3")
    sources = [progress.sources[0] for progress in query.recentProgress]
    ends = [json.loads(s.endOffset)["0"] for s in sources]
    latest = [json.loads(s.latestOffset)["0"] for s in sources]
    assert (ends, latest) == ([3, 4], [4, 4])
    assert [s.startOffset for s in sources] == ["null", sources[0].endOffset]


def test_a_micro_batch_whose_commit_was_lost_is_read_again_the_same(plant: Plant) -> None:
    plant.produce(records(4, 3))
    first = plant.drain(maxBatchesPerTrigger="2")
    last = max((plant.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    plant.produce(records(1, 3, "later"))
    again = plant.drain(maxBatchesPerTrigger="2")
    assert again[0] == first[-1]
    assert values(again[1:]) == Counter([b"later-0-0", b"later-0-1", b"later-0-2"])


def test_what_was_delivered_is_acknowledged_when_the_next_batch_is_certain(plant: Plant) -> None:
    plant.produce(records(4, 1))
    plant.drain(maxBatchesPerTrigger="3")
    assert (plant.queue().first, plant.queue().footer.next_sequence) == (3, 4)
    plant.produce(records(1, 1))
    plant.drain()
    assert plant.queue().first == 4


def test_each_start_of_a_query_takes_the_queue_over_once(plant: Plant) -> None:
    plant.produce(records(6, 1))
    plant.drain(maxBatchesPerTrigger="1")
    assert plant.queue().footer.epoch == 1
    plant.drain()
    assert plant.queue().footer.epoch == 2


def test_a_stream_starts_at_startingoffsets(plant: Plant) -> None:
    plant.produce(records(5, 1))
    seen = plant.drain(startingOffsets="3")
    assert [sequence for batch in seen for sequence, _, _ in batch] == [3, 4]


def test_a_newer_query_stops_the_older_one_and_says_so(plant: Plant) -> None:
    plant.produce(records(1, 1))
    older = (
        plant.stream()
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(plant.root / "older"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        older.processAllAvailable()
        plant.drain()
        with pytest.raises(StreamingQueryException) as raised:
            older.awaitTermination(60)
    finally:
        older.stop()
    assert "this query no longer owns ingest/manifest" in str(raised.value)
    assert "mode=read" in str(raised.value)


def test_a_reading_stream_neither_fences_nor_acknowledges(plant: Plant) -> None:
    produced = plant.produce(records(4, 2))

    async def beside_an_owner() -> None:
        owner = await Consumer.open(ConsumerConfig(store=plant.store))
        before = await owner.entries()
        seen = await asyncio.to_thread(plant.drain, mode="read", maxBatchesPerTrigger="2")
        assert values(seen) == Counter(produced)
        assert (await owner.entries()).footer == before.footer
        await owner.ack_through(0)
        await owner.close()

    asyncio.run(beside_an_owner())


def test_all_shards_come_in_one_stream_with_one_offset_each(plant: Plant) -> None:
    produced = plant.produce_sharded(records(9, 4), shards=4)
    output = str(plant.root / "table")
    query = plant.run(output, maxBatchesPerTrigger="5")
    rows = plant.spark.read.parquet(output).collect()
    assert Counter(bytes(row.value) for row in rows) == Counter(produced)
    assert {row.shard for row in rows} == {0, 1, 2, 3}
    end = json.loads(query.recentProgress[-1].sources[0].endOffset)
    assert end.pop("after").keys() == {"0", "1", "2", "3"}
    assert end == {"0": 3, "1": 2, "2": 2, "3": 2}


def test_a_batch_query_reads_all_shards(plant: Plant) -> None:
    produced = plant.produce_sharded(records(5, 2), shards=2)
    assert plant.read(columns="shard").count() == len(produced)
    ranged = plant.read(startingOffsets='{"0": 1, "1": "latest"}', columns="shard,sequence").distinct()
    assert sorted(map(tuple, ranged.collect())) == [(0, 1), (0, 2)]


def test_a_stream_may_start_before_the_first_record(plant: Plant) -> None:
    assert values(plant.drain()) == Counter()
    produced = plant.produce(records(1, 2))
    assert values(plant.drain()) == Counter(produced)


def test_a_stream_may_start_before_its_queue_has_shards(plant: Plant) -> None:
    output = str(plant.root / "table")
    query = (
        plant.stream()
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(plant.checkpoint))
        .trigger(processingTime="100 milliseconds")
        .start(output)
    )
    try:
        query.processAllAvailable()
        produced = plant.produce_sharded(records(4, 2), shards=2)
        query.processAllAvailable()
    finally:
        query.stop()
    produced += plant.produce_sharded(records(2, 2, "later"), shards=2)
    plant.run(output)
    rows = plant.spark.read.parquet(output).collect()
    assert Counter(bytes(row.value) for row in rows) == Counter(produced)


def test_a_checkpoint_that_has_read_nothing_takes_the_shards_that_came_meanwhile(plant: Plant) -> None:
    assert values(plant.drain()) == Counter()
    produced = plant.produce_sharded(records(3, 2), shards=2)
    assert values(plant.drain()) == Counter(produced)


def fails(plant: Plant, **options: str) -> str:
    """Run a stream that fails, and return our message without Spark's text."""
    with pytest.raises(StreamingQueryException) as raised:
        plant.drain(**options)
    error = explain(raised.value)
    assert isinstance(error, Corrupt)
    return str(error)


def test_a_missing_batch_object_stops_the_stream_and_is_named(plant: Plant) -> None:
    plant.produce(records(3, 1))
    lost = plant.queue()[1].location
    (plant.root / "store" / lost).unlink()
    message = fails(plant)
    assert f"batch 1 at {lost} is in the queue but not in the store" in message
    assert "penstock buffer fsck" in message


def test_a_damaged_batch_object_stops_the_stream_and_is_named(plant: Plant) -> None:
    plant.produce(records(2, 3))
    hurt = plant.queue()[1].location
    path = plant.root / "store" / hurt
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert f"batch 1 at {hurt} is damaged" in fails(plant)


def test_a_manifest_recreated_under_the_checkpoint_is_noticed(plant: Plant) -> None:
    plant.produce(records(3, 1))
    plant.drain()
    (plant.root / "store" / "ingest" / "manifest").unlink()
    plant.produce(records(1, 1))
    message = fails(plant)
    assert "has handed out numbers only up to 0" in message
    assert "the manifest was deleted and created again" in message


def test_a_recreated_manifest_is_noticed_even_if_it_has_grown_past_the_checkpoint(plant: Plant) -> None:
    plant.produce(records(3, 1))
    plant.drain()
    (plant.root / "store" / "ingest" / "manifest").unlink()
    plant.produce(records(5, 1))
    message = fails(plant)
    assert "the checkpoint has read ingest/manifest up to 2, which was" in message
    assert "the manifest was deleted and created again" in message


def test_a_checkpoint_without_marks_continues(plant: Plant) -> None:
    plant.produce(records(2, 1))
    plant.drain()
    stored = plant.checkpoint / "offsets" / "0"
    lines = stored.read_text().splitlines()
    stored.write_text("\n".join([*lines[:-1], '{"0": 2}']))
    (stored.parent / ".0.crc").unlink(missing_ok=True)
    assert values(plant.drain()) == Counter()
    assert [path.name for path in (plant.checkpoint / "offsets").glob("[0-9]*")] == ["0"]
    later = plant.produce(records(1, 1, "later"))
    assert values(plant.drain()) == Counter(later)


def test_the_checkpoint_of_another_queue_is_noticed_by_its_shards(plant: Plant) -> None:
    plant.produce(records(1, 1))
    plant.drain()
    plant.produce_sharded(records(2, 1), shards=2)
    message = fails(plant, sharded="true")
    assert "the checkpoint knows 1 shards, ingest/manifest has 2" in message
    assert "the checkpoint belongs to another queue" in message


def test_batches_that_another_consumer_acknowledged_are_a_gap_and_not_skipped(plant: Plant) -> None:
    plant.produce(records(2, 1))
    plant.drain()
    plant.produce(records(3, 1))
    plant.acknowledge_through(3)
    assert "begins at 4, but this query continues at 2" in fails(plant)


def test_recorded_gaps_are_rows_of_the_table_and_the_rest_is_read(plant: Plant) -> None:
    plant.produce(records(2, 1))
    output = str(plant.root / "table")
    plant.run(output, onGap="record")
    plant.produce(records(5, 2, "later"))
    queue = plant.queue()
    plant.acknowledge_through(3)
    lost, hurt = (queue[n - queue.first].location for n in (4, 5))
    (plant.root / "store" / lost).unlink()
    (plant.root / "store" / hurt).write_bytes(b"\xff" * 40)
    plant.run(output, onGap="record")
    rows = plant.spark.read.parquet(output).where("sequence >= 2").orderBy("sequence", "index").collect()
    assert [(row.sequence, row["index"], row.value is None) for row in rows] == [
        (2, -1, True),
        (4, -1, True),
        (5, -1, True),
        (6, 0, False),
        (6, 1, False),
    ]
    gaps = [json.loads(bytes(row.metadata))["gap"] for row in rows[:3]]
    assert [(gap["first"], gap["last"]) for gap in gaps] == [(2, 3), (4, 4), (5, 5)]
    assert "not in the store" in gaps[1]["reason"]
    assert "is damaged" in gaps[2]["reason"]
    assert [row.location for row in rows[:3]] == [None, lost, hurt]
    assert {row.ingestion_time for row in rows[:3]} == {None}
    remains = plant.root / "store" / "ingest" / "manifest.dead" / "00000000000000000005.bytes"
    assert remains.read_bytes() == b"\xff" * 40


def test_an_unknown_option_of_a_stream_names_the_nearest(plant: Plant) -> None:
    with pytest.raises(PySparkException, match="did you mean 'maxBatchesPerTrigger'"):
        plant.stream(maxBatchPerTrigger="3").load()


def test_queries_with_the_default_trigger_finish_what_is_there(plant: Plant) -> None:
    produced = plant.produce(records(2, 2))
    query = plant.stream(columns="value").load().writeStream.format("memory").queryName("plain").start()
    try:
        query.processAllAvailable()
        rows = plant.spark.table("plain").collect()
    finally:
        query.stop()
    assert Counter(bytes(row.value) for row in rows) == Counter(produced)
