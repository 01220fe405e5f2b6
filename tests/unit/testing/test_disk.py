"""The disk that can lose power: which data survives, and the effect of a failed sync."""

from __future__ import annotations

import random

import pytest

from penstock.errors import PenstockError, StorageFull, Unavailable
from penstock.storage.fs import LogFile
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival

DATA = bytes(range(1, 251)) * 20


@pytest.fixture
def disk() -> FakeDisk:
    made = FakeDisk()
    made.make_dirs("/d")
    return made


def log_file(disk: FakeDisk, size: int = 8192) -> LogFile:
    disk.allocate("/d/log", size)
    disk.sync_dir("/d")
    return disk.open_log("/d/log")


def after(disk: FakeDisk, survival: Survival = Survival.NOTHING, seed: int = 0) -> bytes:
    return disk.crash(survival, random.Random(seed)).read("/d/log")


def fail_next(disk: FakeDisk, kind: DiskFault = DiskFault.FAIL_ONCE) -> None:
    disk.plan = PlannedFault(call=len(disk.calls), kind=kind)


def test_an_allocated_file_is_durable_and_its_name_is_not(disk: FakeDisk) -> None:
    disk.allocate("/d/log", 100)
    assert disk.crash().list_files("/d") == []
    disk = FakeDisk()
    disk.make_dirs("/d")
    log_file(disk, 100)
    assert after(disk) == bytes(100)


def test_writes_in_place_are_durable_after_the_sync(disk: FakeDisk) -> None:
    log = log_file(disk)
    log.write_at(0, [b"one"])
    log.datasync()
    log.write_at(3, [b"two"])
    assert disk.read("/d/log", 0, 6) == b"onetwo"
    assert after(disk)[:6] == b"one\0\0\0"


def test_a_durable_write_covers_only_its_own_range(disk: FakeDisk) -> None:
    log = log_file(disk)
    log.write_at(0, [b"one"])
    log.write_durably_at(3, [b"two"])
    log.write_at(6, [b"three"])
    assert after(disk)[:11] == b"\0\0\0two" + bytes(5)


def test_a_durable_write_over_a_pending_one_wins(disk: FakeDisk) -> None:
    for seed in range(20):
        disk = FakeDisk()
        disk.make_dirs("/d")
        log = log_file(disk)
        log.write_at(0, [b"x" * 100])
        log.write_durably_at(10, [bytes(50)])
        survived = after(disk, Survival.RANDOM, seed)
        assert survived[10:60] == bytes(50)


def test_pending_writes_survive_whole_torn_or_not_at_all(disk: FakeDisk) -> None:
    seen = set()
    for seed in range(40):
        disk = FakeDisk()
        disk.make_dirs("/d")
        log_file(disk).write_at(100, [DATA])
        survived = after(disk, Survival.RANDOM, seed)
        kept = sum(a == b for a, b in zip(survived[100 : 100 + len(DATA)], DATA, strict=True))
        assert survived[:100] == bytes(100)
        seen.add("none" if not kept else "all" if kept == len(DATA) else "torn")
    assert seen == {"none", "all", "torn"}


def test_everything_survives_when_only_the_process_dies(disk: FakeDisk) -> None:
    log_file(disk).write_at(100, [DATA])
    assert after(disk, Survival.EVERYTHING)[100 : 100 + len(DATA)] == DATA


def test_data_of_a_failed_sync_is_not_written_by_a_later_sync(disk: FakeDisk) -> None:
    log = log_file(disk)
    log.write_at(0, [b"lost"])
    fail_next(disk)
    with pytest.raises(Unavailable):
        log.datasync()
    log.write_at(4, [b"kept"])
    log.datasync()
    disk.open_log("/d/log").datasync()
    assert disk.read("/d/log", 0, 8) == b"lostkept"
    assert after(disk)[:8] == b"\0\0\0\0kept"


@pytest.mark.parametrize("kind", [DiskFault.FAIL_ONCE, DiskFault.FAIL_ALWAYS, DiskFault.SHORT_WRITE])
def test_a_durable_write_that_fails_may_have_reached_the_disk(disk: FakeDisk, kind: DiskFault) -> None:
    log = log_file(disk)
    fail_next(disk, kind)
    with pytest.raises(Unavailable):
        log.write_durably_at(0, [b"abcd"])
    disk.plan = None
    assert disk.read("/d/log", 0, 4) in (b"abcd", b"ab\0\0")
    log.datasync()
    assert after(disk)[:4] == bytes(4)


