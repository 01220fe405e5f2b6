from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.quiver.engine_doubles import config, rows, take_all

from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.quiver import Quiver
from penstock.storage import Buffer, LogFile, OsFileSystem


class _Log:
    """A log file whose syncs fail or wait as the test requests."""

    def __init__(self, file: LogFile, disk: Disk) -> None:
        self._file = file
        self._disk = disk

    @property
    def size(self) -> int:
        return self._file.size

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._file.write_at(offset, buffers)

    def write_durably_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self._disk.syncing(sum(map(len, buffers)))
        self._file.write_durably_at(offset, buffers)

    def datasync(self) -> None:
        self._disk.syncing(0)
        self._file.datasync()

    def close(self) -> None:
        self._file.close()


class Disk(OsFileSystem):
    def __init__(self) -> None:
        self.failures = 0
        self.syncs: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def open_log(self, path: str) -> LogFile:
        return _Log(super().open_log(path), self)

    def syncing(self, byte_count: int) -> None:
        self.gate.wait(10)
        self.syncs.append(byte_count)
        if self.failures and byte_count > 100:
            self.failures -= 1
            raise Unavailable("the disk does not sync")


def opened(disk: Disk, path: Path, **wal: object) -> Quiver:
    quiver = Quiver.open(str(path), config(wal=wal), fs=disk, registry=Registry(), maintenance=False)
    quiver.register("lake")
    return quiver


def test_a_failed_sync_is_reported_and_the_next_bundle_is_accepted(tmp_path: Path) -> None:
    disk = Disk()
    with opened(disk, tmp_path) as quiver:
        quiver.ingest(rows(1))
        disk.failures = 1
        with pytest.raises(Unavailable, match="does not sync"):
            quiver.ingest(rows(10))
        quiver.ingest(rows(20))
        quiver.flush()
        assert [values[0] for _, values in take_all(quiver, "lake")] == [1, 20]
    with opened(disk, tmp_path) as quiver:
        assert [values[0] for _, values in take_all(quiver, "lake")] == [1, 20]


def test_waiting_writers_share_the_next_sync(tmp_path: Path) -> None:
    disk = Disk()
    with opened(disk, tmp_path) as quiver:
        disk.gate.clear()
        threads = [threading.Thread(target=quiver.ingest, args=(rows(n * 10),)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        while quiver.stats().next_wal_seq < 9:
            threading.Event().wait(0.001)
        before = len(disk.syncs)
        disk.gate.set()
        for thread in threads:
            thread.join()
        assert len([size for size in disk.syncs[before:] if size > 100]) <= 3


def test_always_syncs_every_bundle_separately(tmp_path: Path) -> None:
    disk = Disk()
    with opened(disk, tmp_path, flush="always") as quiver:
        disk.gate.clear()
        threads = [threading.Thread(target=quiver.ingest, args=(rows(n * 10),)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        while quiver.stats().next_wal_seq < 9:
            threading.Event().wait(0.001)
        before = len(disk.syncs)
        disk.gate.set()
        for thread in threads:
            thread.join()
        assert len([size for size in disk.syncs[before:] if size > 100]) == 8


@pytest.mark.parametrize(("flush", "syncs"), [("interval", True), ("none", False)])
def test_without_a_sync_the_receipt_comes_after_the_write(tmp_path: Path, flush: str, syncs: bool) -> None:
    disk = Disk()
    with opened(disk, tmp_path, flush=flush, flush_interval="10ms") as quiver:
        before = len(disk.syncs)
        disk.gate.clear()
        quiver.ingest(rows(1))
        disk.gate.set()
        waited = 0.0
        while syncs and not disk.syncs[before:] and waited < 5:
            threading.Event().wait(0.01)
            waited += 0.01
        threading.Event().wait(0.05)
        assert bool(disk.syncs[before:]) is syncs, "an idle tail is synced by a timer, or never"


def test_writers_get_a_result_during_close(tmp_path: Path) -> None:
    disk = Disk()
    quiver = opened(disk, tmp_path)
    answers: list[str] = []

    def write(n: int) -> None:
        try:
            quiver.ingest(rows(n * 10))
            answers.append("accepted")
        except PenstockError as error:
            answers.append(type(error).__name__)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    quiver.close()
    for thread in threads:
        thread.join()
    assert set(answers) <= {"accepted", "Closed"}
    with opened(disk, tmp_path) as again:
        assert len(take_all(again, "lake")) == answers.count("accepted")
