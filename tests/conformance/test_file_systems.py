"""Every file system keeps the one contract: the machine's own and the one that can lose power."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import Conflict, Corrupt, InvalidInput, NotFound
from penstock.storage import DirectoryLock, FileSystem, LockHeld, OsFileSystem, write_durably
from penstock.testing.disk import FakeDisk


@pytest.fixture(params=["os", "fake"])
def fs(request: pytest.FixtureRequest) -> FileSystem:
    return OsFileSystem() if request.param == "os" else FakeDisk()


@pytest.fixture
def root(fs: FileSystem, tmp_path: Path) -> str:
    path = str(tmp_path / "made" / "here")
    fs.make_dirs(path)
    return path


def write(fs: FileSystem, path: str, *buffers: bytes) -> None:
    file = fs.create(path)
    file.write(buffers)
    file.datasync()
    file.close()
    file.close()


def test_a_file_reads_back_whole_and_in_parts(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"01234", b"", b"56789")
    assert fs.read(f"{root}/f") == b"0123456789"
    assert fs.read(f"{root}/f", 3, 4) == b"3456"
    assert fs.read(f"{root}/f", 8, 100) == b"89"
    assert fs.read(f"{root}/f", 8) == b"89"
    assert fs.read(f"{root}/f", 50, 5) == b""
    assert fs.read(f"{root}/f", None, 3) == b"789"
    assert fs.read(f"{root}/f", None, 99) == b"0123456789"
    assert fs.stat(f"{root}/f").size == 10
    assert not fs.stat(f"{root}/f").is_dir
    assert fs.stat(root).is_dir


def test_more_buffers_than_one_system_call_takes(fs: FileSystem, root: str) -> None:
    parts = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    write(fs, f"{root}/f", *parts)
    assert fs.read(f"{root}/f") == b"".join(parts)


def test_create_does_not_replace(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"old")
    with pytest.raises(Conflict):
        fs.create(f"{root}/f")
    assert fs.read(f"{root}/f") == b"old"


def test_rename_replaces(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/a", b"a")
    write(fs, f"{root}/b", b"b")
    fs.rename(f"{root}/a", f"{root}/b")
    fs.sync_dir(root)
    assert fs.read(f"{root}/b") == b"a"
    assert [name for name, _ in fs.list_files(root)] == ["b"]


def test_what_is_missing_is_not_found(fs: FileSystem, root: str) -> None:
    missing = f"{root}/missing"
    for call in (
        lambda: fs.read(missing),
        lambda: fs.stat(missing),
        lambda: fs.unlink(missing),
        lambda: fs.rename(missing, f"{root}/x"),
        lambda: fs.sync_dir(missing),
        lambda: fs.create(f"{missing}/f"),
        lambda: fs.allocate(f"{missing}/f", 10),
        lambda: fs.open_log(missing),
        lambda: fs.open_append(missing, 0),
        lambda: fs.map(missing),
        lambda: fs.open_view(missing),
        lambda: fs.truncate(missing, 0),
        lambda: fs.remove_dir(missing),
        lambda: fs.free_bytes(missing),
    ):
        with pytest.raises(NotFound, match="missing"):
            call()
    assert fs.list_files(missing) == []


def test_files_and_directories_are_not_mixed_up(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/file", b"x")
    fs.make_dirs(f"{root}/dir/deep")
    fs.make_dirs(f"{root}/dir/deep")
    for call in (
        lambda: fs.read(f"{root}/dir"),
        lambda: fs.read(f"{root}/file/below"),
        lambda: fs.make_dirs(f"{root}/file"),
        lambda: fs.make_dirs(f"{root}/file/below"),
        lambda: fs.rename(f"{root}/file", f"{root}/dir"),
        lambda: fs.unlink(f"{root}/dir"),
        lambda: fs.map(f"{root}/dir"),
        lambda: fs.open_view(f"{root}/dir"),
        lambda: fs.open_log(f"{root}/dir"),
        lambda: fs.open_append(f"{root}/dir", 0),
        lambda: fs.truncate(f"{root}/dir", 0),
        lambda: fs.remove_dir(f"{root}/file"),
        lambda: fs.remove_dir(f"{root}/dir"),
    ):
        with pytest.raises(InvalidInput):
            call()
    assert fs.list_files(f"{root}/file") == []


def test_files_are_listed_deep_in_order_without_directories(fs: FileSystem, root: str) -> None:
    fs.make_dirs(f"{root}/a/b")
    fs.make_dirs(f"{root}/empty")
    for name in ("z", "a/b/c", "a/x", "a.txt"):
        write(fs, f"{root}/{name}", name.encode())
    assert [(name, stat.size) for name, stat in fs.list_files(root)] == [
        ("a.txt", 5), ("a/b/c", 5), ("a/x", 3), ("z", 1),
    ]  # fmt: skip


def test_a_lock_excludes_and_is_freed(fs: FileSystem, root: str) -> None:
    path = f"{root}/lock"
    with fs.lock(path), pytest.raises(LockHeld), fs.lock(path, wait=False):
        pass
    with fs.lock(path, wait=False):
        pass
    with pytest.raises(ZeroDivisionError), fs.lock(path):
        raise ZeroDivisionError
    with fs.lock(path, wait=False):
        pass


def test_shared_locks_exclude_only_exclusive_ones(fs: FileSystem, root: str) -> None:
    path = f"{root}/lock"
    with fs.lock(path, shared=True), fs.lock(path, shared=True, wait=False):
        assert_held(fs, path)
    with fs.lock(path, wait=False), pytest.raises(LockHeld), fs.lock(path, shared=True, wait=False):
        pass


def assert_held(fs: FileSystem, path: str) -> None:
    with pytest.raises(LockHeld), fs.lock(path, wait=False):
        pass


def test_a_data_directory_has_one_owner_which_is_named(fs: FileSystem, root: str) -> None:
    first, second = DirectoryLock(fs, f"{root}/data"), DirectoryLock(fs, f"{root}/data")
    with first, pytest.raises(LockHeld, match=f"process {os.getpid()} "), second:
        pass
    with second:
        pass
    with DirectoryLock(fs, f"{root}/data"):
        pass


def test_a_file_is_replaced_in_one_step(fs: FileSystem, root: str) -> None:
    fs.make_dirs(f"{root}/staging")
    write_durably(fs, f"{root}/f", [b"one"], staging=f"{root}/staging")
    write_durably(fs, f"{root}/f", [b"t", b"wo"], staging=f"{root}/staging")
    assert fs.read(f"{root}/f") == b"two"
    assert fs.list_files(f"{root}/staging") == []


def test_a_replacement_that_fails_leaves_no_remains(fs: FileSystem, root: str) -> None:
    fs.make_dirs(f"{root}/staging")
    fs.make_dirs(f"{root}/taken")
    with pytest.raises(InvalidInput):
        write_durably(fs, f"{root}/taken", [b"x"], staging=f"{root}/staging")
    assert fs.list_files(f"{root}/staging") == []


def test_the_lock_file_can_have_another_name_and_note(fs: FileSystem, root: str) -> None:
    first, second = (DirectoryLock(fs, f"{root}/data", name=".topics.lock", note="pid=") for _ in range(2))
    with first:
        assert fs.read(f"{root}/data/.topics.lock") == f"pid={os.getpid()}\n".encode()
        with pytest.raises(LockHeld, match=f"process {os.getpid()} "), second:
            pass
    with DirectoryLock(fs, f"{root}/data"), second:
        pass


def test_an_allocated_file_is_zeros_of_that_size_and_does_not_replace(fs: FileSystem, root: str) -> None:
    fs.allocate(f"{root}/log", 3_000_000)
    assert fs.stat(f"{root}/log").size == 3_000_000
    assert fs.read(f"{root}/log") == bytes(3_000_000)
    with pytest.raises(Conflict):
        fs.allocate(f"{root}/log", 10)
    assert fs.stat(f"{root}/log").size == 3_000_000
    fs.allocate(f"{root}/empty", 0)
    assert bytes(fs.map(f"{root}/empty")) == b""


def test_a_log_file_is_written_in_place(fs: FileSystem, root: str) -> None:
    fs.allocate(f"{root}/log", 100)
    log = fs.open_log(f"{root}/log")
    assert log.size == 100
    log.write_at(10, [b"abc", bytearray(b"def"), memoryview(b"ghi"), b""])
    log.datasync()
    log.write_durably_at(13, [b"DEF"])
    log.write_durably_at(97, [b"end"])
    log.write_at(50, [])
    log.close()
    log.close()
    expected = bytes(10) + b"abcDEFghi" + bytes(78) + b"end"
    assert fs.read(f"{root}/log") == expected
    other = fs.open_log(f"{root}/log")
    other.write_durably_at(0, [b"0"])
    other.close()
    assert fs.read(f"{root}/log") == b"0" + expected[1:]


def test_a_log_file_takes_more_buffers_than_one_system_call(fs: FileSystem, root: str) -> None:
    parts = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    size = sum(map(len, parts))
    fs.allocate(f"{root}/log", size)
    log = fs.open_log(f"{root}/log")
    log.write_durably_at(0, parts)
    assert fs.read(f"{root}/log") == b"".join(parts)
    log.write_at(0, parts[::-1])
    assert fs.read(f"{root}/log") == b"".join(parts[::-1])
    log.close()


def test_a_log_file_never_grows(fs: FileSystem, root: str) -> None:
    fs.allocate(f"{root}/log", 10)
    log = fs.open_log(f"{root}/log")
    for write in (log.write_at, log.write_durably_at):
        with pytest.raises(InvalidInput, match="past the end"):
            write(8, [b"123"])
    log.close()
    assert fs.read(f"{root}/log") == bytes(10)


def test_a_map_sees_later_writes_and_outlives_the_name(fs: FileSystem, root: str) -> None:
    fs.allocate(f"{root}/log", 10)
    view = fs.map(f"{root}/log")
    log = fs.open_log(f"{root}/log")
    log.write_at(2, [b"later"])
    assert bytes(view) == bytes(2) + b"later" + bytes(3)
    assert view.readonly
    fs.unlink(f"{root}/log")
    log.write_durably_at(0, [b"12"])
    assert bytes(view) == b"12later" + bytes(3)
    log.close()


def test_a_map_of_a_file_that_is_appended_to_keeps_its_size(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123456789")
    view = fs.map(f"{root}/f")
    file = fs.open_append(f"{root}/f", 10)
    file.write([b"more"])
    file.close()
    assert bytes(view) == b"0123456789"
    assert bytes(fs.map(f"{root}/f")) == b"0123456789more"


def test_a_view_sees_later_writes_and_outlives_the_name(fs: FileSystem, root: str) -> None:
    fs.allocate(f"{root}/log", 10)
    view = fs.open_view(f"{root}/log")
    log = fs.open_log(f"{root}/log")
    log.write_at(2, [b"later"])
    assert bytes(view[:]) == bytes(2) + b"later" + bytes(3)
    fs.unlink(f"{root}/log")
    log.write_durably_at(0, [b"12"])
    assert bytes(view[1:4]) == b"2la"
    assert view.read_exactly(0, 10) == b"12later" + bytes(3)
    assert view.bad == []
    log.close()


def test_a_view_keeps_its_size_when_the_file_grows_and_when_it_is_cut(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123456789")
    view = fs.open_view(f"{root}/f")
    file = fs.open_append(f"{root}/f", 10)
    file.write([b"more"])
    file.close()
    assert bytes(view[:]) == b"0123456789"
    fs.truncate(f"{root}/f", 4)
    assert bytes(view[2:8]) == b"23" + bytes(4)
    assert view.bad == [(4, 8)]


def test_a_file_is_continued_where_it_counts(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123456789")
    file = fs.open_append(f"{root}/f", 10)
    file.write([b"abc"])
    file.datasync()
    file.close()
    assert fs.read(f"{root}/f") == b"0123456789abc"
    file = fs.open_append(f"{root}/f", 4)
    assert fs.read(f"{root}/f") == b"0123", "the rest is cut off before anything is written"
    file.write([b"x", b"y"])
    file.datasync()
    file.close()
    assert fs.read(f"{root}/f") == b"0123xy"


def test_a_file_that_lost_its_end_is_not_continued(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123")
    with pytest.raises(Corrupt, match="has 4 bytes where at least 5"):
        fs.open_append(f"{root}/f", 5)
    assert fs.read(f"{root}/f") == b"0123"


def test_a_file_is_cut(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123456789")
    fs.truncate(f"{root}/f", 3)
    assert fs.read(f"{root}/f") == b"012"
    fs.allocate(f"{root}/log", 100)
    fs.truncate(f"{root}/log", 30)
    log = fs.open_log(f"{root}/log")
    assert log.size == 30
    log.close()


def test_an_empty_directory_is_removed(fs: FileSystem, root: str) -> None:
    fs.make_dirs(f"{root}/dir")
    fs.remove_dir(f"{root}/dir")
    fs.sync_dir(root)
    with pytest.raises(NotFound):
        fs.stat(f"{root}/dir")


def test_there_is_room(fs: FileSystem, root: str) -> None:
    assert fs.free_bytes(root) > 0


def test_a_protected_file_can_be_read_and_removed(fs: FileSystem, root: str) -> None:
    write(fs, f"{root}/f", b"0123")
    assert fs.protect(f"{root}/f")
    assert fs.read(f"{root}/f") == b"0123"
    fs.unlink(f"{root}/f")
    with pytest.raises(NotFound):
        fs.protect(f"{root}/f")
