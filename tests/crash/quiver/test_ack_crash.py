"""A fault at every file call of the ack log and its checkpoints, and a power cut at every instant (I8, I9).

The subscribers below ack, nack and drop, register and leave, with syncs, checkpoints and deletions in
between. After any power cut, synced outcomes are still resolved, unresolved bundles are still pending, no
segment is missing, no number is used again, and recovering once more changes nothing. A removed file is gone
immediately, as on the worst disks. `PENSTOCK_SOAK=1` tests every call instead of a sample.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.unit.quiver.ack_doubles import Core

from penstock.errors import PenstockError
from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.log import OffsetLogSettings
from penstock.quiver.offsets.records import Outcome
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800 if os.environ.get("PENSTOCK_SOAK") else 120)]

STEP = 1 if os.environ.get("PENSTOCK_SOAK") else 3
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]
SETTINGS = OffsetLogSettings(flush_interval_s=0, checkpoint_records=1_000_000)
BUNDLES = 3


@dataclass
class Notes:
    """The outcomes that were recorded, and those that were promised to be durable."""

    registered: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    resolved: set[tuple[str, int, int]] = field(default_factory=set)
    kept: set[tuple[str, int, int]] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    marks: dict[str, int] = field(default_factory=dict)
    highest: int = 0


class Work:
    """Uses a store and records the results. Errors are recorded and tolerated."""

    def __init__(self, disk: FakeDisk) -> None:
        self.core = Core(disk, settings=SETTINGS)
        self.notes = Notes()

    def attempt(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except PenstockError:
            return False
        return True

    def register(self, name: str) -> None:
        if self.attempt(lambda: self.core.offsets.register(name)):
            self.notes.registered.add(name)

    def leave(self, name: str) -> None:
        self.notes.left.add(name)
        self.notes.registered.discard(name)
        self.attempt(lambda: self.core.unregister(name))

    def add(self, seq: int) -> None:
        self.core.add(seq, bundles=BUNDLES)
        self.notes.highest = seq

    def say(self, name: str, seq: int, *bundles: int, outcome: Outcome = Outcome.ACK) -> None:
        for bundle in bundles:
            if self.core.offsets.resolve(name, BundleRef(seq, bundle), outcome) and outcome.resolves:
                self.notes.resolved.add((name, seq, bundle))

    def sync(self) -> None:
        resolved = set(self.notes.resolved)
        marks = {one.name: one.hwm for one in self.core.deliveries.subscribers()}
        if self.attempt(self.core.offsets.sync):
            self.notes.kept |= resolved
            self.notes.marks.update(marks)

    def remove(self) -> None:
        offsets = self.core.offsets
        offsets.mark_deleted(offsets.finished())
        self.attempt(offsets.sync)
        for seq in offsets.removable():
            del self.core.infos[seq]
            self.notes.removed.add(seq)
            offsets.forget_segment(seq)

    def drop(self, seq: int) -> None:
        for name in self.core.offsets.names():
            self.notes.resolved |= {(name, seq, bundle) for bundle in range(BUNDLES)}
        self.core.offsets.drop(seq, Outcome.DROPPED)

    def run(self) -> None:
        if not self.attempt(self.core.open):
            return
        for name in ("a", "b"):
            self.register(name)
        for seq in (1, 2, 3, 4):
            self.add(seq)
        self.say("a", 1, 0, 1, 2)
        self.say("a", 3, 1)
        self.sync()
        self.say("b", 1, 2, 1, 0)
        self.say("b", 2, 0, outcome=Outcome.NACK)
        self.remove()
        self.attempt(self.core.offsets.checkpoint)
        self.register("late")
        self.say("a", 3, 0, 2)
        self.say("a", 2, 0)
        self.sync()
        self.attempt(self.core.offsets.checkpoint)
        self.drop(2)
        self.remove()
        self.leave("late")
        self.say("b", 3, 0, 1, 2, outcome=Outcome.REJECTED)
        self.remove()
        self.add(5)
        self.say("a", 5, 0)
        self.attempt(self.core.offsets.close)


def check(core: Core, notes: Notes) -> None:
    """Check the invariants after a crash."""
    offsets = core.offsets
    assert core.found.missing == ()
    assert offsets.damage == ()
    names = set(offsets.names())
    assert notes.registered <= names
    assert offsets.state.next_segment_seq > max(notes.removed, default=0)
    for name, seq, bundle in notes.kept:
        assert name in notes.left or offsets.state.entry(name).progress.is_resolved(BundleRef(seq, bundle))
    for name in names:
        assert offsets.subscriber(name).hwm >= notes.marks.get(name, 0) or name in notes.left
        if name == "late":
            continue  # it may still exist although it left, and then everything is pending for it
        for seq in core.infos:
            for bundle in range(BUNDLES):
                if offsets.state.entry(name).progress.is_resolved(BundleRef(seq, bundle)):
                    assert (name, seq, bundle) in notes.resolved
    for seq in offsets.finished():
        assert all(offsets.state.entry(name).progress.is_resolved(BundleRef(seq, 0)) for name in names)


def calls_of_a_whole_run() -> int:
    work = Work(FakeDisk())
    work.run()
    return len(work.core.disk.calls)


CALLS = calls_of_a_whole_run()


@pytest.mark.parametrize("survival", Survival)
@pytest.mark.parametrize("fault", CRASHES)
def test_a_power_cut_anywhere_loses_nothing_that_was_synced(fault: DiskFault, survival: Survival) -> None:
    seeds = range(3 if survival is Survival.RANDOM else 1)
    for call, seed in itertools.product(range(CALLS), seeds):
        work = Work(FakeDisk(plan=PlannedFault(call=call, kind=fault)))
        with contextlib.suppress(PowerCut):  # a call that finds nothing to remove fails before the power does
            work.run()
        rng = random.Random(call * 10 + seed)
        once = work.core.crashed(work.core.disk.crash(survival, rng))
        check(once, work.notes)
        before = [once.offsets.subscriber(name) for name in once.offsets.names()]
        twice = once.crashed(once.disk.crash(survival, rng))
        check(twice, work.notes)
        assert [twice.offsets.subscriber(name) for name in twice.offsets.names()] == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_anywhere_is_survived_and_a_crash_after_it_too(fault: DiskFault) -> None:
    for call in range(0, CALLS, STEP):
        work = Work(FakeDisk(plan=PlannedFault(call=call, kind=fault)))
        work.run()
        if not hasattr(work.core, "book"):
            continue  # opening has already failed
        work.core.disk.plan = None
        for survival in Survival:
            after = work.core.crashed(_copy(work.core.disk).crash(survival, random.Random(call)))
            check(after, work.notes)


@pytest.mark.parametrize("fault", CRASHES)
def test_a_power_cut_during_recovery_changes_nothing(fault: DiskFault) -> None:
    work = Work(FakeDisk())
    work.core.open()
    work.register("a")
    work.add(1)
    work.say("a", 1, 0)
    work.sync()
    base = work.core.disk.crash(Survival.EVERYTHING)
    probe = _copy(base)
    start = len(probe.calls)
    work.core.crashed(probe)
    for call in range(start, len(probe.calls)):
        disk = _copy(base)
        disk.plan = PlannedFault(call=call, kind=fault)
        with contextlib.suppress(PowerCut):
            work.core.crashed(disk)
        for survival in Survival:
            after = work.core.crashed(_copy(disk).crash(survival, random.Random(call)))
            check(after, work.notes)
            assert after.offsets.subscriber("a").acked == 1


def test_a_power_cut_while_a_file_is_abandoned_loses_nothing_that_was_synced() -> None:
    for calls, seed in itertools.product(range(12), range(8)):
        work = Work(FakeDisk())
        disk = work.core.disk
        work.core.open()
        work.register("a")
        work.add(1)
        work.say("a", 1, 0)
        work.sync()
        work.say("a", 1, 1)
        disk.plan = PlannedFault(call=len(disk.calls) + 1, kind=DiskFault.FAIL_ONCE)
        work.sync()
        assert work.notes.kept == {("a", 1, 0)}
        disk.plan = PlannedFault(call=len(disk.calls) + calls, kind=DiskFault.CRASH_AFTER)
        with contextlib.suppress(PowerCut):
            work.sync()
        check(work.core.crashed(disk.crash(Survival.RANDOM, random.Random(seed))), work.notes)


def _copy(disk: FakeDisk) -> FakeDisk:
    """Return a copy of the disk, to be crashed in another way."""
    return copy.deepcopy(disk)
