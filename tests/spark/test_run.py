"""`penstock run` and `penstock compact` on an existing session: their output and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable
from tests.spark.conftest import Plant

from penstock.cli.pipelines import compact
from penstock.cli.run.command import run
from penstock.errors import ConfigError
from penstock.spark.pipeline.spec import load_spec

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "first-pipeline.md"


def write(plant: Plant, text: str) -> Path:
    file = plant.root / "clicks.yaml"
    file.write_text(text.replace("store: queue", "store: store"))
    return file


def how_to(plant: Plant) -> Path:
    """Return the pipeline of the how-to."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", HOW_TO.read_text(), re.DOTALL | re.MULTILINE)
    return write(plant, text)


def told(result: Result) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


GOOD = b'{"user": "ada", "url": "/", "ms": 12}'


def test_the_pipeline_of_the_how_to_is_checked_run_and_compacted(plant: Plant) -> None:
    file = how_to(plant)
    plant.produce([[GOOD, b"oops"], [GOOD]])
    before = sorted(plant.root.rglob("*"))
    checked = CliRunner().invoke(run, [str(file), "--check", "--json"])
    found = told(checked)
    assert json.loads(checked.stdout)["ok"], found
    assert sorted(plant.root.rglob("*")) == before
    assert "holds 2 batches" in found["source"]["text"]
    assert found["transform delta"]["text"] == "user string, url string, ms bigint, slow boolean"
    assert found["sink delta"]["text"].endswith("does not exist yet; it will be created")

    done = CliRunner().invoke(run, [str(file), "--once", "--json"], standalone_mode=False)
    assert done.return_value == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events if event["event"] != "progress"] == [
        "started",
        "batch",
        "stopped",
    ]
    assert (events[-1]["read"], events[-1]["rows"], events[-1]["dead"]) == (3, {"delta": 2}, 1)

    again = told(CliRunner().invoke(run, [str(file), "--check", "--json"]))
    assert again["sink delta"]["text"].endswith("exists and its columns fit")
    assert again["checkpoint"]["text"].endswith("continues after micro-batch 0")

    for _ in range(2):
        plant.produce([[GOOD]])
        CliRunner().invoke(run, [str(file), "--once"])
    merged = CliRunner().invoke(compact, [str(file), "--sink", "delta", "--min-files", "2", "--json"])
    assert json.loads(merged.stdout)["tables"]["delta"]["files_after"] == 1
    assert DeltaTable(str(plant.root / "lake" / "clicks")).count() == 4


def test_a_check_finds_what_is_wrong_and_says_what_to_do(plant: Plant) -> None:
    file = how_to(plant)
    (plant.root / "blocked").write_text("a file")
    result = CliRunner().invoke(
        run,
        [
            str(file),
            "--check",
            "--json",
            "--set",
            "transform=SELECT usr FROM input",
            "--set",
            "checkpoint=blocked/checkpoint",
        ],
        standalone_mode=False,
    )
    assert result.return_value == 1
    found = told(result)
    assert found["transform delta"]["status"] == "fail"
    assert "`usr` cannot be resolved" in found["transform delta"]["text"]
    assert "\n" not in found["transform delta"]["text"]
    assert "sink delta" not in found
    assert found["checkpoint"]["text"].endswith("blocked is a file; give a folder")
    assert "never contained a batch" in found["source"]["text"]
    assert all(check["advice"] for check in found.values() if check["status"] == "fail")


def test_a_check_notices_another_queue_and_another_table(plant: Plant) -> None:
    file = how_to(plant)
    plant.produce([[GOOD]])
    CliRunner().invoke(run, [str(file), "--once"])
    (plant.root / "store").rename(plant.root / "elsewhere")
    plant.produce([[GOOD]])
    result = CliRunner().invoke(
        run, [str(file), "--check", "--json", "--set", "transform=SELECT user, ms > 1 AS ms FROM input"]
    )
    found = told(result)
    assert "belongs to another queue" in found["checkpoint"]["text"]
    assert "column 'ms' is boolean in the rows and bigint" in found["sink delta"]["text"]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT usr FROM input", "`usr` cannot be resolved"),
        ("SELECT user, count(*) AS n FROM input GROUP BY user", "its transform groups rows"),
    ],
    ids=["an unknown column", "a group"],
)
def test_wrong_sql_ends_a_run_with_a_sentence(plant: Plant, sql: str, reason: str) -> None:
    file = how_to(plant)
    plant.produce([[GOOD]])
    result = CliRunner().invoke(run, [str(file), "--once", "--json", "--set", f"transform={sql}"])
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["event"], last["message"]) == ("failed", str(result.exception))
    assert not (plant.root / "lake").exists()


def test_a_plain_run_prints_its_progress_on_standard_error(plant: Plant) -> None:
    file = how_to(plant)
    plant.produce([[GOOD]])
    result = CliRunner().invoke(run, [str(file), "--once"], standalone_mode=False)
    assert result.return_value == 0
    assert result.stdout == ""
    assert "done: everything in the queue is delivered" in result.stderr
    assert load_spec(file).outputs.keys() == {"delta"}
