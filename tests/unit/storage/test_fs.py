"""The local file system: errors that say what to do, and complete writes."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    PermissionDenied,
    StorageFull,
    Unavailable,
    Unsupported,
)
from penstock.storage.fs import LogFile, OsFileSystem, explain, posix, publish, stage


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.ENOENT, NotFound),
        (errno.EACCES, PermissionDenied),
        (errno.EPERM, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EEXIST, Conflict),
        (errno.EISDIR, InvalidInput),
        (errno.ENAMETOOLONG, InvalidInput),
        (errno.EXDEV, Unsupported),
        (errno.EIO, Unavailable),
        (errno.EMFILE, Unavailable),
    ],
)
def test_a_failed_call_reports_the_operation_the_path_and_the_remedy(
    number: int, kind: type[PenstockError]
) -> None:
    error = explain(OSError(number, "x"), "/some/path", "read")
    assert type(error) is kind
    assert str(error).startswith(f"cannot read /some/path: {os.strerror(number)}; ")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def stingy(fd: int, buffers: Sequence[memoryview]) -> int:
        return real(fd, [b"".join(buffers)[:3]])

    monkeypatch.setattr(os, "writev", stingy)
    file = OsFileSystem().create(str(tmp_path / "f"))
    file.write([b"0", b"1234567", bytearray(b"89"), memoryview(b"abc"), b""])
    file.close()
    assert (tmp_path / "f").read_bytes() == b"0123456789abc"


def test_a_file_that_cannot_grow_is_removed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(Unavailable, match="File too large"):
            stage(OsFileSystem(), str(tmp_path / "f"), [b"x" * 20_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_datasync_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def broken(fd: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(Unavailable):
        stage(OsFileSystem(), str(tmp_path / "f"), [b"x"])
    assert calls == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failed_directory_sync_after_the_rename_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = OsFileSystem()
    stage(fs, str(tmp_path / "staged"), [b"x"])
    monkeypatch.setattr(os, "fsync", _fail)
    with pytest.raises(OutcomeUnknown):
        publish(fs, str(tmp_path / "staged"), str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == b"x"


def _fail(fd: int) -> None:
    raise OSError(errno.EIO, "x")


def test_a_closed_file_is_not_written(tmp_path: Path) -> None:
    file = OsFileSystem().create(str(tmp_path / "f"))
    file.close()
    with pytest.raises(InvalidInput, match="closed"):
        file.write([b"x"])


def test_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [name for name, _ in OsFileSystem().list_files(str(tmp_path))] == ["real/f"]


def test_a_read_of_a_replaced_file_returns_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old" * 10)
    (tmp_path / "g").write_bytes(b"new" * 100)
    real = os.fstat

    def replaced_meanwhile(fd: int) -> os.stat_result:
        info = real(fd)
        if (tmp_path / "g").exists():
            os.rename(tmp_path / "g", path)
        return info

    monkeypatch.setattr(os, "fstat", replaced_meanwhile)
    assert OsFileSystem().read(str(path)) == b"old" * 10


def log_file(tmp_path: Path, size: int = 100) -> LogFile:
    OsFileSystem().allocate(str(tmp_path / "log"), size)
    return OsFileSystem().open_log(str(tmp_path / "log"))


def test_short_writes_in_place_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def stingy(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        return real(fd, [b"".join(buffers)[:3]], offset, flags)

    log = log_file(tmp_path)
    monkeypatch.setattr(os, "pwritev", stingy)
    log.write_at(10, [b"0", b"1234567", bytearray(b"89"), memoryview(b"abc"), b""])
    log.write_durably_at(50, [b"0123456789"])
    log.close()
    data = (tmp_path / "log").read_bytes()
    assert data[10:23] == b"0123456789abc"
    assert data[50:60] == b"0123456789"


def test_where_writes_cannot_sync_themselves_a_sync_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.pwritev, []

    def old_kernel(fd: int, buffers: Sequence[bytes], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "x")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", old_kernel)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = log_file(tmp_path)
    synced.clear()
    log.write_durably_at(0, [b"abc"])
    log.close()
    assert len(synced) == 1
    assert (tmp_path / "log").read_bytes()[:4] == b"abc\0"


def test_a_failed_write_in_place_reports_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "x")

    log = log_file(tmp_path)
    monkeypatch.setattr(os, "pwritev", broken)
    monkeypatch.setattr(os, "fdatasync", broken)
    for call in (
        lambda: log.write_at(0, [b"x"]),
        lambda: log.write_durably_at(0, [b"x"]),
        log.datasync,
    ):
        with pytest.raises(Unavailable, match="check the device"):
            call()
    log.close()
    with pytest.raises(InvalidInput, match="closed"):
        log.write_at(0, [b"x"])


def test_a_file_that_cannot_be_allocated_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(StorageFull):
        OsFileSystem().allocate(str(tmp_path / "log"), 100)
    assert list(tmp_path.iterdir()) == []


def test_where_space_cannot_be_reserved_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "x")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    OsFileSystem().allocate(str(tmp_path / "log"), 3_000_000, reserve_only=True)
    assert (tmp_path / "log").read_bytes() == bytes(3_000_000)


def test_a_file_whose_space_cannot_be_reserved_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull):
        OsFileSystem().allocate(str(tmp_path / "log"), 100, reserve_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_name_could_not_be_synced_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EIO, path)

    with monkeypatch.context() as broken:
        broken.setattr(posix, "_sync_dir", fail)
        with pytest.raises(PenstockError):
            OsFileSystem().make_dirs(str(tmp_path / "data"))
    assert not (tmp_path / "data").exists()


def test_a_directory_of_another_process_stays_when_its_name_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "data"
    seen = iter([False, True])
    made.mkdir()
    monkeypatch.setattr(posix.os.path, "isdir", lambda path: str(path) != str(made) or next(seen))

    def fail(path: str) -> None:
        raise OSError(errno.EIO, path)

    monkeypatch.setattr(posix, "_sync_dir", fail)
    with pytest.raises(PenstockError):
        OsFileSystem().make_dirs(str(made))
    assert made.exists()
