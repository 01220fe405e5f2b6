from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.demo.command import line, panel
from penstock.cli.demo.run import ROWS, TOTALS, Live, Plan, pipeline_text
from penstock.spark.pipeline.spec import PipelineSpec, load_spec


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(folder=tmp_path, store=None, producers=2, records=1000, seconds=10.0, since_ms=0)


def written(plan: Plan) -> PipelineSpec:
    plan.pipeline_file.write_text(pipeline_text(plan), encoding="utf-8")
    return load_spec(plan.pipeline_file)


def test_the_pipeline_is_a_file_whose_folder_can_be_moved(plan: Plan) -> None:
    spec = written(plan)
    assert str(plan.folder) not in plan.pipeline_file.read_text(encoding="utf-8")
    assert spec.source.buffer.store == plan.queue == str(plan.folder / "queue")
    assert [sink.place for sink in spec.outputs.values()] == [plan.table(ROWS), plan.table(TOTALS)]
    assert spec.checkpoint_path == str(plan.folder / "checkpoint")


def test_with_a_store_only_queue_and_tables_are_there(plan: Plan) -> None:
    remote = replace(plan, store="s3://bucket/folder: with, signs")
    spec = written(remote)
    assert spec.source.buffer.store == remote.queue == "s3://bucket/folder: with, signs/queue"
    assert spec.outputs[ROWS].place == remote.table(ROWS)
    assert spec.letters is not None
    assert spec.letters.place == remote.table("dead_letters")
    assert spec.checkpoint_path == str(plan.folder / "checkpoint")


def test_the_display_shows_every_number() -> None:
    live = Live(
        phase="running",
        elapsed_s=71.0,
        produced=1111,
        acknowledged=1110,
        delivered=1000,
        dead=7,
        backlog=13,
        lag_s=2.5,
        producer_kills=1,
        driver_kills=1,
    )
    for text in (panel(live), line(live)):
        for part in ("running", "71", "1,111", "1,110", "1,000", "7", "13", "2.5"):
            assert part in text
    assert "producer 1, Spark driver 1" in panel(live)
