"""A fault at every storage call of a time-series database, and a crash that keeps any batches."""

from __future__ import annotations

import asyncio

import pytest
from tests.crash.timeseries.numbered_writes import left, write
from tests.unit.timeseries.database_doubles import disk, opened

from penstock.coordinator import CoordinatorError, Durability, WriteHandle
from penstock.errors import OutcomeUnknown
from penstock.testing.memory_storage import MemoryStorage, StorageFault

WRITES = 8


async def one_life(storage: MemoryStorage, fold_samples: int = 1) -> int:
    """Continue after the stored sequence, and compact at every other flush. Return the number of durable
    writes."""
    try:
        database = await opened(storage, fold_blocks=2, fold_samples=fold_samples)
    except OutcomeUnknown:
        return 0
    handles: list[WriteHandle] = []
    begun = 0
    try:
        begun = (
            (await database.stored_sequence() or 0) + 1
            if database._directory.source.position is not None
            else 0
        )
        for number in range(begun, WRITES):
            handles.append(await database.write(write(number), sequence=number))
            if number % 2:
                await (await database.flush()).wait()
        await database.close()
    except CoordinatorError:
        pass
    return begun + await durable(handles)


async def durable(handles: list[WriteHandle]) -> int:
    for count, handle in enumerate(handles):
        try:
            async with asyncio.timeout(5):
                await handle.wait(Durability.DURABLE)
        except CoordinatorError:
            return count
    return len(handles)


async def calls_of_a_whole_life() -> int:
    storage = disk().open()
    assert await one_life(storage) == WRITES
    return len(storage.calls)


CALLS = asyncio.run(calls_of_a_whole_life())


def test_a_life_without_faults_makes_enough_calls_to_sweep() -> None:
    assert CALLS >= 12


@pytest.mark.parametrize("fold_samples", [1, 1000])
@pytest.mark.parametrize("fault", StorageFault)
@pytest.mark.parametrize("call", range(1, CALLS + 1))
async def test_whatever_fails_durable_writes_stay_whole_and_work_continues(
    call: int, fault: StorageFault, fold_samples: int
) -> None:
    for kept in range(4):
        there = disk()
        storage = there.open()
        storage.fail_at(call, fault)
        acknowledged = await one_life(storage, fold_samples)
        survivor = there.open(kept=kept)
        database = await opened(survivor, fold_blocks=2)
        assert await left(database) >= acknowledged
        await database.close()
        assert await one_life(there.open()) == WRITES
        last = await opened(there.open())
        assert await left(last) == WRITES
        await last.close()
