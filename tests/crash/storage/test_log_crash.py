"""A fault at every file call of the append log, and a power cut at every instant.

The writer below appends alone and in groups, with and without a sync, lets the log rotate, marks, prepares
and drops, and records the answers. Whatever fails and whenever the power goes, afterwards the log holds
what the notes ask for, nothing that they forbid, and keeps working.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, TINY, bodies, frame

from penstock.errors import PenstockError
from penstock.storage import AppendLog, Entry, LogScan, commit_entries, scan
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

SEEDS = range(6)
FAULTS = [fault for fault in DiskFault if fault not in (DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER)]
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]


@dataclass
class Notes:
    """The answer that the writer got for each record, by its number."""

    attempted: int = 0
    delivered: list[int] = field(default_factory=list)
    durable: int = 0
    """How many of the delivered ones survive a power cut."""
    dropped: int = 0
    """How many of the delivered ones may be gone because their files were dropped."""

    def check(self, found: LogScan, *, power_cut: bool) -> None:
        numbers = [int(body.split()[0]) for body in bodies(found)]
        assert [body for body in bodies(found) if body != record(int(body.split()[0]))] == []
        assert numbers == sorted(set(numbers)), "in order, each once"
        assert set(numbers) <= set(range(self.attempted))
        there = [number for number in numbers if number in self.delivered]
        first = self.delivered.index(there[0]) if there else 0
        assert there == self.delivered[first : first + len(there)], "what was delivered has no holes"
        needed = self.delivered[self.dropped : self.durable if power_cut else None]
        assert set(needed) <= set(numbers), f"lost {sorted(set(needed) - set(numbers))}"
        back = [number for number in numbers if number not in self.delivered]
        last = self.delivered[-1] if self.delivered else -1
        assert [number for number in back if number < last] == [], "a failed record came back"
        assert found.damage == []


def record(number: int) -> bytes:
    return b"%d " % number + b"x" * (number * 37 % 101)


class Writer:
    """Writes numbered records and keeps the notes."""

    def __init__(self, disk: FakeDisk, notes: Notes) -> None:
        self.notes = notes
        self.log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=640)
        self._positions: dict[int, int] = {}

    def write(self, *syncs: bool) -> None:
        """One commit of as many records as there are flags."""
        entries: list[Entry] = []
        for sync in syncs:
            data = frame(record(self.notes.attempted))
            entries.append(Entry([data[:7], data[7:]], len(data), 1, sync, context=self.notes.attempted))
            self.notes.attempted += 1
        commit_entries(self.log, entries)
        for entry in entries:
            if entry.error is None:
                assert entry.position is not None
                assert isinstance(entry.context, int)
                self.notes.delivered.append(entry.context)
                self._positions[entry.context] = entry.position.file
                view = self.log.view(entry.position.file)
                assert bytes(view[entry.position.offset :][: entry.byte_count]) == b"".join(entry.buffers)
        self._settle()

    def do(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(PenstockError):
            call()
        self._settle()

    def drop(self) -> None:
        """As after a checkpoint: what the older files hold is kept elsewhere."""
        self.do(self.log.sync)
        if self.log.is_durable:
            keep = self.log.end.file
            self.notes.dropped = sum(self._positions[number] < keep for number in self.notes.delivered)
            self.do(lambda: self.log.drop_before(keep))

    def _settle(self) -> None:
        if self.log.is_durable:
            self.notes.durable = len(self.notes.delivered)


def work(disk: FakeDisk, notes: Notes) -> None:
    try:
        writer = Writer(disk, notes)
    except PenstockError:
        return
    writer.write(True)
    writer.write(False)
    writer.write(False, False)
    writer.do(writer.log.sync)
    writer.do(writer.log.mark)
    writer.write(True, False, True)
    writer.do(writer.log.prepare_next)
    for n in range(5):
        writer.write(n % 2 == 0, False)
    writer.do(writer.log.rotate)
    writer.write(False)
    writer.drop()
    writer.write(False)
    writer.write(True)
    writer.do(writer.log.mark)
    disk.plan = None
    writer.write(True)
    assert notes.delivered[-1] == notes.attempted - 1, "when the faults stop, the log continues"
    assert notes.durable == len(notes.delivered)
    writer.log.close()


def cuts(disk: FakeDisk) -> Iterator[tuple[str, FakeDisk, bool]]:
    yield "nothing survived", disk.crash(Survival.NOTHING), True
    yield "only the process died", disk.crash(Survival.EVERYTHING), False
    for seed in SEEDS:
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed)), True


def verify(disk: FakeDisk, notes: Notes, why: str, *, power_cut: bool) -> None:
    __tracebackhide__ = False
    try:
        found = scan(disk, DIRECTORY, TINY)
        notes.check(found, power_cut=power_cut)
        first = bodies(found)
        for n in range(2):
            log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=640)
            data = frame(b"alive %d" % n)
            log.append([data], len(data), 1, sync=True)
            log.close()
        again = scan(disk, DIRECTORY, TINY)
        assert bodies(again) == [*first, b"alive 0", b"alive 1"]
        assert again.damage == []
        assert again.strays == []
    except AssertionError as error:
        raise AssertionError(f"{why}: {error}") from error


def calls_of(run: Callable[[FakeDisk, Notes], None]) -> int:
    disk = FakeDisk(clock=ManualClock())
    notes = Notes()
    run(disk, notes)
    assert notes.delivered == list(range(notes.attempted))
    return len(disk.calls)


def run_with(plan: PlannedFault | None) -> tuple[FakeDisk, Notes]:
    disk, notes = FakeDisk(plan=plan, clock=ManualClock()), Notes()
    with contextlib.suppress(PowerCut):
        work(disk, notes)
    return disk, notes


def test_without_a_fault_everything_is_there() -> None:
    disk, notes = run_with(None)
    assert notes.attempted > 15
    assert notes.durable == notes.attempted
    for why, after, power_cut in cuts(disk):
        verify(after, notes, why, power_cut=power_cut)


@pytest.mark.parametrize("kind", CRASHES, ids=lambda kind: kind.name.lower())
def test_a_crash_at_every_call_loses_nothing_durable_and_invents_nothing(kind: DiskFault) -> None:
    for call in range(calls_of(work)):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        for why, after, power_cut in cuts(disk):
            verify(after, notes, f"{kind.name} at call {call} ({disk.calls[-1]}), {why}", power_cut=power_cut)


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name.lower())
def test_a_fault_at_every_call_fails_what_it_hits_and_nothing_comes_back(kind: DiskFault) -> None:
    for call in range(calls_of(work)):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        for why, after, power_cut in cuts(disk):
            verify(
                after, notes, f"{kind.name} at call {call} ({disk.calls[call]}), {why}", power_cut=power_cut
            )


@pytest.mark.parametrize("kind", CRASHES, ids=lambda kind: kind.name.lower())
def test_a_crash_at_every_call_of_the_repair_loses_nothing(kind: DiskFault) -> None:
    """The write at `broken` fails, and the power goes at some call after it."""
    broken = [n for n, name in enumerate(run_with(None)[0].calls) if name in ("write_at", "datasync")][3:12:4]
    for first, later in itertools.product(broken, range(1, 24)):
        disk, notes = FakeDisk(clock=ManualClock()), Notes()
        disk.plan = PlannedFault(call=first, kind=DiskFault.FAIL_ONCE)
        second = PlannedFault(call=first + later, kind=kind)
        with contextlib.suppress(PowerCut):
            _switching(disk, first, second)
            work(disk, notes)
        for why, after, power_cut in cuts(disk):
            verify(after, notes, f"{first} failed, {kind.name} {later} later, {why}", power_cut=power_cut)


def _switching(disk: FakeDisk, first: int, second: PlannedFault) -> None:
    """Plan the second fault as soon as the first has struck."""
    inject = disk._inject

    def watched(plan: PlannedFault, number: int, name: str, path: str) -> None:
        if number == first:
            disk.plan = second
        inject(plan, number, name, path)

    disk._inject = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [*CRASHES, *FAULTS], ids=lambda kind: kind.name.lower())
def test_a_fault_at_every_call_of_the_recovery_changes_nothing(kind: DiskFault) -> None:
    """Crash while it was working; then open, with a fault at every call of the opening."""
    total = calls_of(work)
    for call in range(total // 8, total, total // 8):
        disk, notes = run_with(PlannedFault(call=call, kind=DiskFault.CRASH_BEFORE))
        for seed in (0, 1):
            for step in itertools.count():
                after = disk.crash(Survival.RANDOM, random.Random(seed))
                before = bodies(scan(after, DIRECTORY, TINY))
                after.calls.clear()
                after.plan = PlannedFault(call=step, kind=kind)
                with contextlib.suppress(PowerCut, PenstockError):
                    AppendLog.open(after, DIRECTORY, TINY, file_bytes=640)
                if len(after.calls) <= step:
                    break
                for survival in Survival:
                    again = after.crash(survival, random.Random(step))
                    assert bodies(scan(again, DIRECTORY, TINY)) == before, f"{call}, {step}, {survival.name}"
                    verify(again, notes, f"{call}, {kind.name} at {step}, {survival.name}", power_cut=True)


@pytest.mark.parametrize("part", range(4))
def test_random_work_under_random_faults_loses_and_invents_nothing(part: int) -> None:
    for seed in range(part * 60, part * 60 + 60):
        rng = random.Random(seed)
        disk, notes = FakeDisk(clock=ManualClock()), Notes()
        with contextlib.suppress(PowerCut):
            _random_work(disk, notes, rng)
        for why, after, power_cut in itertools.islice(cuts(disk), 4):
            verify(after, notes, f"work {seed}, {why}", power_cut=power_cut)


def _random_work(disk: FakeDisk, notes: Notes, rng: random.Random) -> None:
    writer = Writer(disk, notes)
    calls = [writer.log.sync, writer.log.mark, writer.log.rotate, writer.log.prepare_next, writer.drop]
    for _ in range(rng.randrange(5, 60)):
        if rng.random() < 0.15:
            ahead = len(disk.calls) + rng.randrange(4)
            disk.plan = rng.choice([None, PlannedFault(call=ahead, kind=rng.choice(list(DiskFault)))])
        if rng.random() < 0.75:
            writer.write(*(rng.random() < 0.4 for _ in range(rng.choice((1, 1, 2, 5, 12)))))
        else:
            writer.do(rng.choice(calls))
