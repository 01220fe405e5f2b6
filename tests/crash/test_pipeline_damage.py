"""Every file of a pipeline's ledger, checkpoint and dead letters, damaged in every way: reported or complete.

Five micro-batches are done, a sixth is planned. No Spark runs: the checkpoint is written by hand as Spark
writes it, and the next start reads it as Spark does. What the pipeline itself compares and writes is real,
except that rows go into the tables without a query.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from tests.crash.damage import FEW, MANY, Damage, Tally, damages, files_below, name_of, replace_file

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.errors import PenstockError
from penstock.spark.audit import audit_pipeline
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.checkpoint import Checkpoint, parse_offsets
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.microbatch import MicroBatches
from penstock.spark.pipeline.outputs import table_of
from penstock.spark.pipeline.redrive import Wanted, redrive
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec, read_spec
from penstock.spark.tables import open_table
from penstock.spark.tables.parts import write_parts
from penstock.spark.tables.schema import arrow_schema

SECTION = "Pipeline"
APP = "6f1c0c9e-3c0b-4e55-9d43-0c3f4d3d2f6e"
DONE, BATCHES = 5, 8
NOON = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.UTC)
ROWS = StructType(
    [
        StructField("_shard", IntegerType()),
        StructField("_sequence", LongType()),
        StructField("_index", IntegerType()),
    ]
)
LETTERS = StructType(
    [
        StructField("pipeline", StringType()),
        StructField("batch", LongType()),
        StructField("shard", IntegerType()),
        StructField("sequence", LongType()),
        StructField("index", IntegerType()),
        StructField("ingestion_time", TimestampType()),
        StructField("metadata", BinaryType()),
        StructField("value", BinaryType()),
        StructField("reason", StringType()),
        StructField("at", TimestampType()),
    ]
)


class SparkRefuses(Exception):
    """Spark does not start a query over this checkpoint."""


def spec_in(root: Path) -> PipelineSpec:
    return read_spec(
        {
            "name": "p",
            "source": {"buffer": {"store": str(root / "queue")}},
            "decode": {"format": "json"},
            "sink": {"parquet": {"path": str(root / "table")}},
            "dead_letter": {"parquet": {"path": str(root / "letters")}},
            "checkpoint": str(root / "checkpoint"),
            "ledger": str(root / "ledger"),
        }
    )


def produce(root: Path, batches: int) -> None:
    """Batches of two records each; the second of an odd batch is bad."""

    async def work() -> None:
        async with Producer(ProducerConfig(store=str(root / "queue"), flush_interval="1h")) as producer:
            for _ in range(batches):
                await producer.produce([b"{}", b"bad"])
                await producer.flush()

    asyncio.run(work())


def append(sink: SinkSpec, schema: StructType, batch: int, rows: Sequence[dict[str, object]]) -> None:
    """What a sink does for a micro-batch: once, whoever repeats it."""
    spec = table_of(sink)
    assert spec is not None
    table = open_table(spec)
    table.prepare(schema)
    if table.last_version(APP) != batch:
        found = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(schema))
        table.commit(APP, batch, write_parts(table.layout(schema), iter([found])))


def run_batch(spec: PipelineSpec, batches: MicroBatches, batch: int) -> None:
    """One micro-batch, as `MicroBatches.run` goes through it, and Spark's commit."""
    checkpoint = Checkpoint(spec.checkpoint_path)
    batches._app = checkpoint.query_id
    start, end = batches._range(checkpoint, batch)
    batches._remember_plan(batch, start, end)
    numbers = range(start[0], end[0])
    assert spec.sink is not None
    assert spec.letters is not None
    append(spec.sink, ROWS, batch, [{"_shard": 0, "_sequence": n, "_index": 0} for n in numbers])
    append(spec.letters, LETTERS, batch, [letter(batch, n) for n in numbers])
    line = BatchLine(
        batch=batch,
        start=start,
        end=end,
        read=2 * len(numbers),
        dead=len(numbers),
        rows={"parquet": len(numbers)},
        one_to_one={"parquet": True},
        at_ms=1,
    )
    batches._ledger.write(APP, line)
    (Path(spec.checkpoint_path) / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def letter(batch: int, sequence: int) -> dict[str, object]:
    return {
        "pipeline": "p",
        "batch": batch,
        "shard": 0,
        "sequence": sequence,
        "index": 1,
        "ingestion_time": NOON,
        "metadata": b"",
        "value": b"bad",
        "reason": "is not JSON",
        "at": NOON,
    }


def plan(root: Path, batch: int, end: int) -> None:
    """Spark's plan of a micro-batch."""
    text = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{{}}}}\n{{"0": {end}}}'
    (root / "checkpoint" / "offsets" / str(batch)).write_text(text)


def spark_plans(root: Path, end: int) -> int:
    """The micro-batch that Spark would run next, by its logs; planned up to `end` if it is a new one."""
    checkpoint = Checkpoint(str(root / "checkpoint"))
    planned, done = checkpoint.planned(), checkpoint.done()
    for batch in planned[-2:]:
        parse_offsets((root / "checkpoint" / "offsets" / str(batch)).read_text(), str(batch))
    if done:
        lines = (root / "checkpoint" / "commits" / str(done[-1])).read_text().splitlines()
        try:
            is_whole = lines[0] == "v1" and isinstance(json.loads(lines[1]), dict)
        except (IndexError, ValueError):
            is_whole = False
        if not is_whole:
            raise SparkRefuses(f"commits/{done[-1]} does not decode")
    last = planned[-1]
    if done and done[-1] > last:
        last = done[-1]
    if last > 0 and not {last - 1, last} & set(planned):
        raise SparkRefuses(f"batch {last} has no offsets before it")
    if done and done[-1] == last:
        if last not in planned:
            raise SparkRefuses(f"batch {last} is done and has no offsets")
        last += 1
        plan(root, last, end)
    if last > 0 and last - 1 not in planned:
        raise SparkRefuses(f"batch {last - 1} does not exist")
    return last


