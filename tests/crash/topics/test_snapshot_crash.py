"""A fault at every file call while snapshots are written, and a power cut at every instant."""

from __future__ import annotations

import random

import pytest

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics.checkpoints.snapshot import LogStart, Snapshot, load_latest, write_snapshot

pytestmark = pytest.mark.crash

META = "/data/meta"
ROUNDS = 5
SEEDS = range(8)


def snapshot_of(number: int) -> Snapshot:
    return Snapshot(
        next_topic_id=number, created_ms=number, wal={"wal": LogStart(number, 2 * number)}, topics=()
    )


class Notes:
    def __init__(self) -> None:
        self.durable = 0
        self.tried = 0
        self.refused: set[int] = set()


def work(disk: FakeDisk, notes: Notes) -> None:
    for number in range(1, ROUNDS + 1):
        notes.tried = number
        try:
            write_snapshot(disk, META, number, snapshot_of(number), previous=notes.durable or None)
        except OutcomeUnknown:
            continue
        except PenstockError:
            notes.refused.add(number)
            continue
        notes.durable = number


def verify(disk: FakeDisk, notes: Notes, why: str) -> None:
    loaded = load_latest(disk, META)
    assert notes.durable <= loaded.number <= notes.tried, f"{why}: {loaded.number}"
    assert loaded.number not in notes.refused, why
    assert loaded.snapshot == (snapshot_of(loaded.number) if loaded.number else None), why
    assert loaded.rejected == (), why
    write_snapshot(disk, META, loaded.next_number, snapshot_of(99), previous=loaded.number or None)
    assert load_latest(disk, META).snapshot == snapshot_of(99)
    assert len(disk.list_files(META)) <= 2 + notes.tried - notes.durable, why


CALLS = 8 * ROUNDS + 12


def test_the_sweep_reaches_beyond_the_last_call() -> None:
    disk = FakeDisk(clock=ManualClock())
    work(disk, Notes())
    assert len(disk.calls) < CALLS
    assert [name for name, _ in disk.list_files(META)] == [
        "snapshot-0000000000000004.bin",
        "snapshot-0000000000000005.bin",
    ]


@pytest.mark.parametrize("kind", DiskFault)
def test_a_fault_at_any_file_call_leaves_the_newest_acknowledged_snapshot_or_a_newer_one(
    kind: DiskFault,
) -> None:
    for call in range(CALLS):
        disk, notes = FakeDisk(clock=ManualClock()), Notes()
        disk.make_dirs("/data")
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
        try:
            work(disk, notes)
        except PowerCut:
            pass
        verify(disk.crash(Survival.NOTHING), notes, f"{kind.name} at call {call}, nothing survived")
        verify(disk.crash(Survival.EVERYTHING), notes, f"{kind.name} at call {call}, everything survived")
        for seed in SEEDS:
            after = disk.crash(Survival.RANDOM, random.Random(seed))
            verify(after, notes, f"{kind.name} at call {call}, seed {seed}")
