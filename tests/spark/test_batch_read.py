from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException
from tests.spark.conftest import Plant, records

from penstock.buffer import Producer, ProducerConfig


def test_a_batch_query_reads_every_record_with_its_position(plant: Plant) -> None:
    produced = plant.produce(records(5, 40), metadata=b"who")
    rows = plant.read().orderBy("sequence", "index").collect()
    assert [bytes(row.value) for row in rows] == produced
    assert [(row.sequence, row["index"]) for row in rows] == [(b, n) for b in range(5) for n in range(40)]
    assert {bytes(row.metadata) for row in rows} == {b"who"}
    assert {row.shard for row in rows} == {0}
    assert {row.location for row in rows} == {plant.queue()[n].location for n in range(5)}
    age = datetime.now(UTC) - rows[0].ingestion_time.replace(tzinfo=UTC)
    assert timedelta(0) <= age < timedelta(minutes=5)


def test_records_of_one_batch_keep_the_metadata_of_their_own_call(plant: Plant) -> None:
    async def work() -> None:
        async with Producer(ProducerConfig(store=plant.store, flush_interval="1h")) as producer:
            await producer.produce([b"a", b"b"], b"first")
            await producer.produce([b"c"], b"second")

    asyncio.run(work())
    rows = plant.read(columns="value,metadata").orderBy("value").collect()
    assert [(bytes(v), bytes(m)) for v, m in rows] == [(b"a", b"first"), (b"b", b"first"), (b"c", b"second")]


def test_a_range_is_read_from_its_start_up_to_but_not_including_its_end(plant: Plant) -> None:
    plant.produce(records(6, 3))
    frame = plant.read(startingOffsets="2", endingOffsets='{"0": 4}', columns="sequence")
    assert sorted(row.sequence for row in frame.collect()) == [2, 2, 2, 3, 3, 3]
    assert plant.read(startingOffsets="latest").count() == 0


def test_a_range_that_has_left_the_queue_is_one_row_when_gaps_are_recorded(plant: Plant) -> None:
    plant.produce(records(4, 1))
    plant.acknowledge_through(1)
    (plant.root / "store" / plant.queue()[1].location).unlink()
    frame = plant.read(startingOffsets="0", onGap="record", columns="sequence,index,metadata,value")
    rows = frame.orderBy("sequence").collect()
    assert [(row.sequence, row["index"]) for row in rows] == [(0, -1), (2, 0), (3, -1)]
    assert json.loads(bytes(rows[0].metadata))["gap"]["last"] == 1
    assert not (plant.root / "store" / "ingest" / "manifest.dead").exists()  # a reader changes nothing


def test_only_the_requested_columns_are_read_in_their_order(plant: Plant) -> None:
    plant.produce(records(1, 1))
    frame = plant.read(columns="value, sequence")
    assert frame.schema.simpleString() == "struct<value:binary,sequence:bigint>"
    assert [tuple(row) for row in frame.collect()] == [(bytearray(b"r-0-0"), 0)]


def test_a_batch_query_changes_nothing(plant: Plant) -> None:
    plant.produce(records(2, 2))
    before = plant.queue().footer
    assert plant.read().count() == 4
    assert plant.queue().footer == before


def test_many_batches_are_divided_among_few_tasks(plant: Plant) -> None:
    plant.produce(records(9, 1))
    assert plant.read(partitions="2").rdd.getNumPartitions() == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"colums": "value"}, "did you mean 'columns'?"),
        ({"columns": "sequence,valu"}, "did you mean 'value'?"),
        ({"mode": "consume"}, "a batch query only reads"),
        ({"startingOffsets": "9"}, "holds 0 to 0; 9 is outside"),
        ({"startingOffsets": "soon"}, "expected earliest, latest, a sequence or JSON"),
        ({"manifest_path": "no/manifest"}, "there is no manifest no/manifest"),
        ({"sharded": "true"}, "is not a sharded queue"),
        ({"store.region": "x"}, "file:// takes no options"),
    ],
)
def test_a_wrong_option_is_reported_with_a_suggestion(
    plant: Plant, options: dict[str, str], sentence: str
) -> None:
    plant.produce(records(1, 1))
    with pytest.raises(PySparkException) as raised:
        plant.read(**options).collect()
    assert sentence in str(raised.value)


def test_another_schema_is_refused(plant: Plant) -> None:
    plant.produce(records(1, 1))
    with pytest.raises(PySparkException, match="choose columns with the option 'columns'"):
        plant.spark.read.format("penstock-buffer").schema("user string").load(plant.store).collect()


def test_a_memory_store_is_refused_because_it_lives_in_one_process(plant: Plant) -> None:
    with pytest.raises(PySparkException, match="lives in one process"):
        plant.spark.read.format("penstock-buffer").load("memory://x")
