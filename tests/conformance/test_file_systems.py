"""Every file system keeps the one contract: the machine's own and the one that can lose power."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import Conflict, InvalidInput, NotFound
from penstock.files import DirectoryLock, FileSystem, LockHeld, OsFileSystem, write_durably
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


def test_a_data_directory_has_one_owner_who_is_named(fs: FileSystem, root: str) -> None:
    first, second = DirectoryLock(fs, f"{root}/data"), DirectoryLock(fs, f"{root}/data")
    with first, pytest.raises(LockHeld, match=f"process {os.getpid()};"), second:
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


def test_a_replacement_that_fails_leaves_nothing_behind(fs: FileSystem, root: str) -> None:
    fs.make_dirs(f"{root}/staging")
    fs.make_dirs(f"{root}/taken")
    with pytest.raises(InvalidInput):
        write_durably(fs, f"{root}/taken", [b"x"], staging=f"{root}/staging")
    assert fs.list_files(f"{root}/staging") == []
