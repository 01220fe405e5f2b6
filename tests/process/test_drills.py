"""Every drill of the operations manual, as it is printed, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs" / "operations" / "drills.md"
_DRILL = re.compile(r"^## ([^\n]+)\n+```sh drill\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRILLS = dict(_DRILL.findall(MANUAL.read_text(encoding="utf-8")))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("title", DRILLS)
def test_the_drill_ends_well(title: str, tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "TOPICS_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    # A shell that fails leaves its server behind; it goes with its session.
    script = f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{DRILLS[title]}"
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_that_is_called_a_drill_is_found() -> None:
    assert len(DRILLS) == MANUAL.read_text(encoding="utf-8").count("```sh drill") >= 5
