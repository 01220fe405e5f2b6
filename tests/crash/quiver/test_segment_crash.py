"""A fault at every file call while segments are written, removed, quarantined and scanned."""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.unit.quiver.bundles import batch, sealed_of

from penstock.errors import PenstockError
from penstock.quiver.segments.store import SegmentStore
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

SEGMENTS, QUARANTINE = "/q/segments", "/q/quarantine"
SEEDS = range(4)
CRASHES = (DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER)
FAILURES = tuple(kind for kind in DiskFault if kind not in CRASHES)
ROUNDS = 5


class Notes:
    """The results that the store reported, and the requests that it got."""

    def __init__(self) -> None:
        self.committed: set[int] = set()
        self.tried: set[int] = set()
        self.removing: set[int] = set()
        self.removed: set[int] = set()

    def check(self, store: SegmentStore, why: str) -> None:
        there = {info.seq for info in store.infos()}
        assert self.committed - self.removing <= there, why
        assert there <= self.tried - self.removed, why
        for seq in there:
            assert [each.to_pylist() for each in store.batches(seq)] == [
                batch(seq, 0).to_pylist(),
                batch(seq, 1).to_pylist(),
            ], why
        if self.tried:
            assert store.highest_seq <= max(self.tried), why


def segment(seq: int) -> list[list[int]]:
    return [[seq, 0], [seq, 1]]


def opened(disk: FakeDisk) -> SegmentStore:
    return SegmentStore.open(disk, SEGMENTS, QUARANTINE)


def work(disk: FakeDisk, notes: Notes) -> None:
    store = opened(disk)
    for seq in range(1, ROUNDS + 1):
        notes.tried.add(seq)
        try:
            store.write(sealed_of(*[batch(*values) for values in segment(seq)], first_seq=2 * seq), seq)
            notes.committed.add(seq)
        except PenstockError:
            pass
        if seq % 2 == 0 and seq - 1 in notes.committed:
            notes.removing.add(seq - 1)
            try:
                store.remove(seq - 1)
                notes.removed.add(seq - 1)
            except PenstockError:
                pass


def recovered(disk: FakeDisk, notes: Notes, why: str) -> None:
    store = opened(disk)
    assert store.damage == [], why
    notes.check(store, why)
    files = disk.list_files(SEGMENTS)
    assert not any(name.endswith(".tmp") for name, _ in files), why
    assert store.byte_count == sum(stat.size for _, stat in files), why
    again = opened(disk)
    assert again.infos() == store.infos(), why
    assert disk.list_files(SEGMENTS) == files, why


def total_calls() -> int:
    disk = FakeDisk(clock=ManualClock())
    work(disk, Notes())
    return len(disk.calls)


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_at_any_call_keeps_committed_segments_and_nothing_incomplete(kind: DiskFault) -> None:
    for call in range(total_calls()):
        for survival, seed in [(Survival.NOTHING, 0), (Survival.EVERYTHING, 0)] + [
            (Survival.RANDOM, seed) for seed in SEEDS
        ]:
            disk, notes = FakeDisk(plan=PlannedFault(call=call, kind=kind), clock=ManualClock()), Notes()
            with pytest.raises(PowerCut):
                work(disk, notes)
            why = f"call {call} {kind.name} {survival.name} seed {seed}"
            recovered(disk.crash(survival, random.Random(seed)), notes, why)


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_at_any_call_leaves_a_store_that_works(kind: DiskFault) -> None:
    for call in range(total_calls()):
        disk, notes = FakeDisk(clock=ManualClock()), Notes()
        disk.make_dirs(SEGMENTS)
        disk.make_dirs(QUARANTINE)
        store = opened(disk)
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
        try:
            work(disk, notes)
        except PenstockError:
            assert call < 4, "only the opening may fail as a whole"
        disk.plan = None
        why = f"call {call} {kind.name}"
        after = disk.crash(Survival.NOTHING)
        # A removal that reported an error may have happened, and a failed write may exist.
        recovered(after, notes, why)
        store = opened(after)
        for seq in notes.tried - notes.removing - {info.seq for info in store.infos()}:
            store.write(sealed_of(*[batch(*values) for values in segment(seq)], first_seq=2 * seq), seq)
        assert notes.tried - notes.removing <= {info.seq for info in store.infos()}, why


