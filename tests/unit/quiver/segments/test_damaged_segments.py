"""Damaged segments, at startup or later, are quarantined, rebuilt or given up."""

from __future__ import annotations

import pytest
from tests.unit.quiver.ack_doubles import CORE as BOOK_CORE
from tests.unit.quiver.ack_doubles import Core, segment
from tests.unit.quiver.bundles import batch, sealed_of
from tests.unit.quiver.engine_doubles import CORE, StepClock, config, open_quiver, rows, take_all

from penstock.metrics import Registry
from penstock.quiver.config import QuiverConfig
from penstock.quiver.engine import Quiver
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.segments.metadata import arrow_name, meta_name
from penstock.quiver.segments.recovery import DamageAction
from penstock.quiver.segments.source import LocalSegments
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.tools.fsck import check, repair
from penstock.quiver.tools.offline import drop_subscriber, read_history
from penstock.testing.disk import FakeDisk, Survival

pytestmark = pytest.mark.unit

CAREFUL: QuiverConfig = config(segment={"verify_on_open": "full"})


def flip(disk: FakeDisk, path: str, offset: int = 900) -> None:
    data = bytearray(disk.read(path))
    data[offset] ^= 0x10
    disk.unlink(path)
    file = disk.create(path)
    file.write([bytes(data)])
    file.datasync()
    disk.sync_dir(path.rpartition("/")[0])


def data_of(seq: int) -> str:
    return f"{CORE}/segments/{arrow_name(seq)}"


def two_segments(*, keep_log: bool) -> tuple[FakeDisk, StepClock]:
    """Create a directory with two segments of two bundles that no subscriber has resolved."""
    disk, clock = FakeDisk(), StepClock()
    quiver = open_quiver(disk, clock, config(wal={"rotation_target": 30_000}))
    quiver.register("lake")
    for first in (0, 100):
        quiver.ingest(rows(first, 20))
        quiver.ingest(rows(first + 50, 20))
        quiver.flush()
    if not keep_log:
        quiver.core.appender.rotate()
        quiver.core.flusher.cut_log()
    quiver.close()
    return disk.crash(Survival.NOTHING), clock


def firsts(quiver: Quiver) -> list[int]:
    return [numbers[0] for _, numbers in take_all(quiver, "lake")]


def whats(disk: FakeDisk, seq: int) -> list[str]:
    return [event.what for event in read_history(disk, CORE) if event.segment_seq == seq]


@pytest.mark.parametrize("seq", [1, 2])
def test_a_damaged_segment_is_rebuilt_from_the_log(seq: int) -> None:
    disk, clock = two_segments(keep_log=True)
    flip(disk, data_of(seq))
    registry = Registry()
    quiver = open_quiver(disk, clock, CAREFUL, registry)
    assert [info.seq for info in quiver.core.store.infos()] == [1, 2]
    assert firsts(quiver) == [0, 50, 100, 150]
    assert whats(disk, seq) == []
    assert registry.value("quiver.loss.segments", reason="corrupt", signal="other") == 0
    assert quiver.stats().damage[-1].startswith(f"segment {seq} is rebuilt")
    quiver.flush()
    assert firsts(quiver) == [0, 50, 100, 150]


def test_acks_stay_valid_for_a_rebuilt_segment() -> None:
    disk, clock = two_segments(keep_log=True)
    quiver = open_quiver(disk, clock)
    quiver.activate("lake")
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    assert bundle.ack()
    quiver.core.offsets.sync()
    after = disk.crash(Survival.NOTHING)
    flip(after, data_of(1))
    assert firsts(open_quiver(after, clock, CAREFUL)) == [50, 100, 150]


def test_a_segment_that_every_subscriber_has_resolved_is_not_rebuilt() -> None:
    disk, clock = two_segments(keep_log=True)
    quiver = open_quiver(disk, clock)
    quiver.ack_segment("lake", 1)
    quiver.core.offsets.sync()
    after = disk.crash(Survival.NOTHING)
    flip(after, data_of(1))
    again = open_quiver(after, clock, CAREFUL)
    assert [info.seq for info in again.core.store.infos()] == [2]
    assert firsts(again) == [100, 150]


@pytest.mark.parametrize("seq", [1, 2])
def test_without_the_log_a_damaged_segment_is_dropped_as_corrupt(seq: int) -> None:
    disk, clock = two_segments(keep_log=False)
    flip(disk, data_of(seq))
    registry = Registry()
    quiver = open_quiver(disk, clock, CAREFUL, registry)
    assert firsts(quiver) == [[100, 150], [0, 50]][seq - 1]
    assert registry.value("quiver.loss.segments", reason="corrupt", signal="other") == 1
    assert registry.value("quiver.loss.bundles", reason="corrupt", signal="other") == 2
    assert whats(disk, seq) == ["dropped", "corrupt"]
    assert quiver.subscribers()[0].dropped == 2
    quiver.close()
    again = open_quiver(disk.crash(Survival.NOTHING), clock, CAREFUL, registry)
    assert registry.value("quiver.loss.segments", reason="corrupt", signal="other") == 1
    again.ingest(rows(900))
    again.flush()
    assert [info.seq for info in again.core.store.infos()][-1] == 3


