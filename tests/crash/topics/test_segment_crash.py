"""A fault at every file call of segments and tiers, and a power cut at every instant.

The keeper below takes segments through their whole life, from the first record to the cold tier and to their
removal, and publishes what counts as a snapshot after each step. Whatever fails and whenever the power goes,
afterwards the newest snapshot leads to exactly the records it speaks of, and everything else goes away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.unit.topics.segments.segment_doubles import TOPIC, Written, built_of, read_back, some_records

from penstock.errors import PenstockError
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.topics.checkpoints.snapshot import Snapshot, TopicEntry, load_latest, write_snapshot
from penstock.topics.segments.format import SegmentEntry
from penstock.topics.segments.store import LocalSegmentRoot
from penstock.topics.segments.tiering import Tiers, TopicTier

pytestmark = pytest.mark.crash

HOT, COLD, META = "/data", "/cold", "/data/meta"


def record_of(seq: int) -> Written:
    return some_records(1, start=seq)[0]


def snapshot_of(entries: list[SegmentEntry]) -> Snapshot:
    topic = TopicEntry(
        name="clicks",
        id=TOPIC,
        epoch=1,
        config=b"{}",
        head_seq=0,
        cap_floor=0,
        ttl_floor=0,
        trim_floor=0,
        delete_below=0,
        reserved_head=0,
        last_write_ms=None,
        checkpointed_seq=0,
        segments=tuple(entries),
    )
    return Snapshot(next_topic_id=TOPIC + 1, created_ms=0, wal={}, topics=(topic,))


def tiers_of(disk: FakeDisk) -> Tiers:
    return Tiers(LocalSegmentRoot(disk, HOT), LocalSegmentRoot(disk, COLD))


@dataclass
class Keeper:
    """Does what an engine does with the segments of a topic, and records the answers."""

    disk: FakeDisk
    entries: dict[int, SegmentEntry] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    """Everything that anybody ever asked to delete."""
    kept: dict[int, set[int]] = field(default_factory=dict)
    """By segment: the deletions its entry speaks for."""
    published: dict[int, tuple[list[SegmentEntry], frozenset[int]]] = field(default_factory=dict)
    """By number of the snapshot: the segments it names and the records that must be gone then."""
    told: int = 0
    """The newest snapshot that is known to be durable."""
    number: int = 0

    @property
    def tier(self) -> TopicTier:
        return tiers_of(self.disk).topic(TOPIC)

    def attempt(self, step: Callable[[], SegmentEntry]) -> bool:
        try:
            entry = step()
        except PenstockError:
            return False
        self.entries[entry.first_seq] = entry
        return True

    def publish(self) -> bool:
        self.number += 1
        gone = frozenset(seq for first_seq in self.entries for seq in self.kept.get(first_seq, ()))
        self.published[self.number] = [*self.entries.values()], gone
        previous = self.told or None
        try:
            snapshot = snapshot_of([*self.entries.values()])
            write_snapshot(self.disk, META, self.number, snapshot, previous=previous)
        except PenstockError:
            return False
        self.told = self.number
        return True

    def start(self, first_seq: int, count: int) -> bool:
        records = [record_of(seq) for seq in range(first_seq, first_seq + count)]
        return self.attempt(lambda: self.tier.start(built_of(records, first_seq), created_ms=1))

    def append(self, first_seq: int, count: int) -> bool:
        if (entry := self.entries.get(first_seq)) is None:
            return False
        records = [record_of(seq) for seq in range(entry.end_seq, entry.end_seq + count)]
        return self.attempt(
            lambda: self.tier.append(entry, built_of(records, entry.end_seq, entry.data_bytes))
        )

    def delete_records(self, first_seq: int, *seqs: int) -> bool:
        if (entry := self.entries.get(first_seq)) is None:
            return False
        wanted = {seq for seq in seqs if seq < entry.end_seq} | self.kept.get(first_seq, set())
        self.deleted |= wanted
        rows = np.isin(np.arange(entry.first_seq, entry.end_seq), list(wanted))
        if not self.attempt(lambda: self.tier.write_deleted(entry, rows)):
            return False
        self.kept[first_seq] = wanted
        return True

    def seal(self, first_seq: int) -> bool:
        entry = self.entries.get(first_seq)
        return entry is not None and self.attempt(lambda: self.tier.seal(entry))

    def move(self, first_seq: int) -> None:
        entry = self.entries.get(first_seq)
        if entry is None or not entry.sealed or not self.attempt(lambda: self.tier.relocate(entry)):
            return
        if self.publish():
            self.attempt(lambda: self._dropped(self.entries[first_seq]))
        else:
            self.entries[first_seq] = entry  # not known to be cold: it stays what it was

    def _dropped(self, entry: SegmentEntry) -> SegmentEntry:
        self.tier.drop_hot(entry)
        return entry

    def remove(self, first_seq: int) -> None:
        entry = self.entries.pop(first_seq, None)
        if entry is None:
            return
        if self.publish():
            try:
                self.tier.delete(first_seq)
            except PenstockError:
                pass
        else:
            self.entries[first_seq] = entry

    def work(self) -> None:
        self.start(1, 3)
        self.publish()
        self.append(1, 2)
        self.publish()
        self.append(1, 4)
        if self.entries:  # what was appended but not published may be appended again
            entries, _ = self.published[self.number]
            self.entries.update({entry.first_seq: entry for entry in entries})
            self.append(1, 1)
        self.publish()
        self.delete_records(1, 2)
        self.publish()
        self.seal(1)
        self.start(101, 2)
        self.publish()
        self.move(1)
        self.delete_records(1, 3)
        self.publish()
        self.append(101, 1)
        self.seal(101)
        self.start(201, 2)
        self.publish()
        self.remove(101)
        self.remove(1)


def verify(disk: FakeDisk, keeper: Keeper, why: str) -> None:
    loaded = load_latest(disk, META)
    assert keeper.told <= loaded.number <= keeper.number, f"{why}: snapshot {loaded.number}"
    entries, gone = keeper.published.get(loaded.number, ([], frozenset()))
    found = [] if loaded.snapshot is None else [*loaded.snapshot.topics[0].segments]
    assert found == entries, why
    for attempt in ("first", "second"):
        check_records(disk, keeper, entries, gone, f"{why}, {attempt} time")
        tiers = tiers_of(disk)
        done = tiers.tidy({TOPIC: entries}, tiers.stored())
        assert done.failed == [], why
    left = LocalSegmentRoot(disk, HOT).scan()
    assert left.strays == []
    named = {entry.first_seq for entry in entries}
    assert set(left.topics[TOPIC]) == named, why
    assert set(LocalSegmentRoot(disk, COLD).topic(TOPIC).list()) <= named, why
    go_on(disk, keeper, entries, gone, loaded.next_number)


def check_records(
    disk: FakeDisk, keeper: Keeper, entries: list[SegmentEntry], gone: frozenset[int], why: str
) -> None:
    tier = tiers_of(disk).topic(TOPIC)
    for entry in entries:
        for seq, found in enumerate(read_back(tier.load(entry)), entry.first_seq):
            if found is None:
                assert seq in keeper.deleted, f"{why}: record {seq} is gone"
            else:
                assert found == record_of(seq), f"{why}: record {seq}"
                assert seq not in gone, f"{why}: record {seq} came back"


def go_on(
    disk: FakeDisk, keeper: Keeper, entries: list[SegmentEntry], gone: frozenset[int], number: int
) -> None:
    """Whatever was left behind, the life of the segments continues."""
    after = Keeper(disk, {entry.first_seq: entry for entry in entries}, set(keeper.deleted), number=number)
    after.start(301, 2)
    for entry in entries:
        assert entry.sealed or after.append(entry.first_seq, 2)
    assert after.publish()
    check_records(disk, after, [*after.entries.values()], gone, "afterwards")
    for first_seq in [*after.entries]:
        after.remove(first_seq)
    for root in (HOT, COLD):
        assert LocalSegmentRoot(disk, root).topic(TOPIC).list() == []


def cuts(disk: FakeDisk, kind: DiskFault, call: int) -> Iterator[tuple[str, FakeDisk]]:
    """What may be left. After a fault that the keeper lived through, everything it published is durable."""
    yield "nothing survived", disk.crash(Survival.NOTHING)
    yield f"seed {call}", disk.crash(Survival.RANDOM, random.Random(call))
    if kind in (DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER):
        yield "everything survived", disk.crash(Survival.EVERYTHING)
        yield f"seed {-call}", disk.crash(Survival.RANDOM, random.Random(-call))


def keeper_with(fault: PlannedFault | None = None) -> Keeper:
    """A keeper whose directories exist and whose fault comes after that."""
    disk = FakeDisk(clock=ManualClock())
    disk.make_dirs(HOT)
    disk.make_dirs(COLD)
    if fault is not None:
        disk.plan = PlannedFault(call=len(disk.calls) + fault.call, kind=fault.kind)
    return Keeper(disk)


def quiet_run() -> Keeper:
    keeper = keeper_with()
    keeper.work()
    return keeper


WORK = quiet_run().disk.calls[len(keeper_with().disk.calls) :]
CALLS = len(WORK)


def test_the_sweep_covers_every_kind_of_call() -> None:
    keeper = quiet_run()
    assert {
        "create",
        "write",
        "datasync",
        "rename",
        "sync_dir",
        "unlink",
        "mkdir",
        "open_append",
        "read",
        "stat",
        "open_view",
        "list",
    } <= set(keeper.disk.calls)
    assert keeper.told == keeper.number >= 10
    assert keeper.entries.keys() == {201}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", DiskFault)
def test_a_fault_at_any_file_call_loses_and_invents_no_record(kind: DiskFault) -> None:
    for call in range(CALLS + 1):
        if kind is DiskFault.SHORT_WRITE and WORK[call : call + 1] != ["write"]:
            continue
        keeper = keeper_with(PlannedFault(call=call, kind=kind))
        try:
            keeper.work()
        except PowerCut:
            pass
        for why, disk in cuts(keeper.disk, kind, call):
            verify(disk, keeper, f"{kind.name} at call {call}, {why}")


def test_a_fault_that_passes_leaves_everything_usable_without_a_restart() -> None:
    for call in range(CALLS):
        keeper = keeper_with(PlannedFault(call=call, kind=DiskFault.FAIL_ONCE))
        keeper.work()
        keeper.disk.plan = None
        keeper.start(901, 1)
        assert keeper.publish(), f"call {call}"
        for entry in keeper.entries.values():
            records = read_back(keeper.tier.load(entry))
            assert all(
                found in (None, record_of(seq)) for seq, found in enumerate(records, entry.first_seq)
            ), f"call {call}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [DiskFault.CRASH_BEFORE, DiskFault.CRASH_AFTER, DiskFault.FAIL_ALWAYS])
def test_tidying_up_may_itself_be_cut_short(kind: DiskFault) -> None:
    """A crash while it was working, then another at every call of the recovery."""
    keeper = keeper_with(PlannedFault(call=CALLS - 25, kind=DiskFault.CRASH_BEFORE))
    with pytest.raises(PowerCut):
        keeper.work()
    for call in range(40):
        disk = keeper.disk.crash(Survival.RANDOM, random.Random(call))
        entries = [*load_latest(disk, META).snapshot.topics[0].segments]  # type: ignore[union-attr]
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=kind)
        try:
            tiers = tiers_of(disk)
            tiers.tidy({TOPIC: entries}, tiers.stored())
        except (PowerCut, PenstockError):
            pass
        verify(disk.crash(Survival.RANDOM, random.Random(call)), keeper, f"{kind.name} at call {call}")
