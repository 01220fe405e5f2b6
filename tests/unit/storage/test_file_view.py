"""Reading a file in pieces, even where the device fails or the file was truncated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.unit.storage.log_doubles import DIRECTORY, TINY, bodies, frame

from penstock.errors import MediaError
from penstock.storage import AppendLog, scan
from penstock.storage.fs import FileView, OsFileSystem
from penstock.testing.disk import FakeDisk

DATA = bytes(range(256)) * 64


@pytest.fixture
def disk() -> FakeDisk:
    disk = FakeDisk()
    disk.make_dirs("/d")
    file = disk.create("/d/f")
    file.write([DATA])
    file.close()
    return disk


def test_only_the_pages_with_a_bad_sector_are_zeros(disk: FakeDisk) -> None:
    disk.spoil("/d/f", 5000, 5001)
    disk.spoil("/d/f", 12_288, 12_300)
    view = disk.open_view("/d/f")
    data = view.read(100, len(DATA))
    assert data[: 4096 - 100] == DATA[100:4096]
    assert data[4096 - 100 : 5000 - 100] == DATA[4096:5000], "what is before it in the page can be read here"
    assert data[5000 - 100 : 8192 - 100] == bytes(8192 - 5000)
    assert data[8192 - 100 : 12_288 - 100] == DATA[8192:12_288]
    assert data[12_288 - 100 :] == bytes(len(DATA) - 12_288)
    assert view.bad == [(5000, 8192), (12_288, 16_384)]
    assert bytes(view[0:4096]) == DATA[:4096]
    assert view.read_exactly(8192, 12_288) == DATA[8192:12_288]
    with pytest.raises(MediaError, match="/d/f, bytes 5000 to 6000"):
        view.read_exactly(4096, 6000)


def test_a_file_that_is_truncated_while_it_is_read_returns_zeros(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA)
    view = OsFileSystem().open_view(str(path))
    os.truncate(path, 1000)
    assert len(view) == len(DATA)
    assert view.read(900, 1100) == DATA[900:1000] + bytes(100)
    assert view.bad == [(1000, 1100)]
    with pytest.raises(MediaError):
        view.read_exactly(900, 1100)


def test_a_device_error_is_retried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA)
    view, pread, failures = OsFileSystem().open_view(str(path)), os.pread, [1]

    def failing(fd: int, length: int, offset: int) -> bytes:
        if failures and failures.pop():
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert view.read(0, 10) == DATA[:10]
    assert view.bad == []


def test_a_permanent_device_error_costs_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA)
    view, pread = OsFileSystem().open_view(str(path)), os.pread

    def failing(fd: int, length: int, offset: int) -> bytes:
        if 4096 <= offset < 8192:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, min(length, 4096 - offset) if offset < 4096 else length, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert view.read(0, len(DATA)) == DATA[:4096] + bytes(4096) + DATA[8192:]
    assert view.bad == [(4096, 8192)]


def test_a_log_with_a_bad_sector_at_its_end_is_damaged_and_not_cut() -> None:
    disk = FakeDisk()
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1 << 16)
    for number in range(40):
        # No mark confirms these frames, so only the device error shows the damage.
        log.append([numbered(number)], len(numbered(number)), 1, sync=False)
    path, end = f"{DIRECTORY}/wal-{log.end.file:016d}.log", log.end.offset
    log.close()
    disk.spoil(path, 9000, 9001)
    found = scan(disk, DIRECTORY, TINY)
    (damage,) = found.damage
    assert damage.start < 9000 < 12_288 <= (damage.end or 0)
    assert "the device cannot read bytes 9000 to 12288" in damage.reason
    assert found.end.offset >= end
    again = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1 << 16, found=found)
    again.append([numbered(99)], len(numbered(99)), 1, sync=True)
    again.close()
    kept = bodies(scan(disk, DIRECTORY, TINY))
    assert numbered(99)[5:-8] in kept
    assert len(kept) >= 10


def test_a_bad_sector_after_the_end_of_a_log_is_not_damage() -> None:
    disk = FakeDisk()
    log = AppendLog.open(disk, DIRECTORY, TINY, file_bytes=1 << 16)
    log.append([numbered(1)], len(numbered(1)), 1, sync=True)
    log.close()
    disk.spoil(f"{DIRECTORY}/wal-{log.end.file:016d}.log", 30_000, 30_001)
    found = scan(disk, DIRECTORY, TINY)
    assert found.damage == []
    assert len(bodies(found)) == 1


def numbered(number: int) -> bytes:

    return frame(b"%04d" % number + bytes([number]) * 500)


def test_views_of_one_file_share_its_damage(disk: FakeDisk) -> None:
    disk.spoil("/d/f", 0, 1)
    view = disk.open_view("/d/f")
    part: FileView = view.until(100)
    assert len(part) == 100
    assert part.read(0, 100) == bytes(100)
    assert view.bad == [(0, 100)]
