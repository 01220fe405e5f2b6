"""A fault at every file call of a Quiver at its cap, which frees space by truncating the log and removing
segments.

The bundles are so large that none is accepted before the log of the previous one is truncated, including its
active file.
"""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.crash.fault_kinds import fault_name, spread
from tests.crash.quiver.test_engine_crash import CRASHES, FAULTS, Notes, Writer, cuts, verify
from tests.unit.quiver.engine_doubles import StepClock, config

from penstock.errors import PenstockError
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

SETTINGS = config(
    segment={"target_size": 15_000},
    wal={"max_size": 60_000, "rotation_target": 30_000},
    retention={"size_cap": 93_750, "min_free": 0},
)
LARGE = 600


def work(disk: FakeDisk, notes: Notes) -> None:
    try:
        writer = Writer(disk, notes, SETTINGS)
    except PenstockError:
        return
    for _ in range(3):
        writer.number += 1000
        writer.write(50, count=LARGE)
        writer.maintain()
        writer.write(51)
        writer.maintain(6)
        for name in ("lake", "log"):
            writer.take(name, 9)
        writer.maintain()
    disk.plan = None
    writer.maintain(60)
    with contextlib.suppress(PenstockError):
        writer.quiver.flush()
    for name in ("lake", "log"):
        writer.take(name, 9)
    writer.maintain(60)
    writer.number += 1000
    writer.write(50, count=LARGE)
    assert writer.number in notes.accepted, "when the faults stop, Quiver accepts bundles again"
    writer.quiver.close()


def run_with(plan: PlannedFault | None) -> tuple[FakeDisk, Notes]:
    disk, notes = FakeDisk(plan=plan, clock=StepClock()), Notes()
    with contextlib.suppress(PowerCut):
        work(disk, notes)
    return disk, notes


def call_count() -> int:
    return len(run_with(None)[0].calls)


def test_without_a_fault_everything_is_accepted_and_delivered_once() -> None:
    disk, notes = run_with(None)
    assert notes.accepted == set(notes.attempted)
    assert len(notes.answered["lake"]) == 6
    for why, after in cuts(disk):
        verify(after, notes, why, SETTINGS)


@pytest.mark.parametrize("kind", CRASHES, ids=fault_name)
def test_a_crash_at_every_call_loses_and_duplicates_nothing(kind: DiskFault) -> None:
    for call in range(call_count()):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        for why, after in cuts(disk, 1):
            verify(after, notes, f"{kind.name} at call {call} ({disk.calls[-1]}), {why}", SETTINGS)


@pytest.mark.parametrize("kind", spread(FAULTS), ids=fault_name)
def test_a_fault_at_every_call_loses_and_duplicates_nothing(kind: DiskFault) -> None:
    for call in range(call_count()):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        after = disk.crash(Survival.RANDOM, random.Random(call))
        verify(after, notes, f"{kind.name} at call {call} ({disk.calls[call]})", SETTINGS)