def test_a_write_interrupted_by_a_power_failure_may_have_reached_the_disk(disk: FakeDisk) -> None:
    log = log_file(disk)
    fail_next(disk, DiskFault.CRASH_BEFORE)
    with pytest.raises(PowerCut):
        log.write_durably_at(0, [b"abcd"])
    assert after(disk, Survival.EVERYTHING)[:4] == b"abcd"
    assert after(disk)[:4] == bytes(4)


def test_a_full_device_refuses_new_files(disk: FakeDisk) -> None:
    fail_next(disk, DiskFault.NO_SPACE)
    with pytest.raises(StorageFull):
        disk.allocate("/d/log", 10)
    assert disk.list_files("/d") == []


def test_faults_are_injected_into_every_new_call(disk: FakeDisk) -> None:
    log = log_file(disk)
    disk.make_dirs("/d/empty")
    for call in (
        lambda: disk.allocate("/d/x", 1),
        lambda: disk.open_log("/d/log"),
        lambda: disk.open_append("/d/log", 1),
        lambda: disk.map("/d/log"),
        lambda: disk.truncate("/d/log", 1),
        lambda: disk.remove_dir("/d/empty"),
        lambda: disk.free_bytes("/d"),
        lambda: log.write_at(0, [b"x"]),
        lambda: log.write_durably_at(0, [b"x"]),
        log.datasync,
    ):
        fail_next(disk)
        with pytest.raises(PenstockError):
            call()
        disk.plan = None
    assert disk.stat("/d/log").size == 8192


def test_a_cut_is_durable_after_the_next_sync_of_the_handle(disk: FakeDisk) -> None:
    log_file(disk, 0)
    file = disk.open_append("/d/log", 0)
    file.write([b"0123456789"])
    file.datasync()
    file = disk.open_append("/d/log", 4)
    file.write([b"new"])
    assert disk.read("/d/log") == b"0123new"
    assert after(disk) == b"0123456789"
    assert {after(disk, Survival.RANDOM, seed)[:4] for seed in range(20)} == {b"0123"}
    disk._off = False
    file.datasync()
    assert after(disk) == b"0123new"


def test_a_truncation_is_durable_immediately(disk: FakeDisk) -> None:
    log = log_file(disk)
    log.write_at(0, [b"x" * 200])
    disk.truncate("/d/log", 100)
    for survival in Survival:
        assert len(after(disk, survival)) == 100


def test_a_removed_directory_is_gone_after_its_parent_is_synced(disk: FakeDisk) -> None:
    disk.make_dirs("/d/empty")
    disk.remove_dir("/d/empty")
    assert disk.crash().stat("/d/empty").is_dir
    disk._off = False
    disk.sync_dir("/d")
    with pytest.raises(PenstockError):
        disk.crash().stat("/d/empty")


def test_free_space_is_set_by_the_test(disk: FakeDisk) -> None:
    disk.free = 123
    assert disk.free_bytes("/d") == 123


def test_a_file_that_is_renamed_is_found_under_one_name_at_least(disk: FakeDisk) -> None:
    disk.make_dirs("/d")
    file = disk.create("/d/old")
    file.write([b"x"])
    file.datasync()
    disk.sync_dir("/d")
    disk.rename("/d/old", "/d/new")
    seen = set()
    for seed in range(40):
        names = tuple(name for name, _ in disk.crash(Survival.RANDOM, random.Random(seed)).list_files("/d"))
        seen.add(names)
    assert seen == {("old",), ("new",), ("new", "old")}


def test_a_directory_whose_name_could_not_be_synced_is_created_again() -> None:
    disk = FakeDisk(plan=PlannedFault(call=1, kind=DiskFault.FAIL_ONCE))
    with pytest.raises(PenstockError):
        disk.make_dirs("/data")
    disk.make_dirs("/data")
    assert disk.calls == ["mkdir", "sync_dir", "mkdir", "sync_dir"]
