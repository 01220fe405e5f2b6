"""The subscription store: marks, gaps, registration, deletion, and recovery after a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.quiver.ack_doubles import CORE, START_NS, Core, segment

from penstock.errors import InvalidInput, PenstockError, StorageFull
from penstock.quiver.errors import UnknownSubscriber
from penstock.quiver.model import BundleRef
from penstock.quiver.offsets.log import OffsetLogSettings
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.state import SubscriberState
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.storage.fs import OsFileSystem, WritableFile
from penstock.testing.disk import DiskFault, PlannedFault, Survival


@pytest.fixture
def core() -> Core:
    return Core().open()


def test_the_mark_stops_before_a_segment_that_is_not_fully_resolved(core: Core) -> None:
    core.subscribe("a")
    for seq in (1, 2, 3):
        core.add(seq)
    core.ack("a", 2, 0, 1)
    core.ack("a", 3, 0)
    assert core.offsets.subscriber("a").hwm == 0
    assert core.offsets.subscriber("a").gap_segments == 2
    core.ack("a", 1, 1, 0)
    assert core.offsets.subscriber("a").hwm == 2
    core.ack("a", 3, 1)
    assert (core.offsets.subscriber("a").hwm, core.offsets.subscriber("a").gap_segments) == (3, 0)


def test_a_nack_never_moves_the_mark(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    assert core.offsets.resolve("a", BundleRef(1, 0), Outcome.NACK, attempt=1)
    assert core.offsets.subscriber("a").hwm == 0
    assert core.offsets.subscriber("a").nacked == 1


@pytest.mark.parametrize("outcome", [Outcome.ACK, Outcome.DROPPED, Outcome.EXPIRED, Outcome.REJECTED])
def test_every_other_outcome_moves_the_mark(core: Core, outcome: Outcome) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.offsets.resolve("a", BundleRef(1, 0), outcome)
    assert core.offsets.subscriber("a").hwm == 1


def test_an_ack_of_a_segment_is_an_ack_of_every_bundle_in_it(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=5)
    core.ack("a", 1, 3)
    assert core.offsets.resolve("a", 1, Outcome.ACK)
    assert core.offsets.subscriber("a").acked == 5
    assert not core.offsets.resolve("a", 1, Outcome.ACK)
    assert not core.offsets.resolve("a", BundleRef(1, 0), Outcome.ACK)


def test_a_bundle_that_does_not_exist_cannot_be_resolved(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=2)
    assert not core.offsets.resolve("a", BundleRef(1, 2), Outcome.ACK)
    assert not core.offsets.resolve("a", BundleRef(7, 0), Outcome.ACK)


def test_nothing_is_finished_while_one_subscriber_needs_it(core: Core) -> None:
    core.subscribe("a", "b")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    assert (core.offsets.state.outstanding(1), core.offsets.finished()) == (1, [])
    core.ack("b", 1, 0)
    assert (core.offsets.state.outstanding(1), core.offsets.finished()) == (0, [1])


def test_a_segment_is_deletable_only_after_a_sync_of_its_acks(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    assert core.offsets.mark_deleted(core.offsets.finished()) == [1]
    assert core.offsets.removable() == []
    assert 1 not in core.offsets.removable()
    core.offsets.sync()
    assert core.offsets.removable() == [1]
    assert 1 in core.offsets.removable()


def test_a_failed_sync_makes_nothing_deletable_and_the_next_one_goes_into_a_new_file(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    core.offsets.mark_deleted([1])
    core.disk.plan = PlannedFault(call=len(core.disk.calls) + 1, kind=DiskFault.FAIL_ONCE)
    with pytest.raises(PenstockError):
        core.offsets.sync()
    assert core.disk.calls[-1] == "datasync"
    assert core.offsets.removable() == []
    core.offsets.sync()
    assert core.offsets.removable() == [1]
    after = core.crashed()
    assert after.offsets.subscriber("a").hwm == 1
    assert not after.offsets.damage


def test_without_any_subscriber_nothing_is_finished(core: Core) -> None:
    core.add(1)
    assert core.offsets.finished() == []
    core.subscribe("late")
    assert core.refs("late") == [(1, 0), (1, 1)]


def test_unregistering_the_last_subscriber_releases_existing_data_and_keeps_new_data(core: Core) -> None:
    core.subscribe("a")
    core.add(1)
    gone = core.unregister("a")
    assert gone.pending_segments == 1
    core.add(2)
    assert core.offsets.finished() == [1]
    assert core.crashed().offsets.finished() == [1]


def test_unregistering_releases_data_that_only_that_subscriber_needed(core: Core) -> None:
    core.subscribe("a", "b")
    core.add(1, bundles=1)
    core.add(2, bundles=1)
    core.ack("a", 1, 0)
    core.unregister("b")
    assert core.offsets.finished() == [1]
    with pytest.raises(UnknownSubscriber, match="registered: a"):
        core.offsets.subscriber("b")


def test_a_subscriber_that_registers_before_the_deletion_keeps_the_segment(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    chosen = core.offsets.finished()
    core.subscribe("b")
    assert core.offsets.mark_deleted(chosen) == []
    assert core.refs("b") == [(1, 0)]


@pytest.mark.parametrize(("start", "first"), [("earliest", 2), ("latest", None), (3, 3), (4, None)])
def test_a_new_subscriber_starts_at_its_start_position(
    core: Core, start: str | int, first: int | None
) -> None:
    core.subscribe("a")
    for seq in (1, 2, 3):
        core.add(seq, bundles=1)
    core.ack("a", 1, 0)
    core.remove()
    core.offsets.register("b", start)
    core.offsets.activate("b")
    refs = core.refs("b")
    assert refs == [] if first is None else refs[0] == (first, 0)
    core.add(4, bundles=1)
    assert core.refs("b") == [(4, 0)]


@pytest.mark.parametrize("start", ["newest", 0, 2, -1])
def test_an_invalid_start_is_refused(core: Core, start: str | int) -> None:
    with pytest.raises(InvalidInput, match="starts at"):
        core.offsets.register("a", start)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "é", "x" * 65, "CON", "lpt1"])
def test_an_invalid_name_is_refused(core: Core, name: str) -> None:
    with pytest.raises(InvalidInput, match="not a subscriber name"):
        core.offsets.register(name)


def test_a_known_name_continues_at_its_position(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    assert core.offsets.register("a", "earliest").hwm == 1


def test_a_segment_with_a_lower_number_is_refused(core: Core) -> None:
    core.add(5)
    with pytest.raises(InvalidInput, match="too late"):
        core.add(4)


def test_skipped_numbers_do_not_hold_up_a_mark(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.add(4, bundles=1)
    core.ack("a", 1, 0)
    assert core.offsets.subscriber("a").hwm == 3
    core.offsets.sync()
    after = core.crashed()
    assert after.found.missing == ()
    assert after.offsets.subscriber("a").hwm == 3


def test_numbers_of_files_that_never_counted_are_not_missing_later(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.offsets.sync()
    again = core.crashed()
    again.offsets = SubscriptionStore(again.disk, CORE, None, again.clock)
    again.offsets.reconcile(again.infos.values(), highest_seq=4)
    assert again.offsets.state.next_segment_seq == 5
    again.add(5, bundles=1)
    again.offsets.sync()
    after = again.crashed()
    assert after.found.missing == ()
    after.ack("a", 1, 0)
    assert after.offsets.subscriber("a").hwm == 4


class SmallDisk(OsFileSystem):
    """A disk that is full except for the reserve."""

    full = False

    def create(self, path: str) -> WritableFile:
        if self.full and os.path.exists(f"{os.path.dirname(os.path.dirname(path))}/ack/reserve"):
            raise StorageFull("no room")
        return super().create(path)


def test_acks_can_be_written_on_a_full_disk_while_the_reserve_lasts(tmp_path: Path) -> None:
    disk = SmallDisk()
    offsets = SubscriptionStore(disk, str(tmp_path), OffsetLogSettings())
    offsets.reconcile([])
    offsets.register("a")
    offsets.checkpoint()
    offsets.add_segment(segment(1, bundles=1))
    offsets.resolve("a", BundleRef(1, 0), Outcome.ACK)
    offsets.mark_deleted([1])
    disk.full = True
    assert (tmp_path / "ack" / "reserve").stat().st_size == 1024 * 1024
    offsets.sync()
    assert offsets.removable() == [1]
    assert not (tmp_path / "ack" / "reserve").exists()
    disk.full = False
    offsets.checkpoint()
    assert (tmp_path / "ack" / "reserve").exists()
    offsets.close()


def test_marks_gaps_names_and_states_survive_a_power_cut(core: Core) -> None:
    long_name = "n" * 64
    core.subscribe("a", long_name)
    for seq in range(1, 6):
        core.add(seq, bundles=3)
    core.ack("a", 1, 0, 1, 2)
    core.ack("a", 3, 2)
    core.offsets.resolve("a", 5, Outcome.ACK)
    core.offsets.deactivate(long_name)
    core.offsets.sync()
    after = core.crashed()
    assert after.refs("a") == [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2)]
    assert after.offsets.subscriber("a").hwm == 1
    assert after.offsets.subscriber("a").acked == 7
    assert after.offsets.subscriber(long_name).state is SubscriberState.INACTIVE
    assert after.offsets.subscriber(long_name).pending_segments == 5


def test_outcomes_that_were_not_synced_are_delivered_again(core: Core) -> None:
    core.subscribe("a")
    core.offsets.sync()
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    assert core.crashed().refs("a") == [(1, 0)]


def test_opening_twice_gives_the_same_state_and_changes_nothing(core: Core) -> None:
    core.subscribe("a")
    core.add(1)
    core.ack("a", 1, 1)
    core.offsets.sync()
    disk = core.disk.crash()
    once = core.crashed(disk)
    twice = core.crashed(disk)
    assert once.offsets.subscriber("a") == twice.offsets.subscriber("a")


def test_replayed_records_are_not_trusted_before_a_checkpoint_of_this_process(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    core.offsets.sync()
    disk = core.disk.crash(Survival.EVERYTHING)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.NO_SPACE)
    after = core.crashed(disk)
    after.offsets.mark_deleted(after.offsets.finished())
    assert after.offsets.removable() == []
    disk.plan = None
    after.offsets.tend()
    assert after.offsets.removable() == [1]


def test_a_segment_that_was_being_deleted_is_deleted_after_a_crash_and_not_delivered(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    core.offsets.mark_deleted([1])
    core.offsets.sync()
    after = core.crashed()
    assert after.offsets.removable() == [1]
    after.subscribe("late")
    assert after.refs("late") == []


def test_pending_bundles_of_a_missing_segment_are_dropped_and_reported(core: Core) -> None:
    core.subscribe("a", "b")
    for seq in (1, 2, 3):
        core.add(seq, bundles=1)
    core.ack("a", 2, 0)
    core.ack("a", 1, 0)
    core.offsets.sync()
    del core.infos[2]
    after = core.crashed()
    assert after.found.missing == ((2, 2),)
    assert (after.offsets.subscriber("a").hwm, after.offsets.subscriber("b").hwm) == (2, 0)
    assert after.refs("b") == [(1, 0), (3, 0)]
    again = after.crashed()
    assert again.found.missing == ()


def test_a_hole_of_any_length_costs_one_record(core: Core) -> None:
    core.subscribe("a")
    core.add(1, bundles=1)
    core.offsets.sync()
    core.infos[10**15] = segment(10**15)
    after = core.crashed()
    assert after.found.missing == ((2, 10**15 - 1),)
    core = after.crashed()
    assert core.found.missing == ()
    core.ack("a", 1, 0)
    assert core.offsets.subscriber("a").hwm == 10**15 - 1


def test_numbers_are_not_reused_after_everything_was_deleted(core: Core) -> None:
    core.subscribe("a")
    core.add(7, bundles=1)
    core.ack("a", 7, 0)
    assert core.remove() == [7]
    core = core.crashed()
    assert core.offsets.state.next_segment_seq == 8
    core.offsets.checkpoint(next_segment_seq=9, next_wal_seq=41)
    after = core.crashed()
    assert (after.offsets.state.next_segment_seq, after.offsets.state.next_wal_seq) == (9, 41)
    after.offsets.checkpoint(next_segment_seq=3, next_wal_seq=3)
    again = after.crashed()
    assert (again.offsets.state.next_segment_seq, again.offsets.state.next_wal_seq) == (9, 41)


def test_old_segments_expire_at_the_start(core: Core) -> None:
    core.subscribe("a")
    core.add(1, ingest_ns=START_NS - 10)
    core.add(2)
    core.offsets.sync()
    again = Core(core.disk.crash(), clock=core.clock, infos=core.infos.values())
    again.open(expired_before_ns=START_NS)
    assert [dropped.info.seq for dropped in again.found.expired] == [1]
    assert again.offsets.subscriber("a").expired == 2
    assert again.offsets.subscriber("a").hwm == 1


def test_a_drop_is_recorded_only_for_subscribers_that_needed_the_segment(core: Core) -> None:
    core.subscribe("a", "b")
    core.add(1, bundles=4)
    core.offsets.resolve("a", 1, Outcome.ACK)
    core.ack("b", 1, 0)
    dropped = core.offsets.drop(1, Outcome.DROPPED)
    assert (dropped.subscribers, dropped.bundles) == (("b",), 3)
    assert core.offsets.subscriber("a").dropped == 0
    assert core.offsets.subscriber("b").dropped == 3
    assert core.offsets.removable() == []
    core.offsets.sync()
    assert core.offsets.removable() == [1]


def test_a_drop_across_a_gap_moves_the_mark_over_it(core: Core) -> None:
    core.subscribe("a")
    for seq in (1, 2, 3):
        core.add(seq, bundles=1)
    core.ack("a", 2, 0)
    core.ack("a", 3, 0)
    core.offsets.drop(1, Outcome.DROPPED)
    assert core.offsets.subscriber("a").hwm == 3
    core.offsets.sync()
    assert core.crashed().offsets.subscriber("a").hwm == 3


def test_an_orphan_pins_data_until_it_is_dropped(core: Core) -> None:
    core.subscribe("a", "old")
    core.add(1, bundles=1)
    core.ack("a", 1, 0)
    assert core.offsets.orphans(["a"]) == ["old"]
    assert core.offsets.subscriber("old").state is SubscriberState.ORPHANED
    assert core.offsets.finished() == []
    now_ns = core.clock.now_ms() * 1_000_000
    core.offsets.sync()
    after = core.crashed()
    assert after.offsets.orphaned() == [("old", now_ns)]
    assert after.offsets.register("old").state is SubscriberState.REGISTERED


def test_a_checkpoint_is_due_by_records_and_by_time(core: Core) -> None:
    settings = OffsetLogSettings(checkpoint_records=10, checkpoint_interval_s=60)
    core = Core(settings=settings).open()
    core.subscribe("a")
    core.add(1, bundles=100)
    core.offsets.tend()
    before = core.offsets.log.since_checkpoint
    core.ack("a", 1, *range(10))
    core.offsets.tend()
    assert core.offsets.log.since_checkpoint < before + 10
    assert f"{CORE}/meta/checkpoint" in paths(core)


def test_replay_is_bounded_by_two_checkpoints() -> None:
    core = Core(settings=OffsetLogSettings(checkpoint_records=50)).open()
    core.subscribe("a")
    core.add(1, bundles=1000)
    for bundle in range(1000):
        core.ack("a", 1, bundle)
        core.offsets.tend()
        core.offsets.sync()
    logs = [name for name in paths(core) if "/ack/ack.log" in name]
    assert len(logs) <= 4
    assert core.crashed().offsets.replayed_records <= 110


def paths(core: Core) -> list[str]:
    return [f"{CORE}/{name}" for name, _ in core.disk.list_files(CORE)]
