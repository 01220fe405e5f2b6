"""Measured streams, from a source to a sink, and Spark's reports of their micro-batches."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_data import BatchFiles

__all__ = ["BUFFER", "DELTA", "NOOP", "PARQUET", "Bench", "Sink", "watch"]

_PATIENCE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """A format and its options. `{out}` in an option is replaced with a fresh directory."""

    format: str
    options: Mapping[str, str]


NOOP = Sink(format="noop", options={})
PARQUET = Sink(format="parquet", options={"path": "{out}"})
DELTA = Sink(format="penstock-delta", options={"path": "{out}"})
BUFFER = Sink(format="penstock-buffer", options={"store": "{out}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A session and a directory for the output of streams."""

    spark: SparkSession
    workdir: Path
    partitions: int

    def buffer(self, queue: Path, **options: str) -> DataFrame:
        """Return the records of a queue as a stream."""
        plain = {"store": str(queue), "columns": "value"} | options
        return self.spark.readStream.format("penstock-buffer").options(**plain).load()

    def whole(self, files: BatchFiles) -> DataFrame:
        """Return all of a queue as one micro-batch, for every query again."""
        return self.buffer(files.queue, mode="read", maxBatchesPerTrigger="1000000")

    def parquet(self, files: BatchFiles) -> DataFrame:
        return self.spark.readStream.schema("value binary").parquet(str(files.parquet))

    def arrow(self, files: BatchFiles) -> DataFrame:
        options = {"files": "\n".join(files.arrow), "partitions": str(self.partitions)}
        return self.spark.readStream.format("bench-arrow").options(**options).load()

    def drain(self, frame: DataFrame, sink: Sink, records: int) -> float:
        """Return the seconds of `addBatch` to write all records to a fresh output. Check that all were
        read."""
        scratch = Path(tempfile.mkdtemp(dir=self.workdir))
        try:
            query = self.start(frame, sink, scratch, available_now=True)
            _finish(query)
            batches = _progress(query)
            read = sum(batch["numInputRows"] for batch in batches)
            if read != records:
                raise RuntimeError(f"{sink.format}: {read:,} records were read, and there are {records:,}")
            return sum(batch["durationMs"]["addBatch"] for batch in batches) / 1000
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def step(self, frame: DataFrame, sink: Sink, batches: int) -> list[dict[str, int]]:
        """Return `durationMs` of this many micro-batches, without the first few, in a fresh output."""
        scratch = Path(tempfile.mkdtemp(dir=self.workdir))
        try:
            return watch(self.start(frame, sink, scratch), batches)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def start(
        self, frame: DataFrame, sink: Sink, scratch: Path, *, available_now: bool = False
    ) -> StreamingQuery:
        """Start the stream, with its checkpoint and its output below `scratch`."""
        options = {key: value.format(out=scratch / "out") for key, value in sink.options.items()}
        writer = (
            frame.writeStream.format(sink.format)
            .options(**options)
            .option("checkpointLocation", str(scratch / "checkpoint"))
        )
        return writer.trigger(availableNow=True).start() if available_now else writer.start()


_SKIPPED = 5


def watch(query: StreamingQuery, batches: int) -> list[dict[str, int]]:
    """Return `durationMs` of `batches` micro-batches after the first few, then stop the query."""
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while query.isActive and time.monotonic() < deadline:
            found = [p for p in _progress(query) if p["numInputRows"]]
            if len(found) >= batches + _SKIPPED:
                return [p["durationMs"] for p in found[_SKIPPED : _SKIPPED + batches]]
            time.sleep(0.05)
    finally:
        query.stop()
    raise RuntimeError(f"the query ended or stood still before {batches} micro-batches: {query.exception()}")


def _finish(query: StreamingQuery) -> None:
    try:
        if not query.awaitTermination(_PATIENCE_S):
            raise RuntimeError("the query did not end")
    finally:
        query.stop()


def _progress(query: StreamingQuery) -> list[dict[str, Any]]:
    return [json.loads(progress.json) for progress in query.recentProgress]
