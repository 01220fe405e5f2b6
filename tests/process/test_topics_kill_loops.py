"""Real engines on a real directory, killed for real: what was acknowledged is there, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEED = int(os.environ.get("PENSTOCK_KILL_SEED", "1"))
SOAK_S = 300.0
TORTURE = Path(__file__).with_name("topics_torture.py")


@pytest.mark.parametrize(
    "seconds",
    [10.0, pytest.param(SOAK_S, marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_S + 300)])],
)
def test_killed_engines_lose_nothing_and_use_no_sequence_twice(tmp_path: Path, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, str(TORTURE), str(tmp_path), str(SEED), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 200,
        check=False,
    )
    again = f"again: PENSTOCK_KILL_SEED={SEED} python -m pytest {__file__}"
    assert done.returncode == 0, f"{done.stderr}\n{again}"
    told = json.loads(done.stdout)
    assert told["kills"] >= 3, told
    assert told["acked"] > 20, told
