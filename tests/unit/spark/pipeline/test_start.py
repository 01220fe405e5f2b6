"""The checks of a start before Spark runs: the checkpoint, the ledger, and the origin of the query."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import SparkSession

from penstock.buffer import Producer, ProducerConfig
from penstock.errors import Corrupt
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.checkpoint import Checkpoint
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.spec import read_spec

APP = "6f1c0c9e-3c0b-4e55-9d43-0c3f4d3d2f6e"


def pipeline(root: Path) -> Pipeline:
    """A pipeline over a queue of two batches, of which one micro-batch has read the first."""

    async def produce() -> None:
        async with Producer(ProducerConfig(store=str(root / "queue"), flush_interval="1h")) as producer:
            for record in (b"0", b"1"):
                await producer.produce([record])
                await producer.flush()

    asyncio.run(produce())
    checkpoint = root / "checkpoint"
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": APP}))
    (checkpoint / "offsets" / "0").write_text('v1\n{}\n{"0": 1}')
    (checkpoint / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    settings = {
        "name": "p",
        "source": {"buffer": {"store": str(root / "queue")}},
        "sink": {"delta": {"path": "t"}},
        "checkpoint": str(checkpoint),
        "ledger": str(root / "ledger"),
    }
    made = Pipeline(read_spec(settings, base=root))  # type: ignore[arg-type]
    made.ledger.keep("origin.json", {"0": 0})
    made.ledger.write(APP, BatchLine(batch=0, start={0: 0}, end={0: 1}, read=1, rows={"delta": 1}, at_ms=1))
    return made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_start_with_everything_in_place_reports_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = pipeline(tmp_path)
    assert made._begin(Checkpoint(made.spec.checkpoint_path)) == {0: 0}
    assert not warnings(caplog)


def test_a_lost_origin_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = pipeline(tmp_path)
    (tmp_path / "ledger" / "origin.json").unlink()
    assert made._begin(Checkpoint(made.spec.checkpoint_path)) == {0: 0}
    [report] = warnings(caplog)
    assert report.startswith(f"the ledger {made.ledger.url} has lost origin.json")


def test_a_checkpoint_that_has_lost_its_query_is_refused(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    (tmp_path / "checkpoint" / "metadata").unlink()
    with pytest.raises(Corrupt, match="metadata is missing"):
        made._begin(Checkpoint(made.spec.checkpoint_path))


class _Remote(Checkpoint):
    """A checkpoint that can be read but not listed, such as that of a Spark Connect server."""

    @property
    def query_id(self) -> str | None:
        return APP


def test_a_checkpoint_that_cannot_be_listed_is_started_without_the_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = pipeline(tmp_path)
    remote = _Remote("s3a://bucket/checkpoint", cast(SparkSession, None))
    assert made._begin(remote) == {0: 0}
    assert not warnings(caplog)