def start(root: Path, *, more: int) -> None:
    """The next start of the pipeline, until everything in the queue is delivered."""
    spec = spec_in(root)
    pipeline = Pipeline(spec)
    if (root / "ledger" / "schema.json").exists():
        pipeline.schema(cast(SparkSession, None))
    origin = pipeline._begin(Checkpoint(spec.checkpoint_path))
    produce(root, more)
    batches = MicroBatches(spec, None, pipeline.ledger, origin=origin)
    for _ in range(3):
        batch = spark_plans(root, BATCHES + more)
        run_batch(spec, batches, batch)
        if Checkpoint(spec.checkpoint_path).offset(batch) == {"0": BATCHES + more}:
            return


def make(root: Path) -> list[dict[str, bytes]]:
    older = []
    produce(root, BATCHES)
    spec = spec_in(root)
    checkpoint = root / "checkpoint"
    for folder in ("offsets", "commits", "sources/0"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": APP}))
    (checkpoint / "sources" / "0" / "0").write_text('v1\n{"0": 0}')
    ledger = Pipeline(spec).ledger
    ledger.keep("origin.json", {"0": 0})
    ledger.keep("schema.json", {"format": "json", "schema": StructType([]).jsonValue()})
    batches = MicroBatches(spec, None, ledger, origin={0: 0})
    for batch in range(DONE):
        plan(root, batch, batch + 1)
        run_batch(spec, batches, batch)
        older.append(files_below(root))
    plan(root, DONE, DONE + 1)
    batches._remember_plan(DONE, {0: DONE}, {0: DONE + 1})
    ledger.close()
    return older


def make_redriven(root: Path) -> None:
    """Two redrives of a letter each; the second did not note its end."""
    spec = spec_in(root)
    for number in (1, 2):
        assert redrive(spec, Wanted(limit=1)).done is not None
        assert (root / "ledger" / "redrive" / f"{number:08}.json").exists()
    (root / "ledger" / "redrive" / "00000002.done.json").unlink()


def queued(root: Path) -> int:
    """How many letters are back in the queue."""

    async def work() -> int:
        found = 0
        config = ConsumerConfig(store=str(root / "queue"), gc_enabled=False)
        async with await Consumer.open(config) as consumer:
            while (batch := await consumer.next_batch()) is not None:
                found += list(batch.entries).count(b"bad") if batch.sequence >= BATCHES else 0
        return found

    return asyncio.run(work())


def places(root: Path) -> Counter[tuple[int, int]]:
    """Every record that some table has, by sequence and index."""
    rows = ds.dataset(root / "table", format="parquet").to_table()
    dead = ds.dataset(root / "letters", format="parquet").to_table()
    found = [*zip(rows["_sequence"].to_pylist(), rows["_index"].to_pylist(), strict=True)]
    found += zip(dead["sequence"].to_pylist(), dead["index"].to_pylist(), strict=True)
    return Counter(found)


def outcome(root: Path, *, more: int) -> str | None:
    """What is wrong after a start, or None."""
    found = places(root)
    expected = {(number, index) for number in range(BATCHES + more) for index in (0, 1)}
    if missing := sorted(expected - found.keys()):
        return f"records {missing} are gone without a word"
    twice = sorted(place for place, times in found.items() if times > 1)
    return f"records {twice} are there twice" if twice else None


def check(root: Path, damage: Damage, caplog: pytest.LogCaptureFixture) -> tuple[str, str | None]:
    caplog.clear()
    try:
        if "/redrive/" in damage.file:
            redrive(spec_in(root), Wanted())
            found = queued(root)
            wrong = None if found == DONE else f"{found} letters were put back, not {DONE}"
            balanced = True
        else:
            start(root, more=2)
            balanced = audit_pipeline(spec_in(root), deep=True).balanced
            wrong = outcome(root, more=2)
    except (PenstockError, SparkRefuses, pa.ArrowException, OSError):
        return "refused", None
    reported = not balanced or any(one.levelno >= logging.WARNING for one in caplog.records)
    if wrong is not None:
        return ("lost and reported", None) if reported else ("wrong", wrong)
    return ("reported" if reported else "complete"), None


def test_without_damage_everything_is_delivered_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)
    start(tmp_path, more=2)
    report = audit_pipeline(spec_in(tmp_path), deep=True)
    assert report.balanced, report.balance.findings
    assert outcome(tmp_path, more=2) is None
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.timeout(600)
def test_damage_to_any_file_of_a_pipeline_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: tuple[int, ...]
) -> None:
    root, plain, redriven = tmp_path / "root", tmp_path / "plain", tmp_path / "redriven"
    older = make(root)
    shutil.copytree(root, plain)
    make_redriven(root)
    shutil.copytree(root, redriven)
    files = {
        name: data
        for name, data in files_below(redriven).items()
        if name.partition("/")[0] in ("ledger", "checkpoint", "letters") and "/.penstock/" not in name
    }
    tally = Tally(SECTION)
    newest = {name_of(SECTION, file): file for file in sorted(files)}
    for file in newest.values() if parts is FEW else files:
        copies = [copy[file] for copy in older if file in copy]
        for damage in damages(file, files[file], copies[:1] if parts is FEW else copies, parts):
            shutil.rmtree(root)
            shutil.copytree(redriven if "/redrive/" in file else plain, root)
            replace_file(root, damage)
            tally.note(damage, *check(root, damage, caplog))
    tally.finish()
