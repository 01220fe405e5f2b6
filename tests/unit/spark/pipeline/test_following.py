"""A pipeline whose micro-batches run in another process, which reports them through the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pyspark.sql.streaming.query import StreamingQuery

from penstock.objects import StoreConfig
from penstock.spark.pipeline import Pipeline, RunningPipeline
from penstock.spark.pipeline.ledger import BatchLine, Ledger
from penstock.spark.pipeline.spec import read_spec

APP = "6f1c0c9e-3c0b-4e55-9d43-0c3f4d3d2f6e"


def line(batch: int) -> BatchLine:
    return BatchLine(
        batch=batch, start={0: batch}, end={0: batch + 1}, read=10, dead=1, rows={"delta": 9}, at_ms=1
    )


class Query:
    """A stand-in for a query, with the attributes that the pipeline reads."""

    id = APP

    def __init__(self) -> None:
        self.status: dict[str, object] = {"isTriggerActive": True}
        self.lastProgress: dict[str, object] | None = None
        self.asked = 0
        self.stopped = False

    @property
    def isActive(self) -> bool:
        self.asked += 1
        return not self.stopped

    def stop(self) -> None:
        self.stopped = True

    def exception(self) -> None:
        return None


def pipeline(root: Path) -> Pipeline:
    settings = {"name": "p", "source": {"buffer": {"store": "q"}}, "sink": {"delta": {"path": "t"}}}
    return Pipeline(read_spec(settings, base=root))  # type: ignore[arg-type]


def following(root: Path, known: int, told: list[BatchLine]) -> tuple[RunningPipeline, Query]:
    run = RunningPipeline(pipeline(root), {0: 0}, told.append, known=known)
    query = Query()
    run.attach(cast(StreamingQuery, query))
    return run, query


def test_lines_after_the_known_one_are_reported_once_and_in_order(tmp_path: Path) -> None:
    told: list[BatchLine] = []
    run, _ = following(tmp_path, 998, told)
    ledger = run.pipeline.ledger
    for batch in (998, 999, 1000):
        ledger.write(APP, line(batch))
    run.follow(now=True)
    run.follow(now=True)
    ledger.write(APP, line(1001))
    run.follow(now=True)
    assert [one.batch for one in told] == [999, 1000, 1001]


def test_the_ledger_gives_the_lines_after_a_micro_batch(tmp_path: Path) -> None:
    ledger = Ledger(StoreConfig(url=str(tmp_path)))
    for batch in (0, 999, 1000, 2000):
        ledger.write(APP, line(batch))
    for after, batches in {
        -1: [0, 999, 1000, 2000],
        0: [999, 1000, 2000],
        999: [1000, 2000],
        2000: [],
    }.items():
        assert [one.batch for one in ledger.lines(APP, after=after)] == batches


def test_an_unreachable_ledger_does_not_end_the_wait(tmp_path: Path) -> None:
    told: list[BatchLine] = []
    run, query = following(tmp_path, -1, told)
    ledger = run.pipeline.ledger
    ledger.write(APP, line(0))
    for chunk in Path(ledger.url.removeprefix("file://")).rglob("*.jsonl"):
        chunk.write_bytes(b"damaged")
    query.stop()
    assert run.wait(5)
    assert told == []


def test_a_stop_without_a_gate_waits_for_the_micro_batch_that_is_running(tmp_path: Path) -> None:
    run, query = following(tmp_path, -1, [])
    query.lastProgress = {"batchId": 4}
    run.request_stop()
    assert not run.wait(0)  # micro-batch 5 is running
    assert not query.stopped
    query.lastProgress = {"batchId": 5}
    assert run.wait(5)
    assert query.stopped
