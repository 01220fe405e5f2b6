"""Redrive of dead letters from real tables through the queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable
from tests.spark.conftest import Plant

from penstock.cli.pipelines import redrive as redrive_command
from penstock.config import Setting
from penstock.spark.pipeline import Pipeline
from penstock.spark.pipeline.redrive import Wanted, redrive
from penstock.spark.pipeline.spec import read_spec

PIPELINE = """
name: clicks
source: {buffer: {store: store}}
decode: {format: json, schema: "%s"}
sink: {delta: {path: table}}
checkpoint: checkpoint
"""


def pipeline(plant: Plant, schema: str) -> tuple[Pipeline, Path]:
    file = plant.root / "clicks.yaml"
    file.write_text(PIPELINE % schema)
    return Pipeline.from_yaml(file), file


def test_letters_come_through_once_when_the_schema_is_corrected(plant: Plant) -> None:
    plant.produce([[b'{"n": 1}', b'{"n": "two"}'], [b"broken", b'{"n": 3}']], metadata=b"from here")
    made, file = pipeline(plant, "n bigint")
    assert made.start(plant.spark, once=True).wait(60)

    preview = CliRunner().invoke(redrive_command, [str(file), "--dry-run", "--json"])
    assert json.loads(preview.output)["found"] == 2
    told = CliRunner().invoke(redrive_command, [str(file), "--sequence", "0-0"])
    assert "redrive 1: 1 letter, in the queue from sequence 2" in told.output, told.output

    corrected, _ = pipeline(plant, "n string")
    (plant.root / "table").rename(plant.root / "old")
    assert corrected.start(plant.spark, once=True).wait(60)
    table = DeltaTable(str(plant.root / "table")).to_pyarrow_table().to_pylist()
    assert [(row["n"], row["_sequence"]) for row in table] == [("two", 2)]

    # The letter that is left goes back, and is a new one.
    assert redrive(corrected.spec, Wanted()).found == 1
    assert corrected.start(plant.spark, once=True).wait(60)
    letters = DeltaTable(str(plant.root / "table_dead_letters")).to_pyarrow_table().to_pylist()
    assert sorted((row["sequence"], row["index"]) for row in letters) == [(0, 1), (1, 0), (3, 0)]
    assert {row["metadata"] for row in letters} == {b"from here"}


def parquet(root: Path) -> Setting:
    return {"parquet": {"path": "letters"}}


def iceberg(root: Path) -> Setting:
    return {
        "iceberg": {
            "table": "db.letters",
            "catalog": {
                "type": "sql",
                "uri": f"sqlite:///{root}/catalog.db",
                "warehouse": f"file://{root}/warehouse",
            },
        }
    }


@pytest.mark.parametrize("place", [parquet, iceberg])
def test_letters_are_found_in_every_kind_of_table(plant: Plant, place: object) -> None:
    assert callable(place)
    plant.produce([[b"bad", b'{"n": 1}'], [b"worse"]])
    spec = read_spec(
        {
            "name": "clicks",
            "source": {"buffer": {"store": plant.store}},
            "decode": {"format": "json", "schema": "n bigint"},
            "sink": {"delta": {"path": "table"}},
            "dead_letter": place(plant.root),
        },
        base=plant.root,
    )
    assert redrive(spec, Wanted(), dry_run=True).found == 0
    assert Pipeline(spec).start(plant.spark, once=True).wait(60)
    assert redrive(spec, Wanted(sequences=(1, 1))).found == 1
    assert redrive(spec, Wanted()).found == 1
    assert redrive(spec, Wanted()).found == 0
    assert len(plant.queue()) == 4