@pytest.mark.parametrize("kind", FAILURES)
def test_a_write_that_failed_anywhere_can_be_repeated_with_the_same_number(kind: DiskFault) -> None:
    for call in range(40):
        disk = FakeDisk(clock=ManualClock())
        store = opened(disk)
        sealed = sealed_of(batch(1, 0), batch(1, 1), first_seq=2)
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
        try:
            store.write(sealed, 1)
            done = True
        except PenstockError:
            assert store.infos() == [], f"call {call}: a failed segment does not count"
            done = False
        disk.plan = None
        if not done:
            store.write(sealed, 1)
        for survival in (Survival.NOTHING, Survival.EVERYTHING):
            after = opened(disk.crash(survival))
            assert [info.seq for info in after.infos()] == [1]
            assert after.damage == []
            assert after.read(1, 1).equals(batch(1, 1))
        if done and call > 20:
            return


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_anywhere_in_recovery_leads_to_the_same_state(kind: DiskFault) -> None:
    """There are two complete segments, one uncommitted, one damaged, one without data, and staged files."""

    def scene() -> FakeDisk:
        disk = FakeDisk(clock=ManualClock())
        store = opened(disk)
        for seq in range(1, 6):
            store.write(sealed_of(*[batch(*values) for values in segment(seq)], first_seq=2 * seq), seq)
        disk.unlink(f"{SEGMENTS}/seg-0000000000000002.meta.json")
        disk.truncate(f"{SEGMENTS}/seg-0000000000000003.arrow", 64)
        disk.unlink(f"{SEGMENTS}/seg-0000000000000004.arrow")
        for name in ("seg-0000000000000006.arrow.tmp", "seg-0000000000000006.meta.json.tmp"):
            file = disk.create(f"{SEGMENTS}/{name}")
            file.write([b"half"])
            file.datasync()
        disk.sync_dir(SEGMENTS)
        return disk

    whole = scene()
    calls = len(whole.calls)
    opened(whole)
    for call in range(len(whole.calls) - calls):
        for survival, seed in [(Survival.NOTHING, 0), (Survival.EVERYTHING, 0)] + [
            (Survival.RANDOM, seed) for seed in SEEDS
        ]:
            disk = scene()
            disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
            with contextlib.suppress(PowerCut):
                opened(disk)
            after = disk.crash(survival, random.Random(seed))
            store = opened(after)
            why = f"call {call} {survival.name} seed {seed}"
            assert [info.seq for info in store.infos()] == [1, 5], why
            assert [name for name, _ in after.list_files(SEGMENTS)] == [
                "seg-0000000000000001.arrow",
                "seg-0000000000000001.meta.json",
                "seg-0000000000000005.arrow",
                "seg-0000000000000005.meta.json",
            ], why
            for seq in (1, 5):
                assert store.read(seq, 0).equals(batch(seq, 0)), why


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_during_a_quarantine_never_makes_the_segment_count_again(kind: DiskFault) -> None:
    for call in range(12):
        for survival in (Survival.NOTHING, Survival.EVERYTHING):
            disk = FakeDisk(clock=ManualClock())
            store = opened(disk)
            store.write(sealed_of(batch(1)), 1)
            store.write(sealed_of(batch(2)), 2)
            disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
            with contextlib.suppress(PowerCut):
                store.quarantine(1, "damaged")
            after = disk.crash(survival)
            again = opened(after)
            assert {info.seq for info in again.infos()} in ({1, 2}, {2})
            assert again.read(2, 0).equals(batch(2))
            kept = [name for name, _ in (*after.list_files(SEGMENTS), *after.list_files(QUARANTINE))]
            assert any(name.startswith("seg-0000000000000001") and name.endswith(".arrow") for name in kept)