def test_a_crash_after_a_quarantine_does_not_change_the_outcome_of_recovery() -> None:
    disk, clock = two_segments(keep_log=False)
    flip(disk, data_of(2))
    SegmentStore.open(disk, f"{CORE}/segments", f"{CORE}/quarantine", verify="full")
    registry = Registry()
    assert firsts(open_quiver(disk.crash(Survival.NOTHING), clock, CAREFUL, registry)) == [0, 50]
    assert registry.value("quiver.loss.bundles", reason="corrupt", signal="other") == 2


def test_a_crash_after_a_quarantine_does_not_prevent_a_rebuild() -> None:
    disk, clock = two_segments(keep_log=True)
    flip(disk, data_of(1))
    SegmentStore.open(disk, f"{CORE}/segments", f"{CORE}/quarantine", verify="full")
    again = open_quiver(disk.crash(Survival.NOTHING), clock, CAREFUL)
    assert firsts(again) == [0, 50, 100, 150]


def test_a_segment_that_is_found_damaged_is_rebuilt_while_the_log_has_it() -> None:
    disk, clock = two_segments(keep_log=True)
    flip(disk, data_of(1))
    quiver = open_quiver(disk, clock)
    assert sorted(firsts(quiver)) == [0, 50, 100, 150]


def test_missing_segments_count_as_lost() -> None:
    disk, clock = two_segments(keep_log=False)
    for name in (arrow_name(1), meta_name(1)):
        disk.unlink(f"{CORE}/segments/{name}")
    disk.sync_dir(f"{CORE}/segments")
    registry = Registry()
    assert firsts(open_quiver(disk, clock, registry=registry)) == [100, 150]
    assert registry.value("quiver.loss.segments", reason="missing", signal="unknown") == 1
    assert whats(disk, 1) == ["dropped", "missing"]


def test_unreadable_data_without_a_sidecar_is_kept_as_evidence() -> None:
    disk = FakeDisk()
    store = SegmentStore.open(disk, "/q/segments", "/q/quarantine")
    store.write(sealed_of(batch(1, 2)), 1)
    disk.unlink(f"/q/segments/{meta_name(1)}")
    flip(disk, f"/q/segments/{arrow_name(1)}", -1)
    again = SegmentStore.open(disk, "/q/segments", "/q/quarantine")
    assert [name for name, _ in disk.list_files("/q/quarantine")] == [arrow_name(1)]
    assert [each.action for each in again.damage] == [DamageAction.QUARANTINED]
    assert again.quarantined == {}, "the data was never committed"
    assert again.highest_seq == 1


def test_dropping_a_subscriber_manually_loses_nothing_for_the_others() -> None:
    disk, clock = two_segments(keep_log=False)
    quiver = open_quiver(disk, clock)
    quiver.register("old")
    quiver.close()
    after = disk.crash(Survival.NOTHING)
    flip(after, f"{CORE}/segments/{meta_name(1)}", 20)
    drop_subscriber(after, CORE, "old")
    again = open_quiver(after, clock)
    assert [each.name for each in again.subscribers()] == ["lake"]
    assert firsts(again) == [0, 50, 100, 150], "its sidecar was rebuilt"


def test_an_orphan_stays_an_orphan_when_only_the_log_has_it() -> None:
    core = Core().open()
    core.subscribe("lake")
    core.offsets.orphans([])
    core.offsets.checkpoint()
    core.offsets.checkpoint()
    core.offsets.sync()
    for name in ("checkpoint", "checkpoint.1"):
        core.disk.unlink(f"{BOOK_CORE}/meta/{name}")
    core.disk.sync_dir(f"{BOOK_CORE}/meta")
    again = core.crashed(core.disk)
    later_ns = (again.clock.now_ms() + 1) * 1_000_000
    ((name, since_ns),) = again.offsets.orphaned()
    assert name == "lake"
    assert 0 < since_ns < later_ns


def test_offsets_distinguish_corrupt_from_missing_and_never_written() -> None:
    core = Core(infos=[segment(2)]).open()
    core.subscribe("lake")
    core.offsets.sync()
    core.add(3)
    core.add(4)
    core.add(5)
    core.offsets.checkpoint()
    again = SubscriptionStore(core.disk, BOOK_CORE, None, core.clock)
    found = again.reconcile([segment(2), segment(5)], quarantined={4: segment(4), 6: None}, highest_seq=7)
    assert found.missing == ((3, 3),)
    assert [one.info and one.info.seq for one in found.corrupt] == [4, None]
    again.sync()
    history = {event.segment_seq: event.what for event in read_history(core.disk, BOOK_CORE)}
    assert history == history | {3: "missing", 4: "corrupt", 6: "corrupt", 7: "never_written"}


