"""A fault at every file call of the whole engine, and a power cut at every instant.

Two subscribers take from a Quiver that rotates its log, seals by size and by age, and deletes data that both
have processed. After any failure or power cut, and the next start, each subscriber gets every accepted row
that it has not acknowledged exactly once, and no row that was never written.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from tests.crash.fault_kinds import fault_name, spread
from tests.unit.quiver.engine_doubles import StepClock, config, open_quiver, rows, take_all, words

from penstock.errors import PenstockError
from penstock.quiver.config import QuiverConfig
from penstock.quiver.engine import Quiver
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]
NAMES = ("lake", "log")


@dataclass
class Notes:
    """The results that the writer and the subscribers got, by the first number of each batch."""

    attempted: dict[int, list[int]] = field(default_factory=dict)
    """The rows of each batch."""
    accepted: set[int] = field(default_factory=set)
    last_number: int = 0
    """The number of the bundle that was accepted last."""
    answered: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NAMES})
    registered: set[str] = field(default_factory=set)

    def check(self, quiver: Quiver) -> None:
        for name in self.registered:
            given = take_all(quiver, name)
            numbers = [values[0] for _, values in given]
            assert len(numbers) == len(set(numbers)), f"{name} got rows twice: {sorted(numbers)}"
            for _, values in given:
                assert self.attempted[values[0]] == values
            lost = self.accepted - self.answered[name] - set(numbers)
            assert not lost, f"{name} lost {sorted(lost)}"


class Writer:
    def __init__(self, disk: FakeDisk, notes: Notes, settings: QuiverConfig) -> None:
        self.clock = StepClock()
        self.notes = notes
        self.number = 0
        self.quiver = open_quiver(disk, self.clock, settings)
        for name in NAMES:
            with contextlib.suppress(PenstockError):
                self.quiver.register(name)
            with contextlib.suppress(PenstockError):
                self.quiver.activate(name)
                notes.registered.add(name)

    def write(self, *slots: int, count: int = 3) -> None:
        batches: dict[int, pa.RecordBatch] = {}
        for slot in slots:
            self.number += 100
            batches[slot] = (words if slot == 52 else rows)(self.number, count)
        firsts = {slot: batch.column("n")[0].as_py() for slot, batch in batches.items()}
        for slot, batch in batches.items():
            self.notes.attempted[firsts[slot]] = batch.column("n").to_pylist()
        with contextlib.suppress(PenstockError):
            receipt = self.quiver.ingest(batches)
            self.notes.accepted.update(firsts.values())
            self.notes.last_number = receipt.wal_seq

    def take(self, name: str, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(PenstockError):
                bundle = self.quiver.next_bundle(name)
                if bundle is None:
                    return
                if bundle.ack():
                    self.notes.answered[name].add(bundle.batch.column("n")[0].as_py())

    def maintain(self, seconds: float = 0.2) -> None:
        self.clock.step(seconds)
        with contextlib.suppress(PenstockError):
            self.quiver.maintain()
        with contextlib.suppress(PenstockError):
            assert self.quiver.core.wal is not None
            self.quiver.core.wal.log.mark()  # as the committer does when it is idle


def work(disk: FakeDisk, notes: Notes, settings: QuiverConfig) -> None:
    try:
        writer = Writer(disk, notes, settings)
    except PenstockError:
        return
    writer.write(50)
    writer.write(50, 51)
    writer.write(52)
    writer.maintain()
    for _ in range(4):
        writer.write(51, count=10)
    writer.maintain(6)
    writer.take("lake", 4)
    writer.write(50, 51, 52)
    writer.maintain()
    writer.take("log", 9)
    writer.take("lake", 9)
    writer.maintain()
    writer.write(52)
    for _ in range(3):
        writer.write(50, count=20)
    writer.maintain(6)
    writer.take("lake", 2)
    writer.write(51)
    disk.plan = None
    writer.write(50)
    assert writer.number in notes.accepted, "when the faults stop, Quiver accepts bundles again"
    writer.maintain(40)
    writer.quiver.close()


def cuts(disk: FakeDisk, seeds: int = 2) -> Iterator[tuple[str, FakeDisk]]:
    yield "nothing survived", disk.crash(Survival.NOTHING)
    yield "only the process died", disk.crash(Survival.EVERYTHING)
    for seed in range(seeds):
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed))


def verify(disk: FakeDisk, notes: Notes, why: str, settings: QuiverConfig) -> None:
    try:
        for _ in range(2):
            quiver = open_quiver(disk, StepClock(), settings)
            for name in notes.registered:
                quiver.activate(name)
            quiver.flush()
            assert quiver.stats().damage == ()
            assert quiver.stats().next_wal_seq > notes.last_number
            notes.check(quiver)
            quiver.close()
    except (AssertionError, PenstockError) as error:
        raise AssertionError(f"{why}: {error!r}") from error


def run_with(plan: PlannedFault | None, settings: QuiverConfig) -> tuple[FakeDisk, Notes]:
    disk, notes = FakeDisk(plan=plan, clock=StepClock()), Notes()
    with contextlib.suppress(PowerCut):
        work(disk, notes, settings)
    return disk, notes


SETTINGS = config()


def call_count() -> int:
    return len(run_with(None, SETTINGS)[0].calls)


def test_without_a_fault_everything_is_delivered_once() -> None:
    disk, notes = run_with(None, SETTINGS)
    assert notes.accepted == set(notes.attempted)
    assert len(notes.answered["lake"]) > 9
    for why, after in cuts(disk):
        verify(after, notes, why, SETTINGS)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", CRASHES, ids=fault_name)
def test_a_crash_at_every_call_loses_and_duplicates_nothing(kind: DiskFault, part: int) -> None:
    for call in range(part, call_count(), 4):
        disk, notes = run_with(PlannedFault(call=call, kind=kind), SETTINGS)
        for why, after in cuts(disk, 1):
            verify(after, notes, f"{kind.name} at call {call} ({disk.calls[-1]}), {why}", SETTINGS)


@pytest.mark.parametrize("kind", spread(FAULTS), ids=fault_name)
def test_a_fault_at_every_call_loses_and_duplicates_nothing(kind: DiskFault) -> None:
    for call in range(call_count()):
        disk, notes = run_with(PlannedFault(call=call, kind=kind), SETTINGS)
        after = disk.crash(Survival.RANDOM, random.Random(call))
        verify(after, notes, f"{kind.name} at call {call} ({disk.calls[call]})", SETTINGS)


@pytest.mark.parametrize("kind", spread([*CRASHES, DiskFault.FAIL_ONCE]), ids=fault_name)
def test_a_fault_at_every_call_of_the_start_changes_nothing(kind: DiskFault) -> None:
    total = call_count()
    for call in range(total // 4, total, total // 4):
        disk, notes = run_with(PlannedFault(call=call, kind=DiskFault.CRASH_BEFORE), SETTINGS)
        for step in itertools.count():
            after = disk.crash(Survival.RANDOM, random.Random(call))
            after.calls.clear()
            after.plan = PlannedFault(call=step, kind=kind)
            with contextlib.suppress(PowerCut, PenstockError):
                open_quiver(after, StepClock(), SETTINGS)
            if len(after.calls) <= step:
                break
            again = after.crash(Survival.RANDOM, random.Random(step))
            verify(again, notes, f"{call}, {kind.name} at {step}", SETTINGS)
