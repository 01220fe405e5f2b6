from __future__ import annotations

from pathlib import Path

import pytest

from penstock.buffer.config import ConsumerConfig
from penstock.cli.output import Status
from penstock.cli.store_health import check_directory, check_store, clock_check, room_check
from penstock.errors import Unavailable
from penstock.objects import Data, MemoryStore, Version
from penstock.storage.fs.posix import filesystem_of

MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("skew_ms", "status"), [(0, "ok"), (-50_000, "ok"), (3 * MINUTE_MS, "warn"), (-3 * MINUTE_MS, "warn")]
)
def test_a_clock_more_than_a_minute_off_is_reported(skew_ms: int, status: str) -> None:
    now_ms = 1_700_000_000_000
    assert clock_check(now_ms - skew_ms, now_ms, now_ms + 20).status.value == status


@pytest.mark.parametrize(("free", "status"), [(10**6, "fail"), (5 * 10**8, "warn"), (10**11, "ok")])
def test_a_full_disk_fails_and_a_nearly_full_one_warns(free: int, status: str) -> None:
    assert room_check(free, 10**12).status.value == status


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/b /run/data xfs rw 0 0\n"
    assert filesystem_of("/run/data/x", mounts) == "xfs"
    assert filesystem_of("/run/database", mounts) == "tmpfs"
    assert filesystem_of("/home", mounts) == "ext4"


def test_a_directory_that_is_missing_is_a_warning_and_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_directory(str(tmp_path / "new" / "er"))[0].status is Status.WARN
    assert check_directory(str(tmp_path / "file"))[0].status is Status.FAIL


async def test_a_healthy_store_is_not_changed(tmp_path: Path) -> None:
    checks = await check_store(ConsumerConfig(store=str(tmp_path)))
    assert [check for check in checks if check.status is Status.FAIL] == []
    assert {check.name for check in checks} >= {"store", "conditional writes", "clock", "manifest", "fsync"}
    assert [path for path in (tmp_path / "ingest").rglob("*") if path.is_file()] == []


class Careless(MemoryStore):
    """Overwrite in spite of the condition."""

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        return await self.put(key, data)


class Unreachable(MemoryStore):
    async def put(self, key: str, data: Data) -> Version:
        raise Unavailable("no connection")


async def test_a_store_that_ignores_conditions_fails() -> None:
    checks = {check.name: check for check in await check_store(ConsumerConfig(store=Careless()))}
    assert checks["conditional writes"].status is Status.FAIL
    assert checks["store"].status is Status.OK


async def test_an_unreachable_store_fails_with_the_attempted_operation() -> None:
    (check,) = await check_store(ConsumerConfig(store=Unreachable()))
    assert check.status is Status.FAIL
    assert "put failed: no connection" in check.text
    assert check.advice
