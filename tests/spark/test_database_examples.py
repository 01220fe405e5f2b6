"""The worked examples into the databases run unchanged, including the kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]


def run_example(name: str, work: Path) -> str:
    source = str(Path(penstock.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, f"examples/{name}/{name}.py", str(work)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)  # Spark twice, and the database twice
def test_every_click_counts_once_in_the_time_series_though_spark_and_the_database_are_killed(
    tmp_path: Path,
) -> None:
    assert "produced 3600, in the time series 3600.0" in run_example("clicks_per_minute", tmp_path / "work")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_right_document_comes_first(tmp_path: Path) -> None:
    told = run_example("document_search", tmp_path / "work")
    assert "the moon and the sea -> tides, " in told
    assert "after a change and a deletion: piano, " in told
