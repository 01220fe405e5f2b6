"""The fixed cost of a micro-batch, and the additional cost of a long backlog."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import pyarrow as pa

from penstock.spark.pipeline import Pipeline
from spark_data import make_queue
from spark_runs import DELTA, NOOP, Bench, watch
from table import Row

__all__ = ["run"]

_BACKLOGS = (200, 100_000)
_NOTE = (
    "one batch of one record per micro-batch, which also acknowledges the one before it; triggerExecution of "
    "the query's progress, median, the first five left out; pipeline: foreachBatch, JSON decoded, into a "
    "Delta table, with its ledger; 'against' is the same with 200 batches in the manifest"
)
_RECORD = pa.array([b'{"user":"ann","n":1}'], pa.binary())


def run(bench: Bench, batches: int) -> list[Row]:
    """Measure noop, Delta and a whole pipeline, each with a short and a long backlog."""
    rows: list[Row] = []
    for name in ("noop", "delta", "pipeline"):
        short, long = (_median_ms(bench, name, entries, batches) for entries in _BACKLOGS)
        rows.append(_row(f"{name}, backlog {_BACKLOGS[0]:,}", short))
        rows.append(_row(f"{name}, backlog {_BACKLOGS[1]:,}", long, short))
    return rows


def _row(what: str, ms: float, short: float | None = None) -> Row:
    against = "" if short is None else "short backlog"
    return Row(
        section="3 micro-batch", what=what, ours=ms, ceiling=short, against=against, unit="ms", note=_NOTE
    )


def _median_ms(bench: Bench, name: str, entries: int, batches: int) -> float:
    root = Path(tempfile.mkdtemp(dir=bench.workdir))
    try:
        queue = make_queue(root / "queue", entries, _RECORD)
        if name == "pipeline":
            taken = _pipeline(bench, queue, root, batches)
        else:
            frame = bench.buffer(queue, maxBatchesPerTrigger="1", gc_interval="1h")
            taken = bench.step(frame, NOOP if name == "noop" else DELTA, batches)
        return statistics.median(one["triggerExecution"] for one in taken)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _pipeline(bench: Bench, queue: Path, root: Path, batches: int) -> list[dict[str, int]]:
    pipeline = Pipeline.from_mapping(
        {
            "name": "bench",
            "source": {"buffer": {"store": str(queue), "gc_interval": "1h"}},
            "decode": {"format": "json", "schema": "user string, n bigint"},
            "sink": {"delta": {"path": str(root / "table")}},
            "checkpoint": str(root / "checkpoint"),
            "trigger": {"interval": "10ms", "max_batches": 1},
        }
    )
    return watch(pipeline.start(bench.spark).query, batches)
