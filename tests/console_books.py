"""The books of a pipeline, made by the code that makes them, but without Spark: tables, ledger, checkpoint.

`deliver` takes what is in the queue, two batches at a time, as a pipeline would: rows go into a Delta table
under (query, micro-batch), bad records into the dead-letter table, then the line, then the commit.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.buffer import Consumer, ConsumerConfig
from penstock.spark.pipeline.ledger import BatchLine, Ledger
from penstock.spark.pipeline.outputs import table_of
from penstock.spark.pipeline.spec import PipelineSpec
from penstock.spark.tables.delta import DeltaLog
from penstock.spark.tables.spec import TableSpec
from penstock.spark.tables.table import DataFile

QUERY = "6f1c2f9a-0000-4000-8000-00000000c0de"
_ROWS = StructType(
    [
        StructField("n", LongType()),
        StructField("who", StringType()),
        StructField("_shard", IntegerType()),
        StructField("_sequence", LongType()),
        StructField("_index", IntegerType()),
    ]
)
_ROW_COLUMNS = pa.schema(
    [
        ("n", pa.int64()),
        ("who", pa.string()),
        ("_shard", pa.int32()),
        ("_sequence", pa.int64()),
        ("_index", pa.int32()),
    ]
)
_LETTERS = StructType(
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
_LETTER_COLUMNS = pa.schema(
    [
        ("pipeline", pa.string()),
        ("batch", pa.int64()),
        ("shard", pa.int32()),
        ("sequence", pa.int64()),
        ("index", pa.int32()),
        ("ingestion_time", pa.timestamp("us", "UTC")),
        ("metadata", pa.binary()),
        ("value", pa.binary()),
        ("reason", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


def pipeline_settings(store: str) -> dict[str, object]:
    """A pipeline file: relative paths are relative to it."""
    return {
        "name": "events",
        "source": {"buffer": {"store": store}},
        "decode": {"format": "json", "schema": "n bigint, who string"},
        "transform": "SELECT n, who, _shard, _sequence, _index FROM input",
        "checkpoint": "checkpoint",
        "sinks": {"lake": {"delta": {"path": "lake"}}},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    sequence: int
    records: list[bytes]


def deliver(spec: PipelineSpec, *, per_batch: int = 2, leave: int = 0, ack: bool = True) -> list[BatchLine]:
    """Deliver all but the last `leave` batches of the queue; with `ack` they leave the queue too."""
    buffer = spec.source.buffer
    taken = asyncio.run(_take(ConsumerConfig(store=buffer.store, prefetch=0), leave, ack=ack))
    ledger = Ledger(spec.ledger_config)
    checkpoint = Path(spec.checkpoint_path)
    known = ledger.lines(QUERY)
    reached = known[-1].end.get(0, 0) if known else 0
    try:
        _begin(checkpoint, ledger)
        lines = []
        fresh = [one for one in taken if one.sequence >= reached]
        for number, some in enumerate(_groups(fresh, per_batch), len(known)):
            lines.append(_micro_batch(spec, ledger, checkpoint, number, some))
        return lines
    finally:
        ledger.close()


async def _take(config: ConsumerConfig, leave: int, *, ack: bool) -> list[_Taken]:
    async with await Consumer.open(config, None) as consumer:
        found = []
        while (batch := await consumer.next_batch()) is not None:
            found.append((batch, _Taken(sequence=batch.sequence, records=batch.entries)))
        kept = found[: len(found) - leave]
        if ack and kept:
            for batch, _ in kept:
                await consumer.ack(batch.sequence)
            await consumer.flush()
        return [taken for _, taken in kept]


def _groups(taken: list[_Taken], size: int) -> Iterator[list[_Taken]]:
    for start in range(0, len(taken), size):
        yield taken[start : start + size]


def _begin(checkpoint: Path, ledger: Ledger) -> None:
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
    if ledger.kept("origin.json") is None:
        ledger.keep("origin.json", {"0": 0})


def _micro_batch(
    spec: PipelineSpec, ledger: Ledger, checkpoint: Path, number: int, taken: list[_Taken]
) -> BatchLine:
    began_s = time.monotonic()
    start, end = {0: taken[0].sequence}, {0: taken[-1].sequence + 1}
    offsets = json.dumps({"0": end[0]})
    (checkpoint / "offsets" / str(number)).write_text(f"v1\n{{}}\n{offsets}")
    rows, letters = [], []
    for one in taken:
        for index, record in enumerate(one.records):
            fields = _decoded(record)
            place = {"shard": 0, "sequence": one.sequence, "index": index}
            if isinstance(fields, str):
                letters.append({**place, "value": record, "reason": fields})
            else:
                rows.append({**fields, **{f"_{key}": value for key, value in place.items()}})
    lake, dead = table_of(spec.outputs["lake"]), table_of(spec.letters) if spec.letters else None
    assert lake is not None
    assert dead is not None
    _append(lake, _ROWS, pa.Table.from_pylist(rows, _ROW_COLUMNS), number)
    now = datetime.datetime.now(datetime.UTC)
    told = {"pipeline": spec.name, "batch": number, "ingestion_time": now, "metadata": b"", "at": now}
    if letters:
        table = pa.Table.from_pylist([{**told, **letter} for letter in letters], _LETTER_COLUMNS)
        _append(dead, _LETTERS, table, number)
    line = BatchLine(
        batch=number,
        start=start,
        end=end,
        read=len(rows) + len(letters),
        dead=len(letters),
        rows={"lake": len(rows)},
        one_to_one={"lake": True},
        at_ms=int(now.timestamp() * 1000),
        took_ms=max(1, round((time.monotonic() - began_s) * 1000)),
    )
    ledger.write(QUERY, line)
    (checkpoint / "commits" / str(number)).write_text("v1\n{}")
    return line


def _decoded(record: bytes) -> dict[str, object] | str:
    try:
        fields = json.loads(record)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(fields, dict) or not isinstance(fields.get("n"), int):
        return "n: expected a number"
    return {"n": fields["n"], "who": fields.get("who")}


def _append(spec: TableSpec, schema: StructType, rows: pa.Table, number: int) -> None:
    log = DeltaLog(spec)
    log.prepare(schema)
    folder = spec.path.removeprefix("file://")
    name = f"part-{number:05}.parquet"
    pq.write_table(rows, os.path.join(folder, name))
    size = os.path.getsize(os.path.join(folder, name))
    stats = json.dumps({"numRecords": rows.num_rows})
    log.commit(QUERY, number, [DataFile(path=name, size=size, rows=rows.num_rows, stats=stats)])
