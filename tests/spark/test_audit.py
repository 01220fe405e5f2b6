"""The audit of real pipelines: intact ones balance, and damage is reported exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from tests.spark.conftest import Plant

from penstock.cli.pipelines import audit as audit_command
from penstock.config import Setting
from penstock.errors import ConfigError
from penstock.spark.audit import audit_pipeline
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.spec import PipelineSpec, read_spec


def click(number: int) -> bytes:
    return json.dumps({"n": number}).encode()


def settings(root: Path, kind: str) -> dict[str, Setting]:
    target: dict[str, dict[str, Setting]] = {
        "delta": {"path": "table"},
        "parquet": {"path": "table"},
        "iceberg": {
            "table": "lake.clicks",
            "catalog": {
                "type": "sql",
                "uri": f"sqlite:///{root}/catalog.db",
                "warehouse": f"file://{root}/warehouse",
            },
        },
    }
    return {
        "name": "clicks",
        "source": {"buffer": {"store": "store"}},
        "decode": {"format": "json", "schema": "n bigint"},
        "transform": "SELECT n, _shard, _sequence, _index FROM input WHERE n <> 1",
        "trigger": {"max_batches": 1},
        "sinks": {"t": {kind: target[kind]}},
    }


def spec_in(root: Path, kind: str = "delta") -> PipelineSpec:
    return read_spec(settings(root, kind), base=root)


def run(plant: Plant, kind: str) -> PipelineSpec:
    """Run three micro-batches: one drops a record, one has a bad record. Then produce two more records."""
    plant.produce([[click(n) for n in range(3)], [click(3), b"bad"], [click(n) for n in range(4, 8)]])
    spec = spec_in(plant.root, kind)
    assert Pipeline(spec).start(plant.spark, once=True).wait(60)
    plant.produce([[click(8), click(9)]])
    return spec


@pytest.fixture(scope="module")
def finished(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a finished pipeline into a Delta table. Tests must not change it."""
    plant = Plant(spark=spark, root=tmp_path_factory.mktemp("finished"))
    run(plant, "delta")
    return plant.root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished pipeline, for tests to damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def findings(spec: PipelineSpec, *, deep: bool = True) -> list[str]:
    report = audit_pipeline(spec, deep=deep)
    assert not report.balanced
    return [
        f"{found.subject}: {found.text}"
        for found in report.balance.findings
        if found.severity.value == "problem"
    ]


def check_balanced(spec: PipelineSpec) -> None:
    report = audit_pipeline(spec, deep=True)
    assert report.balanced
    assert not report.balance.findings
    (totals,) = report.balance.sinks
    assert (totals.produced, totals.delivered, totals.dead, totals.dropped) == (11, 7, 1, 1)
    assert (totals.in_flight, totals.difference, report.balance.batches) == (2, 0, 3)


def test_a_pipeline_into_delta_balances_record_by_record(finished: Path) -> None:
    check_balanced(spec_in(finished))


@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_a_pipeline_into_another_table_balances(plant: Plant, kind: str) -> None:
    check_balanced(run(plant, kind))


def lose_ledger_line(root: Path) -> None:
    (chunk,) = root.glob(".penstock/clicks/checkpoint.ledger/*/*.jsonl")
    lines = chunk.read_bytes().splitlines(keepends=True)
    chunk.write_bytes(lines[0] + lines[2])


def lose_table_commit(root: Path) -> None:
    """Restore the table to its state before the last micro-batch."""
    log = sorted((root / "table" / "_delta_log").glob("*.json"))
    log[-1].unlink()


def add_duplicate(root: Path) -> None:
    table = DeltaTable(str(root / "table"))
    row = {"n": 3, "_shard": 0, "_sequence": 1, "_index": 0}
    write_deltalake(
        table, pa.Table.from_pylist([row], schema=pa.schema(table.schema().to_arrow())), mode="append"
    )


def delete_row(root: Path) -> None:
    DeltaTable(str(root / "table")).delete("n = 5")


def lose_queued_batch(root: Path) -> None:
    newest = max((root / "store" / "ingest").glob("*.batch"))
    newest.unlink()


NO_LINE = "micro-batch 1: has no line in the ledger: sequence 1, 2 records by the queue; of it t has 1 rows"
NO_COMMIT = "sink t: micro-batch 2 delivered 4 rows by the ledger, and TABLE does not have it: sequence 2"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lose_ledger_line,
            [NO_LINE],
        ),
        (
            lose_table_commit,
            [
                "sink t: its last micro-batch is 1, but the ledger says that 2 was delivered: sequence 2",
                NO_COMMIT,
                "sink t: micro-batch 2 (sequence 2) lacks 4 records: (2, 0), (2, 1), (2, 2), (2, 3)",
            ],
        ),
        (
            add_duplicate,
            ["sink t: 1 rows too many in micro-batches 0 to 2, dead letters included: (1, 0)"],
        ),
        (
            delete_row,
            [
                "sink t: TABLE holds 6 rows, 1 fewer than were added to it",
                "sink t: micro-batch 2 (sequence 2) lacks 1 records: (2, 1)",
            ],
        ),
        (
            lose_queued_batch,
            ["queue: the batch of sequence 3 is not in the store, and it is not delivered yet"],
        ),
    ],
    ids=["ledger line", "table commit", "duplicate row", "deleted row", "queued batch"],
)
def test_damage_is_named_by_sequence_and_record(
    root: Path, damage: Callable[[Path], None], expected: list[str]
) -> None:
    damage(root)
    place = str(root / "table")
    assert [text.replace(place, "TABLE") for text in findings(spec_in(root))] == expected


def test_a_lost_checkpoint_is_reported_and_the_ledger_gives_the_query(root: Path) -> None:
    spec = spec_in(root)
    checkpoint = Path(spec.checkpoint_path)
    checkpoint.rename(checkpoint.with_name("elsewhere"))
    (text,) = findings(spec)
    assert "is gone, but the ledger has lines of query" in text


def test_the_command_needs_no_spark_and_exits_by_the_verdict(root: Path) -> None:
    file = root / "clicks.yaml"
    file.write_text(yaml.safe_dump(settings(root, "delta")))
    script = (
        "import sys; from penstock.cli.pipelines import audit; "
        "sys.exit(audit.main([sys.argv[1], '--deep'], standalone_mode=False))"
    )
    plain = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": "", "JAVA_HOME": "/nowhere"},
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.endswith("balanced: 3 micro-batches, record by record\n")
    assert "1 left out by the transform of t" in plain.stdout
    lose_ledger_line(root)
    told = CliRunner().invoke(audit_command, [str(file), "--json"], standalone_mode=False)
    assert told.return_value == 1
    document = msgspec.json.decode(told.stdout)
    assert document["balanced"] is False
    assert document["findings"][0]["spans"] == [{"shard": 0, "first": 1, "last": 1}]


def test_a_pipeline_that_never_ran_says_so_and_creates_nothing(plant: Plant) -> None:
    plant.produce([[click(1), click(2)]])
    file = plant.root / "clicks.yaml"
    file.write_text(yaml.safe_dump(settings(plant.root, "delta")))
    told = CliRunner().invoke(audit_command, [str(file)], standalone_mode=False)
    assert told.return_value == 0
    assert "It has never run" in told.stdout
    assert sorted(path.name for path in plant.root.iterdir()) == ["clicks.yaml", "store"]


def test_an_unknown_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key, expected one of t"):
        audit_pipeline(spec_in(tmp_path), sink="clicks")
