from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.quiver.engine_doubles import config, rows

from penstock.metrics import Registry
from penstock.quiver import AsyncQuiver, AtCapacity, Closed


async def opened(path: Path, **sections: dict[str, object]) -> AsyncQuiver:
    quiver = await AsyncQuiver.open(str(path), config(**sections), registry=Registry())
    await quiver.register("lake")
    await quiver.activate("lake")
    return quiver


async def test_many_tasks_write_and_one_reads(tmp_path: Path) -> None:
    async with await opened(tmp_path) as quiver:
        receipts = await asyncio.gather(*(quiver.ingest(rows(n * 10), signal="logs") for n in range(60)))
        assert sorted(receipt.wal_seq for receipt in receipts) == list(range(1, 61))
        await quiver.flush()
        given = []
        while (bundle := await quiver.next_bundle("lake")) is not None:
            given.append(bundle.batch.column("n")[0].as_py())
            bundle.ack()
        assert sorted(given) == [n * 10 for n in range(60)]
        assert [one.acked for one in quiver.subscribers()] == [60]


async def test_a_waiting_reader_is_woken_by_the_next_segment(tmp_path: Path) -> None:
    async with await opened(tmp_path) as quiver:
        waiting = asyncio.create_task(quiver.next_bundle("lake", timeout=None))
        await asyncio.sleep(0)
        await quiver.ingest_raw(b"request", "logs")
        await quiver.flush()
        bundle = await waiting
        assert bundle is not None
        assert bundle.slot == 60
        bundle.ack()


async def test_a_waiting_reader_gets_none_on_close(tmp_path: Path) -> None:
    quiver = await opened(tmp_path)
    waiting = asyncio.create_task(quiver.next_bundle("lake", timeout=None))
    await asyncio.sleep(0)
    await quiver.close()
    assert await waiting is None
    with pytest.raises(Closed):
        await quiver.ingest(rows(1))


async def test_a_cap_is_reported_without_blocking_the_loop(tmp_path: Path) -> None:
    async with await opened(tmp_path, retention={"size_cap": 70_000}) as quiver:
        with pytest.raises(AtCapacity):  # noqa: PT012
            for n in range(500):
                await quiver.ingest(rows(n * 10, 50))
        assert quiver.stats().disk_bytes <= 70_000


async def test_a_cancelled_task_does_not_disturb_the_others(tmp_path: Path) -> None:
    async with await opened(tmp_path) as quiver:
        task = asyncio.create_task(quiver.ingest(rows(1)))
        await asyncio.sleep(0)
        task.cancel()
        await quiver.ingest(rows(10))
        with pytest.raises(asyncio.CancelledError):
            await task
