"""A process that is killed again and again: nothing that it accepted is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.process.quiver.kill_writer import CONFIG

from penstock.metrics import Registry
from penstock.quiver import Quiver, QuiverConfig

pytestmark = pytest.mark.process

WRITER = Path(__file__).with_name("kill_writer.py")
ROUNDS = 6


def numbers(path: Path) -> list[int]:
    """What was noted; a last line that was cut off by the kill does not count."""
    return [int(line) for line in path.read_bytes().split(b"\n")[:-1]]


def run_and_kill(path: Path, first: int, seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(path), str(first)], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.kill()


def outcome(path: Path) -> tuple[list[int], Counter[int], Counter[int], tuple[str, ...]]:
    """What was accepted, taken, and is still there after a start; and what the start reported."""
    left: Counter[int] = Counter()
    with Quiver.open(str(path / "data"), QuiverConfig.from_mapping(CONFIG), registry=Registry()) as quiver:
        quiver.register("lake")
        quiver.activate("lake")
        damage = quiver.stats().damage
        quiver.flush()
        while (bundle := quiver.next_bundle("lake")) is not None:
            left[bundle.batch.column("n")[0].as_py()] += 1
            bundle.ack()
    return numbers(path / "accepted"), Counter(numbers(path / "taken")), left, damage


def lost(accepted: list[int], taken: Counter[int], left: Counter[int]) -> list[int]:
    return [number for number in accepted if number not in taken and number not in left]


@pytest.mark.timeout(120)
def test_a_writer_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    for turn in range(ROUNDS):
        run_and_kill(tmp_path, turn * 10_000_000, rng.uniform(0.1, 0.7))
    accepted, taken, left, damage = outcome(tmp_path)
    assert len(accepted) > 50
    assert damage == ()
    assert lost(accepted, taken, left) == []
    parts = Counter({number: 1 if number % 5 else 2 for number in accepted})
    assert {n for n, count in parts.items() if taken[n] + left[n] < count} == set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_log_that_lost_what_a_killed_writer_was_told_is_accepted_is_reported(
    tmp_path: Path, how: str
) -> None:
    run_and_kill(tmp_path, 0, 0.5)
    log = tmp_path / "data" / "core_0" / "wal" / "quiver.wal"
    raw = log.read_bytes()
    if how == "missing":
        log.unlink()
    else:
        log.write_bytes(raw[: len(raw.rstrip(b"\0")) // 2])
    checked = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "quiver", "fsck", str(tmp_path / "data")],
        capture_output=True,
        check=False,
    )
    accepted, taken, left, damage = outcome(tmp_path)
    if lost(accepted, taken, left):
        assert (checked.returncode, b"quiver.wal" in checked.stdout) == (5, True), checked
        assert any("the log" in text for text in damage), damage
