"""A fault at every file call of the write-ahead log, and a power cut at every instant.

The writer commits bundles alone and in groups, rotates the log, marks it, moves the cursor, and records every
result that it got. After any failure or power cut the log contains what the records require and nothing that
they forbid. Every bundle has its reported position or a higher one, and the log accepts new bundles.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from penstock.errors import PenstockError
from penstock.quiver.wal.entry import SlotPart, encode_entry
from penstock.quiver.wal.log import Wal
from penstock.quiver.wal.replay import FoundEntry, WalReplay, read_wal
from penstock.storage import Entry, commit_entries
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

pytestmark = pytest.mark.crash

DIRECTORY = "/data/core_0/wal"
FILE_BYTES = 900
SEEDS = range(5)
CRASHES = [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER]
FAULTS = [fault for fault in DiskFault if fault not in CRASHES]


@dataclass
class Notes:
    """The results that the writer got for each bundle, by its number. Numbers start at 1."""

    attempted: int = 0
    delivered: dict[int, int] = field(default_factory=dict)
    """The position of each bundle."""
    durable: int = 0
    cursor: int = 0

    def check(self, replay: WalReplay, *, power_cut: bool) -> list[int]:
        entries = list(replay.entries())
        numbers = [found.entry.wal_seq for found in entries]
        assert all(found.entry.ingest_ns == found.entry.wal_seq * 1000 for found in entries)
        assert numbers == sorted(set(numbers)), "in order, each once"
        assert set(numbers) <= set(range(1, self.attempted + 1))
        delivered = list(self.delivered)
        kept = delivered[: self.durable] if power_cut else delivered
        needed = [number for number in kept if self.delivered[number] >= self.cursor]
        assert set(needed) <= set(numbers), f"lost {sorted(set(needed) - set(numbers))}"
        last = delivered[-1] if delivered else 0
        back = [number for number in numbers if number not in self.delivered and number < last]
        assert back == [], f"failed bundles reappeared: {back}"
        for found in entries:
            self._check_position(found)
        assert replay.damage == []
        return numbers

    def _check_position(self, found: FoundEntry) -> None:
        delivered = self.delivered.get(found.entry.wal_seq, found.start)
        assert found.start >= delivered, "a position must not be below the reported one"


def part(number: int) -> SlotPart:
    payload = b"%d " % number + b"x" * (number * 37 % 101)
    return SlotPart(slot=50, fingerprint=bytes(32), rows=1, payload=[payload], byte_count=len(payload))


class Writer:
    def __init__(self, disk: FakeDisk, notes: Notes) -> None:
        self.notes = notes
        self.wal = Wal.open(disk, DIRECTORY, read_wal(disk, DIRECTORY), rotation_bytes=FILE_BYTES)

    def write(self, *syncs: bool) -> None:
        entries: list[Entry] = []
        for sync in syncs:
            self.notes.attempted += 1
            number = self.notes.attempted
            buffers, byte_count = encode_entry(number * 1000, number, [part(number)])
            entries.append(Entry(buffers, byte_count, 1, sync, context=number))
        commit_entries(self.wal.log, entries)
        for entry in entries:
            if entry.error is None:
                assert entry.position is not None
                assert isinstance(entry.context, int)
                self.notes.delivered[entry.context] = self.wal.position(entry.position)
        self.settle()

    def do(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(PenstockError):
            call()
        self.settle()

    def advance(self, number: int) -> None:
        """Advance as after a commit of a segment that has everything before this bundle."""
        if number in self.notes.delivered:
            position = self.notes.delivered[number]
            self.notes.cursor = max(self.notes.cursor, position)
            self.do(lambda: self.wal.advance(position))

    def settle(self) -> None:
        if self.wal.log.is_durable:
            self.notes.durable = len(self.notes.delivered)


def work(disk: FakeDisk, notes: Notes) -> None:
    try:
        writer = Writer(disk, notes)
    except PenstockError:
        return
    log = writer.wal.log
    writer.write(True)
    writer.write(False)
    writer.write(False, False)
    writer.do(log.sync)
    writer.do(log.mark)
    writer.advance(2)
    writer.write(True, False, True)
    writer.do(log.prepare_next)
    for n in range(6):
        writer.write(n % 2 == 0, False)
    writer.advance(9)
    writer.do(log.rotate)
    writer.write(False)
    writer.do(log.sync)
    if log.is_durable:
        writer.advance(18)
    writer.write(False)
    writer.write(True)
    disk.plan = None
    writer.write(True)
    assert notes.attempted in notes.delivered, "when the faults stop, the log accepts bundles again"
    assert notes.durable == len(notes.delivered)
    writer.wal.close()


def cuts(disk: FakeDisk) -> Iterator[tuple[str, FakeDisk, bool]]:
    yield "nothing survived", disk.crash(Survival.NOTHING), True
    yield "only the process died", disk.crash(Survival.EVERYTHING), False
    for seed in SEEDS:
        yield f"seed {seed}", disk.crash(Survival.RANDOM, random.Random(seed)), True


def verify(disk: FakeDisk, notes: Notes, why: str, *, power_cut: bool) -> None:
    try:
        numbers = notes.check(read_wal(disk, DIRECTORY), power_cut=power_cut)
        for extra in (1001, 1002):
            replay = read_wal(disk, DIRECTORY)
            wal = Wal.open(disk, DIRECTORY, replay, rotation_bytes=FILE_BYTES)
            buffers, byte_count = encode_entry(0, extra, [part(extra)])
            place = wal.log.append(buffers, byte_count, 1, sync=True)
            assert wal.position(place) >= replay.end
            wal.close()
            numbers.append(extra)
        again = read_wal(disk, DIRECTORY)
        assert [found.entry.wal_seq for found in again.entries()] == numbers
        assert again.damage == []
        names = [name for name, _ in disk.list_files(DIRECTORY)]
        assert all(name.startswith("quiver.wal") for name in names), names
    except AssertionError as error:
        raise AssertionError(f"{why}: {error}") from error


def run_with(plan: PlannedFault | None) -> tuple[FakeDisk, Notes]:
    disk, notes = FakeDisk(plan=plan, clock=ManualClock()), Notes()
    with contextlib.suppress(PowerCut):
        work(disk, notes)
    return disk, notes


def call_count() -> int:
    return len(run_with(None)[0].calls)


def test_without_a_fault_everything_is_there() -> None:
    disk, notes = run_with(None)
    assert len(notes.delivered) == notes.attempted > 15
    for why, after, power_cut in cuts(disk):
        verify(after, notes, why, power_cut=power_cut)


@pytest.mark.parametrize("kind", CRASHES, ids=lambda kind: kind.name.lower())
def test_a_crash_at_every_call_loses_nothing_durable_and_invents_nothing(kind: DiskFault) -> None:
    for call in range(call_count()):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        for why, after, power_cut in cuts(disk):
            verify(after, notes, f"{kind.name} at call {call} ({disk.calls[-1]}), {why}", power_cut=power_cut)


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name.lower())
def test_a_fault_at_every_call_fails_what_it_hits_and_nothing_comes_back(kind: DiskFault) -> None:
    for call in range(call_count()):
        disk, notes = run_with(PlannedFault(call=call, kind=kind))
        for why, after, power_cut in cuts(disk):
            where = f"{kind.name} at call {call} ({disk.calls[call]}), {why}"
            verify(after, notes, where, power_cut=power_cut)


@pytest.mark.parametrize("kind", [*CRASHES, *FAULTS], ids=lambda kind: kind.name.lower())
def test_a_fault_at_every_call_of_the_opening_changes_nothing(kind: DiskFault) -> None:
    total = call_count()
    for call in range(total // 6, total, total // 6):
        disk, notes = run_with(PlannedFault(call=call, kind=DiskFault.CRASH_BEFORE))
        for step in itertools.count():
            after = disk.crash(Survival.RANDOM, random.Random(step))
            before = [found.entry.wal_seq for found in read_wal(after, DIRECTORY).entries()]
            after.calls.clear()
            after.plan = PlannedFault(call=step, kind=kind)
            with contextlib.suppress(PowerCut, PenstockError):
                Wal.open(after, DIRECTORY, read_wal(after, DIRECTORY), rotation_bytes=FILE_BYTES)
            if len(after.calls) <= step:
                break
            for survival in Survival:
                again = after.crash(survival, random.Random(step))
                found = [found.entry.wal_seq for found in read_wal(again, DIRECTORY).entries()]
                assert found == before, f"{call}, {step}, {survival.name}"
                verify(again, notes, f"{call}, {kind.name} at {step}, {survival.name}", power_cut=True)


def test_a_power_cut_during_a_rotation_never_leaves_a_file_without_a_name() -> None:
    for seed in range(12):
        disk = FakeDisk(clock=ManualClock())
        writer = Writer(disk, Notes())
        writer.write(True)
        renames = [n for n, name in enumerate(disk.calls) if name == "rename"]
        rename = disk.rename

        def last_call(source: str, target: str, rename: Callable[[str, str], None] = rename) -> None:
            rename(source, target)
            if target.endswith("quiver.wal"):
                raise PowerCut

        disk.rename = last_call  # type: ignore[method-assign]
        with contextlib.suppress(PowerCut):
            writer.wal.log.rotate()
        assert len([n for n, name in enumerate(disk.calls) if name == "rename"]) == len(renames) + 2
        after = disk.crash(Survival.RANDOM, random.Random(seed))
        assert [found.entry.wal_seq for found in read_wal(after, DIRECTORY).entries()] == [1], seed


def test_a_torn_tail_is_cut_off_at_every_byte_of_the_last_entry() -> None:
    disk, notes = run_with(None)
    whole = bytes(disk.read(f"{DIRECTORY}/quiver.wal"))
    last = read_wal(disk, DIRECTORY)
    end = last.found.files[-1].end
    start = end - len(b"".join(encode_entry(0, notes.attempted, [part(notes.attempted)])[0]))
    expected = [found.entry.wal_seq for found in last.entries()][:-1]
    for cut in range(start, end):
        torn = disk.crash(Survival.EVERYTHING)
        file = torn.open_log(f"{DIRECTORY}/quiver.wal")
        file.write_durably_at(cut, [bytes(end - cut)])
        file.write_durably_at(cut, [b"\x01"] if whole[cut] != 1 else [b"\x02"])
        replay = read_wal(torn, DIRECTORY)
        assert [found.entry.wal_seq for found in replay.entries()] == expected
        assert replay.damage == []
        Wal.open(torn, DIRECTORY, replay, rotation_bytes=FILE_BYTES).close()
        again = read_wal(torn, DIRECTORY)
        assert [found.entry.wal_seq for found in again.entries()] == expected
        assert not again.found.torn
