from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.quiver.engine_doubles import (
    CORE,
    StepClock,
    config,
    open_quiver,
    ready,
    rows,
    take_all,
    words,
)

from penstock.errors import ConfigError, InvalidInput, LimitExceeded, StorageFull
from penstock.metrics import Registry
from penstock.quiver import AtCapacity, BundleRef, Closed, Locked, Quiver, QuiverConfig, Signal
from penstock.quiver.engine import Quiver as Engine
from penstock.quiver.offsets.external import ExternalAck, commit_offset
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def disk(clock: StepClock) -> FakeDisk:
    return FakeDisk(clock=clock)


def numbers(quiver: Engine, name: str = "lake") -> list[int]:
    return [values[0] for _, values in take_all(quiver, name)]


# ---- ingest and delivery --------------------------------------------------------------------------------


def test_a_batch_is_delivered_unchanged(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    receipt = quiver.ingest(words(1), signal="metrics")
    quiver.flush()
    with quiver.next_bundle("lake") as bundle:
        assert bundle.batch.column("n").to_pylist() == [1, 2, 3]
        assert bundle.batch.column("w").cast(pa.string()).to_pylist() == ["word 1", "word 0", "word 1"]
        assert (bundle.signal, bundle.slot, bundle.items) == (Signal.METRICS, 52, 3)
        assert bundle.ref == BundleRef(1, 0)
        assert bundle.ack()
    assert (receipt.wal_seq, receipt.items) == (1, 3)
    assert receipt.ingest_ns == clock.now_ms() * 1_000_000
    assert quiver.next_bundle("lake") is None


def test_each_slot_of_a_bundle_is_delivered_separately(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest({51: rows(20), 50: rows(10), 52: words(30)})
    quiver.flush()
    assert sorted(take_all(quiver, "lake")) == [(50, [10, 11, 12]), (51, [20, 21, 22]), (52, [30, 31, 32])]


def test_a_raw_request_is_one_row_in_the_slot_of_its_signal(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest_raw(b"as it came", "traces")
    quiver.flush()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    assert (bundle.slot, bundle.batch.to_pydict()) == (61, {"data": [b"as it came"]})
    bundle.ack()


def test_data_that_is_not_telemetry_goes_into_its_slot(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    quiver.flush()
    assert take_all(quiver, "lake") == [(63, [1, 2, 3])]


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        (rows(1), {"signal": "trace"}),
        (rows(1), {"slot": 9}),
        ({}, {}),
        ({50: rows(1)}, {"slot": 50}),
        ({50: "text"}, {}),
        ([1, 2], {}),
    ],
)
def test_data_that_is_not_a_bundle_is_refused(
    disk: FakeDisk, clock: StepClock, data: object, arguments: dict[str, object]
) -> None:
    quiver = ready(disk, clock)
    with pytest.raises(InvalidInput):
        quiver.ingest(data, **arguments)  # type: ignore[arg-type]
    assert quiver.stats().next_wal_seq == 1


def test_a_bundle_larger_than_an_entry_is_refused(
    disk: FakeDisk, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.quiver.wal.entry.ENTRY_BYTES_MAX", 200)
    with pytest.raises(LimitExceeded):
        ready(disk, clock).ingest(rows(1, 100))


def test_every_subscriber_gets_everything(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, "lake", "log")
    quiver.ingest(rows(1))
    quiver.flush()
    assert numbers(quiver, "lake") == numbers(quiver, "log") == [1]


# ---- time and size --------------------------------------------------------------------------------------


def test_nothing_waits_longer_than_the_open_duration(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    clock.step(4.9)
    quiver.maintain()
    assert numbers(quiver) == []
    clock.step(0.2)
    quiver.maintain()
    assert numbers(quiver) == [1]


def test_maintenance_alone_makes_no_segments(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=config(segment={"target_size": 50_000}))
    for n in range(40):
        quiver.ingest(rows(n * 10, 1))
        clock.step(0.1)
        quiver.maintain()
    assert quiver.stats().next_segment_seq == 1


def test_waiting_data_in_memory_is_bounded_by_the_target(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    for n in range(30):
        quiver.ingest(rows(n * 10), slot=(50, 51, 52)[n % 3])
        assert quiver.stats().open_bytes < 3000
    quiver.maintain()
    assert quiver.stats().segments > 3


def test_the_log_is_truncated_as_segments_are_committed(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    for n in range(60):
        quiver.ingest(rows(n * 10, 5))
        quiver.maintain()
    assert quiver.stats().wal_files <= 3
    assert quiver.stats().wal_bytes < 20_000


def test_the_cursor_stays_at_the_oldest_bundle_that_is_open(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1), slot=50)
    quiver.maintain()
    first = quiver.stats().wal_cursor
    for n in range(2, 20):
        quiver.ingest(rows(n * 10, 20), slot=51)
        quiver.maintain()
    assert quiver.stats().segments > 3
    assert quiver.stats().wal_cursor == first
    quiver.flush()
    assert quiver.stats().wal_cursor > first


def test_the_cursor_stays_at_a_segment_that_cannot_be_written(
    disk: FakeDisk, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))

    def refuse(*arguments: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(quiver.core.store, "write", refuse)
    for _ in range(3):
        with pytest.raises(StorageFull):
            quiver.flush()
        clock.step(60)
        quiver.maintain()
    assert quiver.stats().sealed_segments == 1
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    again.flush()
    assert numbers(again) == [1]


# ---- restarts -------------------------------------------------------------------------------------------


def test_open_data_is_read_from_the_log(disk: FakeDisk, clock: StepClock) -> None:
    ready(disk, clock).ingest(rows(1))
    quiver = open_quiver(disk.crash(Survival.NOTHING), clock)
    quiver.flush()
    assert numbers(quiver) == [1]


def test_only_the_uncommitted_part_of_an_entry_is_read(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest({50: rows(10, 40), 51: rows(100, 2)})
    quiver.ingest(rows(500, 30), slot=50)
    quiver.maintain()
    assert [info.slot for info in quiver.core.store.infos()] == [50]
    registry = Registry()
    again = open_quiver(disk.crash(Survival.NOTHING), clock, registry=registry)
    again.flush()
    assert sorted(numbers(again)) == [10, 100, 500]
    assert registry.value("quiver.recovery.deduplicated") == 2
    assert registry.value("quiver.recovery.replayed") == 1


def test_a_segment_is_deleted_only_when_the_log_is_truncated_after_it(
    disk: FakeDisk, clock: StepClock
) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1), slot=51)
    quiver.ingest(rows(10, 60), slot=50)
    quiver.maintain()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    bundle.ack()
    clock.step(1)
    quiver.maintain()
    assert quiver.stats().segments == 1, "a restart would read its bundle from the log again"
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    again.flush()
    assert numbers(again) == [1]
    clock.step(1)
    again.maintain()
    assert [info.slot for info in again.core.store.infos()] == [51]


def test_numbers_continue_after_everything_was_deleted(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    for n in range(5):
        quiver.ingest(rows(n * 10))
        quiver.flush()
        bundle = quiver.next_bundle("lake")
        assert bundle is not None
        bundle.ack()
    clock.step(1)
    quiver.maintain()
    before = quiver.stats()
    assert before.segments == 0
    quiver.close()
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    after = again.stats()
    assert after.next_segment_seq == before.next_segment_seq
    assert after.next_wal_seq >= before.next_wal_seq
    again.ingest(rows(900))
    again.flush()
    assert numbers(again) == [900]


def test_a_wiped_log_does_not_hide_later_bundles(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    quiver.flush()
    quiver.close()
    for name, _ in disk.list_files(f"{CORE}/wal"):
        disk.unlink(f"{CORE}/wal/{name}")
    disk.sync_dir(f"{CORE}/wal")
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    again.ingest(rows(10))
    third = open_quiver(again_disk(again).crash(Survival.NOTHING), clock)
    third.flush()
    assert numbers(third) == [1, 10]


def again_disk(quiver: Engine) -> FakeDisk:
    fs = quiver.core.fs
    assert isinstance(fs, FakeDisk)
    return fs


def test_bundles_of_the_log_that_are_too_old_are_not_renewed(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(retention={"max_retain_after_ingestion_hours": 1})
    quiver = ready(disk, clock, settings=settings)
    quiver.ingest(rows(1))
    clock.step(3000)
    quiver.ingest(rows(10))
    clock.step(1000)
    registry = Registry()
    again = open_quiver(disk.crash(Survival.NOTHING), clock, settings, registry)
    again.flush()
    assert numbers(again) == [10]
    assert registry.value("quiver.recovery.expired_total") == 1
    assert registry.value("quiver.loss.bundles", reason="age", signal="unknown") == 1


def test_a_subscriber_continues_at_its_position(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    quiver.ingest(rows(10))
    quiver.flush()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    bundle.ack()
    quiver.close()
    assert numbers(open_quiver(disk.crash(Survival.NOTHING), clock)) == [10]


# ---- without a log --------------------------------------------------------------------------------------


def test_without_a_log_only_segments_survive(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(durability="segment_only")
    quiver = ready(disk, clock, settings=settings)
    quiver.ingest(rows(1))
    quiver.flush()
    quiver.ingest(rows(10))
    assert disk.list_files(f"{CORE}/wal") == []
    again = open_quiver(disk.crash(Survival.NOTHING), clock, settings)
    again.flush()
    assert numbers(again) == [1]
    assert again.ingest(rows(20)).wal_seq > 1
    again.close()
    assert sorted(numbers(open_quiver(again_disk(again).crash(), clock, settings))) == [1, 20]


def test_an_existing_log_is_read_even_if_the_log_is_disabled(disk: FakeDisk, clock: StepClock) -> None:
    ready(disk, clock).ingest(rows(1))
    settings = config(durability="segment_only")
    quiver = open_quiver(disk.crash(Survival.NOTHING), clock, settings)
    quiver.ingest(rows(10))
    quiver.flush()
    assert numbers(quiver) == [1, 10]
    quiver.close()
    again = open_quiver(again_disk(quiver).crash(), clock, settings)
    assert again.core.memtable.open_bytes == 0, "committed bundles are not read again"
    assert numbers(again) == [1, 10]


# ---- caps -----------------------------------------------------------------------------------------------


def test_a_full_log_is_emptied_by_a_flush(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(
        segment={"target_size": 20_000}, wal={"max_size": 12_000}, retention={"size_cap": "1MB"}
    )
    quiver = ready(disk, clock, settings=settings)
    for n in range(100):
        quiver.ingest(rows(n * 10, 5))
    quiver.flush()
    assert len(numbers(quiver)) == 100
    assert quiver.stats().wal_bytes <= 12_000


def test_a_log_with_too_many_files_is_emptied_by_a_flush(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(
        disk, clock, settings=config(segment={"target_size": 90_000}, wal={"max_rotated_files": 2})
    )
    for n in range(60):
        quiver.ingest(rows(n * 10, 5))
        assert quiver.stats().wal_files <= 3
    quiver.flush()
    assert len(numbers(quiver)) == 60


def test_a_bundle_larger_than_the_log_is_refused(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=config(wal={"max_size": 8192}))
    with pytest.raises(LimitExceeded, match=r"wal\.max_size"):
        quiver.ingest(rows(1, 1000))
    quiver.ingest(rows(1))


def test_a_writer_is_refused_while_segments_cannot_be_written(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=config(wal={"max_size": 20_000}))
    accepted = []
    disk.plan = None
    with pytest.raises((AtCapacity, StorageFull)):  # noqa: PT012
        for n in range(200):
            if n == 20:
                disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.NO_SPACE)
            quiver.ingest(rows(n * 10, 5))
            accepted.append(n * 10)
    disk.plan = None
    clock.step(60)
    quiver.ingest(rows(9000))
    quiver.flush()
    assert numbers(quiver) == [*accepted, 9000]


def test_over_the_cap_writers_are_refused_and_nothing_is_lost(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=config(retention={"size_cap": 70_000}))
    accepted = []
    with pytest.raises(AtCapacity) as refused:  # noqa: PT012
        for n in range(500):
            quiver.ingest(rows(n * 10, 20))
            accepted.append(n * 10)
            quiver.maintain()
    assert refused.value.retry_after_s > 0
    assert quiver.stats().disk_bytes <= 70_000
    quiver.flush()
    while (bundle := quiver.next_bundle("lake")) is not None:
        assert bundle.batch.column("n")[0].as_py() == accepted.pop(0)
        bundle.ack()
    assert accepted == []
    quiver.ingest(rows(1))


def test_over_the_cap_the_oldest_is_dropped_if_configured(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(retention={"size_cap": 70_000, "size_cap_policy": "drop_oldest"})
    registry = Registry()
    quiver = open_quiver(disk, clock, settings, registry)
    quiver.register("lake")
    quiver.activate("lake")
    for n in range(200):
        quiver.ingest(rows(n * 10, 20))
        quiver.maintain()
    quiver.flush()
    kept = numbers(quiver)
    assert kept == list(range(2000 - 10 * len(kept), 2000, 10))
    assert 3 < len(kept) < 150
    assert registry.value("quiver.segment.dropped_total") > 0
    assert quiver.stats().disk_bytes <= 70_000


def test_a_nearly_full_device_counts_as_over_the_cap(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, settings=config(retention={"min_free": "1GB"}))
    quiver.ingest(rows(1))
    disk.free = 10**8
    clock.step(2)
    with pytest.raises(AtCapacity):
        quiver.ingest(rows(10))
    disk.free = 10**10
    quiver.ingest(rows(10))


def test_a_cap_that_cannot_hold_a_log_and_two_segments_names_the_minimum() -> None:
    with pytest.raises(ConfigError, match="at least 192000000 bytes"):
        Quiver.open("/nowhere", QuiverConfig.from_mapping({"retention.size_cap": "100MB"}))


# ---- damage ---------------------------------------------------------------------------------------------


def flip(disk: FakeDisk, path: str, offset: int) -> None:
    data = bytearray(disk.read(path))
    data[offset] ^= 0x10
    disk.unlink(path)
    file = disk.create(path)
    file.write([bytes(data)])
    file.datasync()
    disk.sync_dir(path.rpartition("/")[0])


def test_a_damaged_segment_is_read_from_the_log_again_while_it_has_it(
    disk: FakeDisk, clock: StepClock
) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1), slot=51)
    quiver.ingest(rows(10, 60), slot=50)
    quiver.maintain()
    assert quiver.stats().segments == 1
    after = disk.crash(Survival.NOTHING)
    flip(after, f"{CORE}/segments/seg-{1:016d}.arrow", 900)
    again = open_quiver(after, clock)
    again.flush()
    assert sorted(numbers(again)) == [1, 10]
    assert "segment 1 is quarantined" in again.stats().damage[0]


def test_a_damaged_segment_is_quarantined_and_never_delivered(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1, 50))
    quiver.flush()
    quiver.ingest(rows(100))
    quiver.flush()
    quiver.core.appender.rotate()
    quiver.core.flusher.cut_log()
    quiver.close()
    after = disk.crash(Survival.NOTHING)
    flip(after, f"{CORE}/segments/seg-{1:016d}.arrow", 900)
    registry = Registry()
    again = open_quiver(after, clock, registry=registry)
    assert numbers(again) == [100]
    assert registry.value("quiver.loss.bundles", reason="corrupt", signal="other") == 1
    names = [name for name, _ in after.list_files(f"{CORE}/quarantine")]
    assert any(name.startswith("seg-") for name in names)
    clock.step(1)
    again.maintain()
    assert again.stats().segments == 1


def log_of_three(disk: FakeDisk, clock: StepClock) -> FakeDisk:
    quiver = ready(disk, clock)
    for n in (1, 10, 20):
        quiver.ingest(rows(n))
    quiver.core.appender.rotate()
    return disk.crash(Survival.NOTHING)


def test_only_the_damaged_entry_is_lost_and_it_is_kept_as_evidence(disk: FakeDisk, clock: StepClock) -> None:
    after = log_of_three(disk, clock)
    flip(after, f"{CORE}/wal/quiver.wal.1", 38 + 37 + 200)
    registry = Registry()
    quiver = open_quiver(after, clock, registry=registry)
    quiver.flush()
    assert numbers(quiver) == [10, 20]
    assert registry.value("quiver.wal.corrupt_total") == 1
    assert [name for name, _ in after.list_files(f"{CORE}/quarantine")] == [
        "quiver.wal.1.at-75",
        "quiver.wal.counted-1",
    ]


def test_a_damaged_log_stops_the_start_if_configured(disk: FakeDisk, clock: StepClock) -> None:
    from penstock.errors import Corrupt

    after = log_of_three(disk, clock)
    flip(after, f"{CORE}/wal/quiver.wal.1", 38 + 37 + 200)
    before = after.read(f"{CORE}/wal/quiver.wal.1")
    with pytest.raises(Corrupt, match="on_corruption"):
        open_quiver(after, clock, config(wal={"on_corruption": "fail"}))
    assert after.read(f"{CORE}/wal/quiver.wal.1") == before


# ---- life cycle -----------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_immediately(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    with pytest.raises(Locked, match="in use by process"):
        open_quiver(disk, clock)
    quiver.close()
    open_quiver(disk, clock).close()


def test_after_close_nothing_is_accepted(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.close()
    quiver.close()
    for call in (
        lambda: quiver.ingest(rows(1)),
        lambda: quiver.next_bundle("lake"),
        lambda: quiver.register("other"),
        quiver.flush,
        quiver.maintain,
    ):
        with pytest.raises(Closed):
            call()


def test_closing_leaves_nothing_in_the_log(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    quiver.close()
    registry = Registry()
    again = open_quiver(disk.crash(Survival.NOTHING), clock, registry=registry)
    assert numbers(again) == [1]
    assert registry.value("quiver.recovery.replayed") == 0


def test_a_disk_failure_during_close_leaves_the_data_in_the_log(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    quiver.ingest(rows(1))
    disk.plan = PlannedFault(call=len(disk.calls) + 1, kind=DiskFault.NO_SPACE)
    try:
        quiver.close()
    except StorageFull:
        pass
    again = open_quiver(disk.crash(Survival.NOTHING), clock)
    again.flush()
    assert numbers(again) == [1]


def test_a_note_of_another_process_acknowledges_for_it(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock)
    for n in range(3):
        quiver.ingest(rows(n * 10))
        quiver.flush()
    commit_offset(disk, CORE, ExternalAck(subscriber="spark", through=2))
    quiver.maintain()
    quiver.maintain()
    assert [(one.name, one.hwm) for one in quiver.subscribers()] == [("lake", 0), ("spark", 2)]


def test_orphans_are_dropped_after_their_time(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, "lake", "old", settings=config(subscribers={"orphan_timeout": "1h"}))
    assert quiver.orphans(["lake"]) == ["old"]
    clock.step(3500)
    quiver.maintain()
    assert len(quiver.subscribers()) == 2
    clock.step(200)
    quiver.maintain()
    assert [one.name for one in quiver.subscribers()] == ["lake"]


@pytest.mark.parametrize("step_ms", [3_600_000, 86_400_000])
def test_a_clock_set_forward_drops_no_orphan_before_its_time(
    disk: FakeDisk, clock: StepClock, step_ms: int
) -> None:
    quiver = ready(disk, clock, "lake", "old", settings=config(subscribers={"orphan_timeout": "1h"}))
    assert quiver.orphans(["lake"]) == ["old"]
    clock.jump_wall(step_ms)
    clock.step(3500)
    quiver.maintain()
    assert len(quiver.subscribers()) == 2
    clock.step(200)
    quiver.maintain()
    assert [one.name for one in quiver.subscribers()] == ["lake"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_set_back_by_a_year_keeps_an_orphan_no_longer_than_its_time(
    disk: FakeDisk, clock: StepClock, restarted: bool
) -> None:
    settings = config(subscribers={"orphan_timeout": "1h"})
    quiver = ready(disk, clock, "lake", "old", settings=settings)
    assert quiver.orphans(["lake"]) == ["old"]
    quiver.maintain()
    clock.jump_wall(-365 * 86_400_000)
    if restarted:
        quiver.close()
        quiver = open_quiver(disk, clock, settings)
        quiver.maintain()
    clock.step(3500)
    quiver.maintain()
    assert len(quiver.subscribers()) == 2
    clock.step(200)
    quiver.maintain()
    assert [one.name for one in quiver.subscribers()] == ["lake"]


def test_an_orphan_that_was_active_in_between_waits_its_whole_time(disk: FakeDisk, clock: StepClock) -> None:
    quiver = ready(disk, clock, "lake", "old", settings=config(subscribers={"orphan_timeout": "1h"}))
    assert quiver.orphans(["lake"]) == ["old"]
    quiver.maintain()
    clock.step(3000)
    quiver.register("old")
    quiver.activate("old")
    assert quiver.orphans(["lake"]) == ["old"]
    clock.step(3000)
    quiver.maintain()
    assert len(quiver.subscribers()) == 2


def test_the_segments_of_a_signal_can_be_read_as_a_dataset(tmp_path: Path) -> None:
    with Quiver.open(str(tmp_path), config(), registry=Registry(), maintenance=False) as quiver:
        quiver.ingest(rows(1), signal="logs")
        quiver.ingest(rows(10), signal="traces")
        quiver.ingest(rows(20), signal="logs")
        quiver.flush()
        assert quiver.scan(signal="logs").to_table().column("n").to_pylist() == [1, 2, 3, 20, 21, 22]


@pytest.mark.parametrize("flush", ["always", "group", "interval", "none"])
def test_many_threads_write_while_segments_are_written(tmp_path: Path, flush: str) -> None:
    settings = config(wal={"flush": flush}, maintenance_interval="5ms")
    given: list[int] = []
    with Quiver.open(str(tmp_path), settings, registry=Registry()) as quiver:
        quiver.register("lake")
        quiver.activate("lake")

        def write(thread: int) -> None:
            for n in range(40):
                quiver.ingest(rows(thread * 100_000 + n * 10, 5), slot=50 + n % 3)

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(1, 5)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or len(given) < 160:
            if not any(thread.is_alive() for thread in threads):
                quiver.flush()
            bundle = quiver.next_bundle("lake", timeout="10ms")
            if bundle is not None:
                given.append(bundle.batch.column("n")[0].as_py())
                bundle.ack()
        for thread in threads:
            thread.join()
        assert quiver.next_bundle("lake") is None
    assert sorted(given) == sorted(t * 100_000 + n * 10 for t in range(1, 5) for n in range(40))


def test_cores_of_one_directory_work_concurrently(tmp_path: Path) -> None:
    settings = config(retention={"size_cap": "2MB"})
    opened = [
        Quiver.open(str(tmp_path), settings, core_id=core, cores=2, registry=Registry(), maintenance=False)
        for core in range(2)
    ]
    for core, quiver in enumerate(opened):
        quiver.register("lake")
        quiver.ingest(rows(100 * (core + 1)))
        quiver.flush()
        quiver.maintain()
    assert [numbers(quiver) for quiver in opened] == [[100], [200]]
    with pytest.raises(Locked):
        Quiver.open(str(tmp_path), settings, core_id=1, cores=2, registry=Registry())
    for quiver in opened:
        quiver.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["core_0", "core_1"]


def test_an_invalid_core_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="core_id must be from 0 to 1"):
        Quiver.open(str(tmp_path), config(), core_id=2, cores=2)


def test_segments_are_uploaded_before_they_are_deleted(disk: FakeDisk, clock: StepClock) -> None:
    settings = config(upload={"store": "memory://quiver-engine-upload", "prefix": "q"})
    quiver = ready(disk, clock, settings=settings)
    quiver.ingest(rows(1))
    quiver.flush()
    bundle = quiver.next_bundle("lake")
    assert bundle is not None
    bundle.ack()
    assert quiver.core.uploader is not None
    assert not quiver.core.segments.may_remove(1)
    clock.step(1)
    quiver.maintain()
    quiver.maintain()
    assert quiver.stats().segments == 0
    assert quiver.core.uploader.pending == 0
    quiver.close()
