from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.demo.producer import Sums
from penstock.cli.demo.report import Balance, print_next, print_totals
from penstock.cli.demo.run import Live, Outcome, Plan

SUMS = Sums(records=90, size_bytes=900, checksum=0xABC)
BALANCE = Balance(
    produced=100,
    acknowledged=SUMS,
    stored=SUMS,
    rows=92,
    letters=1,
    unacknowledged=3,
    duplicates=0,
    foreign=0,
    misplaced=0,
    clicks=92,
)
DONE = Live(phase="checking", elapsed_s=60.0, producer_kills=1, driver_kills=1)
OUTCOME = Outcome(last=DONE, interrupted=(4,), half_stored=True)


def test_the_totals_tell_what_the_kills_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    print_totals(BALANCE, OUTCOME)
    told = capsys.readouterr().out
    assert told.count("0000000000000abc") == 2
    assert "92 rows, 1 dead letters: 0 missing, 0 twice" in told
    assert "micro-batch 4, when its rows were stored and its totals were not; it was run again" in told
    assert "10 events not acknowledged yet: 3 of them are stored, 7 are not" in told


def test_kills_that_met_nothing_are_not_made_more_of(capsys: pytest.CaptureFixture[str]) -> None:
    idle = replace(OUTCOME, last=replace(DONE, producer_kills=0), interrupted=(), half_stored=False)
    print_totals(BALANCE, idle)
    told = capsys.readouterr().out
    assert "between two micro-batches" in told
    assert "no producer" in told


@pytest.mark.parametrize("kept", [True, False])
def test_the_next_steps_name_files_that_exist_or_how_to_get_them(
    capsys: pytest.CaptureFixture[str], kept: bool
) -> None:
    folder = Path("/some where/demo")
    plan = Plan(folder=folder, store=None, producers=1, records=1000, seconds=1.0, since_ms=0)
    print_next(plan, kept=kept)
    told = capsys.readouterr().out
    assert ("penstock audit '/some where/demo/clicks.yaml' --deep" in told) is kept
    assert ("penstock demo --keep --data demo" in told) is not kept
    for verb in ("penstock audit", "penstock run", "penstock buffer stat", "DeltaTable("):
        assert verb in told