def test_a_repair_also_rebuilds_a_segment() -> None:
    disk, clock = two_segments(keep_log=True)
    flip(disk, data_of(1))
    done = repair(disk, CORE, clock)
    assert any(text.startswith("segment 1 is rebuilt") for text in done)
    assert firsts(open_quiver(disk, clock)) == [0, 50, 100, 150]


def test_a_repair_records_unrecoverable_segments_as_dropped() -> None:
    disk, clock = two_segments(keep_log=False)
    flip(disk, data_of(2))
    assert "1 damaged segments are recorded as dropped" in repair(disk, CORE, clock)
    assert whats(disk, 2) == ["dropped", "corrupt"]
    assert firsts(open_quiver(disk, clock)) == [0, 50]


@pytest.mark.parametrize("settings", [config(), CAREFUL], ids=["read later", "read at the start"])
def test_a_segment_with_a_bad_sector_is_quarantined_and_all_other_data_is_delivered(
    settings: QuiverConfig,
) -> None:
    disk, clock = two_segments(keep_log=False)
    disk.spoil(data_of(1), 512, 1024)
    quiver = open_quiver(disk, clock, settings)
    quiver.activate("lake")
    assert firsts(quiver) == [100, 150]
    (damage,) = quiver.core.store.damage
    assert (damage.seq, damage.action) == (1, DamageAction.QUARANTINED)
    assert "bytes 512 to" in damage.reason
    damage = quiver.stats().damage[-1]
    assert damage.startswith("segment 1 ")
    assert "cannot read" in damage
    assert f"quarantine/{arrow_name(1)}" in [name for name, _ in disk.list_files(CORE)]
    quiver.close()


def test_fsck_reports_a_bad_sector_and_repair_quarantines_the_segment() -> None:
    disk, clock = two_segments(keep_log=False)
    disk.spoil(data_of(1), 512, 1024)
    damaged, awaited = check(disk, 0, CORE).problems
    assert arrow_name(1) in damaged.subject
    assert "cannot read" in damaged.text
    assert awaited.subject == "segment 1"
    assert any("segment 1 is quarantined" in text for text in repair(disk, CORE, clock))
    assert f"quarantine/{arrow_name(1)}" in [name for name, _ in disk.list_files(CORE)]


def test_fsck_continues_after_an_unreadable_sidecar_log_and_acknowledgements() -> None:
    disk, clock = two_segments(keep_log=True)
    logs = [name for name, _ in disk.list_files(f"{CORE}/wal") if name.startswith("quiver.wal")]
    acks = [name for name, _ in disk.list_files(f"{CORE}/ack") if name.startswith("ack.log")]
    disk.spoil(f"{CORE}/wal/{logs[0]}", 5000, 5001)
    disk.spoil(f"{CORE}/ack/{acks[0]}", 100, 101)
    disk.spoil(f"{CORE}/segments/{meta_name(1)}", 0, 1)
    for note in ("wal/quiver.wal.cursor", "meta/logged"):
        disk.spoil(f"{CORE}/{note}", 0, 1)
    checked = check(disk, 0, CORE)
    subjects = {problem.subject for problem in checked.problems}
    assert f"segments/{arrow_name(1)}" in subjects
    assert f"wal/{logs[0]}" in subjects
    assert "acknowledgements" in subjects
    assert {"wal/quiver.wal.cursor", "meta/logged"} <= subjects
    assert checked.segments == 1
    assert repair(disk, CORE, clock)
    quiver = open_quiver(disk, clock)
    quiver.close()


@pytest.mark.parametrize("note", ["wal/quiver.wal.cursor", "meta/logged"])
def test_a_start_reports_notes_beside_the_log_that_cannot_be_read(note: str) -> None:
    disk, clock = two_segments(keep_log=True)
    disk.spoil(f"{CORE}/{note}", 0, 1)
    quiver = open_quiver(disk, clock)
    assert any(f"{note}: cannot read" in text for text in quiver.stats().damage)
    quiver.close()


def test_an_unreadable_sidecar_is_damage_and_the_other_segments_are_listed() -> None:
    disk, _ = two_segments(keep_log=False)
    disk.spoil(f"{CORE}/segments/{meta_name(1)}", 0, 1)
    source = LocalSegments(CORE.rpartition("/")[0], disk)
    assert [info.seq for info in source.infos()] == [2]
    assert ["cannot read" in str(error) for error in source.damaged.values()] == [True]
