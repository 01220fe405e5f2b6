"""Order, epochs and results of writes, and refused writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import WordDelta, World, marks, turns

from penstock.coordinator import ApplyError, Durability, FlushError, WriteHandle
from penstock.errors import Rejected

APPLIED, FLUSHED, DURABLE = Durability


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


async def test_epochs_start_at_one_and_marks_at_zero(world: World) -> None:
    coordinator = await world.build()
    assert marks(coordinator) == (0, 0, 0)
    coordinator.start()
    handle = await coordinator.write("a")
    assert await handle.epoch() == 1
    assert marks(coordinator) == (1, 0, 0)


async def test_an_epoch_is_assigned_when_the_write_leaves_the_queue(world: World) -> None:
    coordinator = await world.build()
    handle = coordinator.try_write("a")
    await turns()
    assert not handle.sequenced
    coordinator.start()
    await turns()
    assert handle.sequenced


async def test_writes_that_follow_each_other_have_rising_epochs(world: World) -> None:
    coordinator = await world.open()
    handles = [await coordinator.write(f"w{number}") for number in range(700)]
    epochs = [await handle.epoch() for handle in handles]
    assert epochs == list(range(1, 701))


async def test_epochs_of_a_hundred_writers_are_dense_and_rise_for_each(world: World) -> None:
    coordinator = await world.open(queue_capacity=16, flush_size_threshold=200)

    async def writer(number: int) -> list[int]:
        return [await (await coordinator.write(f"{number}.{turn}")).epoch() for turn in range(20)]

    epochs = await asyncio.gather(*(writer(number) for number in range(100)))
    assert all(mine == sorted(mine) for mine in epochs)
    assert sorted(epoch for mine in epochs for epoch in mine) == list(range(1, 2001))
    await coordinator.close()
    assert len(world.disk.persisted) == 2001


async def test_a_handle_returns_the_result_of_the_delta(world: World) -> None:
    coordinator = await world.open()
    first, second = await coordinator.write("a"), await coordinator.write("b")
    assert (await first.result(), await second.result()) == (0, 1)


async def test_a_refused_write_uses_up_its_epoch_and_touches_no_other(world: World) -> None:
    coordinator = await world.open()
    before, bad, after = [coordinator.try_write(word) for word in ("a", "bad", "b")]
    for ask in (bad.epoch, bad.wait, bad.result):
        with pytest.raises(ApplyError, match="write 2 was refused: bad is no word") as caught:
            await ask()
        assert caught.value.epoch == 2
        assert isinstance(caught.value.__cause__, ValueError)
        assert isinstance(caught.value, Rejected)
    assert (await before.epoch(), await after.epoch()) == (1, 3)
    await (await coordinator.flush()).wait()
    assert marks(coordinator) == (3, 3, 0)
    await after.wait(FLUSHED)


async def test_only_refused_writes_still_move_the_marks(world: World) -> None:
    coordinator = await world.open()
    coordinator.try_write("bad")
    await (await coordinator.flush(durable=True)).wait(DURABLE)
    assert marks(coordinator) == (1, 1, 1)


async def test_queued_writes_are_applied_in_batches(world: World) -> None:
    coordinator = await world.build(batch_writes_max=100)
    for number in range(250):
        coordinator.try_write(str(number))
    coordinator.start()
    await turns()
    assert coordinator.view().current.batches == [100, 100, 50]


async def test_a_batch_does_not_shoot_far_over_the_threshold(world: World) -> None:
    coordinator = await world.build(flush_size_threshold=100, max_pending_size=100_000)
    for number in range(300):
        coordinator.try_write(str(number))
    held = world.storage.gate("apply")
    coordinator.start()
    await turns()
    sizes = [len(frozen.delta.words) for frozen in coordinator.view().frozen]
    # The size of a write is unknown before the first batch. After it, 100 means ten words.
    assert sizes[-1] == 256
    assert max(sizes[:-1]) <= 11
    held.set()


async def test_each_level_is_waited_for_separately(world: World) -> None:
    coordinator = await world.open()
    handle = await coordinator.write("a")
    waits = [asyncio.create_task(handle.wait(level)) for level in Durability]
    await turns()
    assert [wait.done() for wait in waits] == [True, False, False]
    await (await coordinator.flush()).wait()
    await turns()
    assert [wait.done() for wait in waits] == [True, True, False]
    await (await coordinator.flush(durable=True)).wait(DURABLE)
    await turns()
    assert all(wait.done() for wait in waits)


def test_the_middle_level_has_two_names() -> None:
    assert Durability["WRITTEN"] is FLUSHED
    assert list(Durability) == [1, 2, 3]


async def test_dropping_or_cancelling_a_wait_never_touches_the_write(world: World) -> None:
    coordinator = await world.open()
    coordinator.try_write("forgotten")
    handle = coordinator.try_write("waited for")
    wait = asyncio.create_task(handle.wait(DURABLE))
    await turns()
    wait.cancel()
    await coordinator.close()
    await handle.wait(DURABLE)
    assert [row.value for key, row in sorted(world.disk.persisted.items())][1:] == [
        b"forgotten",
        b"waited for",
    ]


async def test_a_delta_that_breaks_its_contract_stops_everything(world: World) -> None:
    coordinator = await world.open()
    handle: WriteHandle = await coordinator.write("a")

    def too_few(self: WordDelta, writes: object) -> list[object]:
        return []

    coordinator.view().current.apply = too_few.__get__(coordinator.view().current)  # type: ignore[method-assign]
    with pytest.raises(FlushError, match="0 results for 1 writes"):
        await handle.epoch()
    with pytest.raises(FlushError):
        await coordinator.write("b")
