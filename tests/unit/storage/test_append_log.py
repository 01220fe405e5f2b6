"""The append log without faults: exactly the appended records are found, in order, across files."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, MARK_BYTES, TINY, FillingDisk, append, bodies, frame

from penstock.errors import PenstockError, StorageFull
from penstock.storage import (
    AppendLog,
    ExtentFile,
    FileSystem,
    LogPosition,
    OsFileSystem,
    WritableFile,
    repair_tail,
    scan,
)
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, Survival

HEADER = 3 * MARK_BYTES


@pytest.fixture(params=["os", "fake"])
def fs(request: pytest.FixtureRequest) -> FileSystem:
    return OsFileSystem() if request.param == "os" else FakeDisk()


@pytest.fixture
def directory(fs: FileSystem, tmp_path: Path) -> str:
    return str(tmp_path / "wal")


def open_log(fs: FileSystem, directory: str = DIRECTORY, *, file_bytes: int = 512) -> AppendLog:
    return AppendLog.open(fs, directory, TINY, file_bytes=file_bytes)


def names(fs: FileSystem, directory: str) -> list[str]:
    return [name for name, _ in fs.list_files(directory)]


def test_appended_records_are_found_in_order(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    for n in range(40):
        assert append(log, b"record %d" % n, sync=n % 3 == 0)
    found = scan(fs, directory, TINY)
    assert bodies(found) == [b"record %d" % n for n in range(40)]
    assert found.damage == []
    assert not found.torn
    assert len(found.files) == 3
    assert found.end == log.end


def test_a_position_leads_to_the_bytes(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    for n in range(30):
        data = frame(b"%d" % n * 5)
        file, offset = log.append([data[:3], data[3:]], len(data), 1, sync=n % 2 == 0)
        assert bytes(log.view(file)[offset : offset + len(data)]) == data


def test_a_log_continues_in_a_new_file_after_every_opening(fs: FileSystem, directory: str) -> None:
    for n in range(4):
        log = open_log(fs, directory)
        assert append(log, b"life %d" % n)
        log.close()
    found = scan(fs, directory, TINY)
    assert bodies(found) == [b"life %d" % n for n in range(4)]
    assert len(found.files) == 4
    assert [file.number for file in found.files] == log.files()
    # The unused space of the earlier files is freed.
    assert [fs.stat(f"{directory}/{name}").size < 512 for name in names(fs, directory)[1:-1]] == [True] * 3


def test_a_large_entry_gets_a_file_of_its_size(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    big = b"b" * 5000
    assert append(log, b"small")
    assert append(log, big)
    assert append(log, b"small again")
    assert bodies(scan(fs, directory, TINY)) == [b"small", big, b"small again"]


def test_the_next_file_is_prepared_and_used(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    assert not log.wants_next
    assert append(log, b"x" * 250)
    assert log.wants_next
    log.prepare_next()
    log.prepare_next()
    assert not log.wants_next
    assert len(names(fs, directory)) == 3
    log.rotate()
    assert len(names(fs, directory)) == 3
    assert log.rotations == 1
    assert append(log, b"y")
    assert bodies(scan(fs, directory, TINY)) == [b"x" * 250, b"y"]


def test_prepared_files_are_removed_by_the_next_opening(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    log.prepare_next()
    open_log(fs, directory)
    assert [name for name in names(fs, directory) if name.startswith("next")] == []


def test_absorbed_files_are_dropped_and_the_active_one_stays(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    for n in range(40):
        append(log, b"record %d" % n)
    first, *_, last = log.files()
    view = log.view(first)
    log.drop_before(last)
    assert log.files() == [last]
    log.drop_before(last + 1000)
    assert log.files() == [last]
    with pytest.raises(KeyError):
        log.view(first)
    assert bytes(view[HEADER : HEADER + 4]) == frame(b"record 0")[:4], "a view outlives its file"
    found = scan(fs, directory, TINY)
    assert found.damage == []
    assert bodies(found) == [b"record %d" % n for n in range(40)][-len(bodies(found)) :]


def test_reading_can_begin_where_a_snapshot_ends(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    positions = []
    for n in range(40):
        data = frame(b"record %d" % n)
        positions.append(log.append([data], len(data), 1, sync=True))
    for n in (0, 17, 39):
        found = scan(fs, directory, TINY, start=positions[n])
        assert bodies(found) == [b"record %d" % m for m in range(n, 40)]
        assert found.damage == []
    found = scan(fs, directory, TINY, start=positions[17])
    older = [number for number in log.files() if number < positions[17].file]
    assert (found.older, found.strays) == (older, [])
    again = AppendLog.open(fs, directory, TINY, found=found, file_bytes=512)
    assert again.files()[: len(older) + 1] == [*older, positions[17].file]
    assert bodies(scan(fs, directory, TINY, start=positions[0])) == [b"record %d" % n for n in range(40)]
    again.drop_before(positions[17].file)
    assert again.files()[0] == positions[17].file
    assert names(fs, directory)[1:] == [f"wal-{number:016d}.log" for number in again.files()]


def test_a_snapshot_ahead_of_the_log_is_damage(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    append(log, b"x")
    found = scan(fs, directory, TINY, start=LogPosition(99, 0))
    assert [damage.file for damage in found.damage] == [99]


def test_a_directory_without_a_log_is_empty(fs: FileSystem, directory: str) -> None:
    found = scan(fs, directory, TINY)
    assert found.files == []
    assert found.damage == []
    assert found.end == (0, 0)
    repair_tail(fs, found)


def test_a_mark_confirms_durable_data_once(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    assert not log.wants_mark
    append(log, b"x", sync=False)
    assert not log.wants_mark
    log.sync()
    assert log.wants_mark
    log.mark()
    assert not log.wants_mark
    end = log.end
    log.mark()
    assert log.end == end
    assert append(log, b"y")
    assert bodies(scan(fs, directory, TINY)) == [b"x", b"y"]


def test_syncs_are_counted(fs: FileSystem, directory: str) -> None:
    log = open_log(fs, directory)
    append(log, b"x", sync=False)
    append(log, b"y", sync=True)
    log.sync()
    assert log.syncs == 1
    assert log.is_durable
    assert log.durable_end == log.end


def test_the_first_number_can_be_chosen() -> None:
    disk = FakeDisk()
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=512, next_frame=700)
    assert log.end.file == 700
    assert disk.read(f"{DIRECTORY}/CURRENT") == b"wal-0000000000000700.log\n"


def test_a_log_that_cannot_be_opened_raises_an_error() -> None:
    disk = FakeDisk()
    disk.make_dirs("/data")
    file = disk.create(DIRECTORY)
    file.close()
    with pytest.raises(PenstockError):
        open_log(disk)


def test_a_rotation_waits_for_the_file_that_is_being_prepared(tmp_path: Path) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    class SlowDisk(OsFileSystem):
        def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
            made.append(path)
            if len(made) == 2:
                begun.set()
                assert go_on.wait(30)
            super().allocate(path, size)

    log = open_log(SlowDisk(), str(tmp_path))
    preparing = threading.Thread(target=log.prepare_next)
    preparing.start()
    assert begun.wait(30)
    rotating = threading.Thread(target=log.rotate)
    rotating.start()
    go_on.set()
    preparing.join()
    rotating.join()
    assert len(made) == 2
    assert log.rotations == 1
    log.close()


def test_a_file_that_cannot_be_prepared_is_created_when_needed() -> None:
    disk = FakeDisk()
    log = open_log(disk)
    disk.plan = PlannedFault(call=len(disk.calls), kind=DiskFault.NO_SPACE)
    with pytest.raises(StorageFull):
        log.prepare_next()
    with pytest.raises(StorageFull):
        log.rotate()
    assert log.room > 0, "what fits into the old file still goes there"
    disk.plan = None
    log.rotate()
    assert append(log, b"x")
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"x"]


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("has_extent", [False, True])
def test_a_device_that_fills_up_at_any_call_of_a_rotation_leaves_the_reserve(
    has_extent: bool, power_cut: bool
) -> None:
    for call in itertools.count():
        disk = FillingDisk()
        extent = ExtentFile(disk, DIRECTORY) if has_extent else None
        log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1024, extent=extent)
        written = [b"before"]
        while log.room >= len(frame(written[0])):
            assert append(log, written[0])
            written.append(written[0])
        disk.plan = PlannedFault(call=len(disk.calls) + call, kind=DiskFault.NO_SPACE)
        written[-1] = b"delete"
        data = frame(b"delete")
        log.append([data], len(data), 1, sync=True, urgent=True)
        is_rotated = log.rotations == 1
        found = scan(disk.crash(Survival.NOTHING) if power_cut else disk, DIRECTORY, TINY)
        assert (bodies(found), found.damage) == (written, []), f"full from call {call} on"
        if not power_cut:
            disk.plan = None
            log.rotate()
            assert append(log, b"after")
            assert bodies(scan(disk, DIRECTORY, TINY)) == [*written, b"after"]
            assert not [name for name in names(disk, DIRECTORY) if name.startswith(("CURRENT.", "EXTENT."))]
        if is_rotated:
            break
    assert call > (8 if has_extent else 5), "the device was full at every call"


def test_a_log_file_that_could_not_be_started_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = OsFileSystem()
    log = AppendLog.open(fs, str(tmp_path), TINY, file_bytes=512, extent=ExtentFile(fs, str(tmp_path)))
    create = fs.create

    def create_or_not(path: str) -> WritableFile:
        if "CURRENT." in path:
            raise StorageFull("no space")
        return create(path)

    monkeypatch.setattr(fs, "create", create_or_not)
    with pytest.raises(StorageFull) as kept:
        log.rotate()
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert [file for file in files if str(tmp_path) in file and "deleted" in file] == []
    assert kept.value.__traceback__ is not None
    log.close()


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_log_opens_with_a_small_file_and_continues_in_full_ones() -> None:
    disk = FakeDisk()
    log = open_log(disk, file_bytes=5 * 1024**2)
    assert disk.stat(f"{DIRECTORY}/wal-{log.end.file:016d}.log").size == 4 * 1024**2
    assert log.wants_next
    log.prepare_next()
    log.rotate()
    assert disk.stat(f"{DIRECTORY}/wal-{log.end.file:016d}.log").size == 5 * 1024**2
    assert not log.wants_next


class _WatchedDisk(FakeDisk):
    """Records which files were only reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: list[bool] = []

    def allocate(self, path: str, size: int, *, reserve_only: bool = False) -> None:
        self.reserved.append(reserve_only)
        super().allocate(path, size, reserve_only=reserve_only)


def test_after_large_appends_the_next_file_is_reserved_and_not_filled() -> None:
    disk = _WatchedDisk()
    log = open_log(disk, file_bytes=5 * 1024**2)
    assert append(log, b"x" * 1024**2)
    log.prepare_next()
    log.rotate()
    assert append(log, b"x" * 1024**2)
    assert append(log, b"y")
    assert append(log, b"z")
    log.prepare_next()
    log.rotate()
    log.prepare_next()  # a file without an append gives no estimate
    assert disk.reserved == [False, True, False, False]
    assert bodies(scan(disk, DIRECTORY, TINY)) == [b"x" * 1024**2, b"x" * 1024**2, b"y", b"z"]
