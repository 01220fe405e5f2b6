"""A fault at every storage call, a crash that keeps any number of unflushed batches, and a restart."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.coordinator.doubles import SIZE, Words, World, turns, words_in

from penstock.coordinator import CoordinatorError, Durability, WriteHandle
from penstock.testing.memory_storage import MemoryStorage, StorageFault

WORDS = [f"word {number}" for number in range(12)]
DURABLE = Durability.DURABLE


async def work(coordinator: Words, words: list[str]) -> list[str]:
    """Write the words, with both kinds of flush in between. Return the durable words."""
    handles: dict[str, WriteHandle] = {}
    try:
        for number, word in enumerate(words):
            handles[word] = await coordinator.write(word)
            if number % 3 == 2:
                await (await coordinator.flush(durable=number % 2 == 0)).wait()
        await coordinator.close()
    except CoordinatorError:
        pass
    await turns()
    durable = []
    for word, handle in handles.items():
        try:
            async with asyncio.timeout(1):
                await handle.wait(DURABLE)
        except CoordinatorError:
            continue
        durable.append(word)
    return durable


async def one_life(world: World, storage: MemoryStorage) -> tuple[list[str], list[str]]:
    """Continue after the stored words. Return the acknowledged words and the initially stored ones."""
    coordinator = await world.open(storage, flush_size_threshold=4 * SIZE)
    there = await words_in(storage)
    assert there == WORDS[: len(there)]
    return await work(coordinator, WORDS[len(there) :]), there


async def calls_of_a_whole_life() -> int:
    world = World()
    await one_life(world, world.storage)
    return len(world.storage.calls)


CALLS = asyncio.run(calls_of_a_whole_life())


def test_a_life_without_faults_makes_enough_calls_to_sweep() -> None:
    assert CALLS >= 10


@pytest.mark.parametrize("fault", StorageFault)
@pytest.mark.parametrize("call", range(1, CALLS + 1))
async def test_whatever_fails_durable_words_stay_and_work_continues(call: int, fault: StorageFault) -> None:
    for kept in range(5):
        world = World()
        world.storage.fail_at(call, fault)
        durable, _ = await one_life(world, world.storage)
        left = await words_in(world.disk.open(kept=kept))
        assert left == WORDS[: len(left)]
        assert durable == WORDS[: len(durable)]
        assert len(durable) <= len(left)
        # Opening changes nothing, so a crash right after it leaves the same state.
        again = world.disk.open()
        assert await words_in(again) == left
        acknowledged, _ = await one_life(world, again)
        assert left + acknowledged == WORDS
        assert await words_in(world.disk.open()) == WORDS


def stop_before(storage: MemoryStorage, call: int) -> asyncio.Event:
    """Block the call with this number and all later ones. Set the event when the first is made."""
    reached, begin = asyncio.Event(), storage._begin

    async def stop_here(name: str) -> StorageFault | None:
        if len(storage.calls) + 1 >= call:
            reached.set()
            await asyncio.Event().wait()
        return await begin(name)

    storage._begin = stop_here  # type: ignore[method-assign]
    return reached


@pytest.mark.parametrize("call", range(1, CALLS + 1))
async def test_a_crash_before_any_call_loses_nothing_durable(call: int) -> None:
    for kept in range(5):
        world = World()
        reached = stop_before(world.storage, call)
        life = asyncio.create_task(one_life(world, world.storage))
        await reached.wait()
        durable_mark = world._opened[0].watermark(DURABLE)
        await world.close()
        durable, _ = await life
        assert len(durable) == durable_mark
        left = await words_in(world.disk.open(kept=kept))
        assert left == WORDS[: len(left)]
        assert len(left) >= durable_mark
