"""A fault or a crash at every storage call, after which any number of unflushed batches survive.

The writes come from a numbered list, as from a queue: write n sets the position to n. In every case, a
reopened collection holds exactly the writes up to its position, including all durable ones.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from tests.crash.vector.numbered_writes import SMALL, SOURCE, TIGHT, WRITES, check
from tests.unit.vector.doubles import World

from penstock.coordinator import (
    CoordinatorError,
    Delete,
    Durability,
    Merge,
    Operation,
    Put,
    WriteHandle,
)
from penstock.errors import PenstockError
from penstock.testing.memory_storage import MemoryStorage, StorageFault
from penstock.vector import Vector
from penstock.vector.flush import VectorFlusher
from penstock.vector.inverted_lists import InvertedLists
from penstock.vector.keys import RecordType, record_type
from penstock.vector.rows import Rows


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TIGHT.items():
        monkeypatch.setattr(name, value)


async def one_life(world: World, storage: MemoryStorage) -> int:
    """Continue after the stored position. Return the last durable position."""
    try:
        store = await world.open(storage)
    except PenstockError:
        return -1
    await check(store)
    begin = -1 if store.position is None else store.position
    handles: list[WriteHandle] = []
    try:
        for number, write in enumerate(SOURCE[begin + 1 :], begin + 1):
            handles.append(await store.write(write))
            if number % 2:
                await store.flush(durable=number % 4 == 1)
        await store.close()
    except CoordinatorError:
        pass
    durable = begin
    for place, handle in enumerate(handles, begin + 1):
        try:
            async with asyncio.timeout(1):
                await handle.wait(Durability.DURABLE)
        except CoordinatorError:
            break
        durable = place
    await store.abort()
    return durable


def world() -> World:
    return World(dataclasses.replace(SMALL, sync_mode="explicit"))


async def calls_of_a_whole_life() -> int:
    here = world()
    storage = here.disk.open()
    assert await one_life(here, storage) == WRITES - 1
    return len(storage.calls)


with pytest.MonkeyPatch.context() as patched:
    for place, limit in TIGHT.items():
        patched.setattr(place, limit)
    CALLS = asyncio.run(calls_of_a_whole_life())


def test_a_life_without_faults_makes_enough_calls_to_sweep() -> None:
    assert CALLS >= 15


async def test_the_life_that_is_swept_does_everything_that_a_flush_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It splits, dissolves and rewrites lists, drops deletions, rewrites the index, and compacts the rows."""
    done: set[str] = set()

    def noting(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def noted(*args: object) -> object:
            made = work(*args)
            if made or name in ("_drop", "_rewrite", "compacted"):
                done.add(name)
            return made

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        *((InvertedLists, each) for each in ("_cut", "_drop", "_rewrite")),
        *((VectorFlusher, each) for each in ("_overdue", "_deletions_of_records")),
        (Rows, "compacted"),
    ):
        noting(owner, name)
    here = world()
    storage = here.disk.open()
    apply, stored = storage.apply, set()

    async def noted_apply(operations: list[Operation]) -> None:
        for operation in operations:
            stored.add((type(operation), record_type(operation.key)))
        await apply(operations)

    storage.apply = noted_apply  # type: ignore[method-assign]
    assert await one_life(here, storage) == WRITES - 1
    assert done == {"_cut", "_drop", "_rewrite", "_overdue", "_deletions_of_records", "compacted"}
    assert stored >= {
        (Put, RecordType.DELETIONS),
        (Merge, RecordType.DELETIONS),
        (Put, RecordType.METADATA),
        (Merge, RecordType.METADATA),
        (Delete, RecordType.METADATA),
        (Put, RecordType.POSTING),
        (Merge, RecordType.POSTING),
        (Delete, RecordType.POSTING),
        (Delete, RecordType.CENTROID),
        (Delete, RecordType.DICTIONARY),
        (Delete, RecordType.DATA),
    }


@pytest.mark.parametrize("fault", StorageFault)
@pytest.mark.parametrize("call", range(1, CALLS + 1))
async def test_whatever_fails_a_collection_is_that_of_its_position(call: int, fault: StorageFault) -> None:
    for kept in range(4):
        here = world()
        storage = here.disk.open()
        storage.fail_at(call, fault)
        durable = await one_life(here, storage)
        after = here.disk.open(kept=kept)
        store = await here.open(after)
        await check(store)
        assert (-1 if store.position is None else store.position) >= durable
        await store.abort()
        assert await one_life(here, here.disk.open()) == WRITES - 1
        store = await here.open()
        assert store.position == WRITES - 1
        await check(store)
        await store.close()


async def test_an_id_that_was_stored_is_never_given_away_again() -> None:
    here = world()
    used: set[int] = set()
    for life in range(6):
        store = await here.open(here.disk.open(kept=9))
        before = store._snapshot.index
        await store.upsert([Vector(f"x{life}", [1, 2, 3]), Vector("same", [life, 0, 0])])
        await store.flush(durable=False)
        index = store._snapshot.index
        fresh = set(index.ids[: index.count].tolist()) - set(before.ids[: before.count].tolist())
        assert len(fresh) == 2
        assert not fresh & used
        used |= fresh
        await store.abort()
