"""The how-to of a small database, run as a reader would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.process.cli_runner import environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_database.py"


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_counters_add_up_over_runs(tmp_path: Path) -> None:
    store = tmp_path.as_uri()
    assert run(store, "apples=3", "pears=1", "apples=2") == "apples 5\npears 1\n"
    assert run(store, "pears=4") == "apples 5\npears 5\n"
    assert run(store) == "apples 5\npears 5\n"


def test_a_refused_addition_changes_nothing(tmp_path: Path) -> None:
    store = tmp_path.as_uri()
    assert "ApplyError: write 2 was refused" in run(store, "apples=3", "apples=-1", code=1)
    assert run(store) == "apples 3\n"


def test_the_example_is_as_short_as_it_says() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100
