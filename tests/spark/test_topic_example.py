"""The worked example from a topic into Delta runs unchanged, including the kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(400)  # it starts Spark twice
def test_the_example_brings_every_click_into_the_table_once(tmp_path: Path) -> None:
    source = str(Path(penstock.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "examples/topic_to_delta.py", str(tmp_path / "work")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "acknowledged 6000, in the table 6000, distinct 6000" in done.stdout
