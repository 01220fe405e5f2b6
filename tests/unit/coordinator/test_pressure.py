"""Backpressure: which writes are refused, which wait, and in which order they are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, WordDelta, Words, World, is_waiting, marks, turns

from penstock.coordinator import Backpressure, Durability, Shutdown, WriteTimeout
from penstock.errors import Unavailable

FLUSHED = Durability.FLUSHED


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


async def full(world: World, capacity: int = 2) -> Words:
    """Return a coordinator that is not started, with a full queue."""
    coordinator = await world.build(queue_capacity=capacity)
    for number in range(capacity):
        coordinator.try_write(f"queued {number}")
    return coordinator


async def over_limit(world: World) -> tuple[Words, asyncio.Event]:
    """Return a coordinator whose flush blocks until the event is set, with the maximum pending size."""
    held = world.storage.gate("apply")
    coordinator = await world.open(flush_size_threshold=2 * SIZE, max_pending_size=4 * SIZE)
    for number in range(4):
        await coordinator.write(f"pending {number}")
        await turns(5)
    return coordinator, held


async def test_a_full_queue_refuses_without_waiting_and_returns_the_write(world: World) -> None:
    coordinator = await full(world)
    write = "too much"
    with pytest.raises(
        Backpressure, match="channel 'default' takes no write now: its queue is full"
    ) as caught:
        coordinator.try_write(write)
    assert caught.value.write is write
    assert isinstance(caught.value, Unavailable)
    name = "write_coordinator.queue_backpressure_total"
    assert world.registry.value(name, command="write", reason="queue_full") == 1


async def test_a_write_waits_for_room_in_the_order_of_the_calls(world: World) -> None:
    coordinator = await full(world)
    waiting = [asyncio.create_task(coordinator.write(f"waiting {number}")) for number in range(3)]
    await turns()
    assert all(is_waiting(task) for task in waiting)
    coordinator.start()
    epochs = [await (await task).epoch() for task in waiting]
    assert epochs == [3, 4, 5]


async def test_a_write_with_a_timeout_gives_the_write_back(world: World) -> None:
    coordinator = await full(world)
    write = "late"
    task = asyncio.create_task(coordinator.write(write, timeout=2))
    await world.clock.advance(1.999)
    assert is_waiting(task)
    await world.clock.advance(0.001)
    with pytest.raises(WriteTimeout, match="no room for 2 s") as caught:
        await task
    assert caught.value.write is write
    await coordinator.close()
    assert len(world.disk.persisted) == 3


async def test_room_before_the_timeout_lets_the_write_in(world: World) -> None:
    coordinator = await full(world)
    task = asyncio.create_task(coordinator.write("in time", timeout=2))
    await world.clock.advance(1)
    coordinator.start()
    assert await (await task).epoch() == 3
    assert world.clock.sleeping == 1  # only the coordinator's own timer


async def test_a_cancelled_write_is_never_queued(world: World) -> None:
    coordinator = await full(world)
    first = asyncio.create_task(coordinator.write("cancelled"))
    second = asyncio.create_task(coordinator.write("kept"))
    await turns()
    first.cancel()
    coordinator.start()
    assert await (await second).epoch() == 3
    await coordinator.close()
    assert sorted(entry.value for entry in world.disk.persisted.values())[1:] == [
        b"kept",
        b"queued 0",
        b"queued 1",
    ]


async def test_a_write_that_is_cancelled_when_it_was_let_in_hands_its_place_on(world: World) -> None:
    coordinator = await full(world, capacity=1)
    channel = coordinator.channel("default")
    first = asyncio.create_task(coordinator.write("cancelled"))
    second = asyncio.create_task(coordinator.write("next"))
    await turns()
    channel.take(1)
    channel.admit()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert second.done()
    assert channel.depth == 1


async def test_no_write_overtakes_waiting_writers(world: World) -> None:
    coordinator = await full(world, capacity=1)
    waiting = asyncio.create_task(coordinator.write("first come"))
    await turns()
    channel = coordinator.channel("default")
    channel.take(1)
    channel.admit()
    with pytest.raises(Backpressure):
        coordinator.try_write("pushy")
    await waiting


async def test_a_timeout_removes_the_waiting_writer(world: World) -> None:
    coordinator = await full(world, capacity=1)
    late = asyncio.create_task(coordinator.write("late", timeout=1))
    await world.clock.advance(1)
    with pytest.raises(WriteTimeout):
        await late
    coordinator.channel("default").take(1)
    coordinator.try_write("room again")


async def test_pending_deltas_that_are_too_large_hold_writes_back(world: World) -> None:
    coordinator, held = await over_limit(world)
    with pytest.raises(Backpressure, match="unflushed data has reached its limit"):
        coordinator.try_write("more")
    waiting = asyncio.create_task(coordinator.write("patient"))
    await world.clock.advance(100)
    assert is_waiting(waiting)
    held.set()
    await (await waiting).wait(Durability.APPLIED)
    await coordinator.close()
    assert marks(coordinator) == (5, 5, 5)


async def test_the_first_flush_that_completes_lets_writes_in(world: World) -> None:
    coordinator, held = await over_limit(world)
    waiting = asyncio.create_task(coordinator.write("patient"))
    second = world.storage.gate("snapshot")
    held.set()
    await turns()
    assert is_waiting(waiting)
    second.set()
    await waiting


async def test_queued_writes_stay_queued_while_too_much_is_pending(world: World) -> None:
    held = world.storage.gate("apply")
    coordinator = await world.build(flush_size_threshold=2 * SIZE, batch_writes_max=2)
    handles = [coordinator.try_write(str(number)) for number in range(100)]
    coordinator.start()
    await turns()
    pending = coordinator.view().frozen, coordinator.view().current
    assert sum(len(frozen.delta.words) for frozen in pending[0]) + len(pending[1].words) <= 6
    held.set()
    await coordinator.close()
    await handles[-1].wait(FLUSHED)


async def test_a_flush_is_taken_under_pressure_and_covers_what_is_queued(world: World) -> None:
    held = world.storage.gate("apply")
    coordinator = await world.build(flush_size_threshold=2 * SIZE, queue_capacity=20, batch_writes_max=2)
    handles = [coordinator.try_write(str(number)) for number in range(20)]
    coordinator.start()
    await turns()
    flush = await coordinator.flush()
    await turns()
    assert not flush.sequenced
    held.set()
    await flush.wait()
    await handles[-1].wait(FLUSHED)


async def test_a_delta_that_counts_its_image_is_slow_but_not_stuck(world: World) -> None:
    class Heavy(WordDelta):
        def estimate_size(self) -> int:
            return 100 * SIZE

    coordinator = await world.build(delta=Heavy, flush_size_threshold=SIZE)
    coordinator.start()
    for number in range(10):
        await coordinator.write(str(number))
    await coordinator.close()
    assert marks(coordinator) == (10, 10, 10)


async def test_close_refuses_writers_that_wait_for_room(world: World) -> None:
    coordinator = await full(world)
    waiting = asyncio.create_task(coordinator.write("too late"))
    await turns()
    await coordinator.close()
    with pytest.raises(Shutdown):
        await waiting
    assert len(world.disk.persisted) == 3


def by_length(write: str) -> int:
    return len(write)


async def sized(world: World, **config: object) -> Words:
    """Return a coordinator where words count by length until they are applied, and `SIZE` each afterwards."""
    return await world.build(
        size_of=by_length, flush_size_threshold=5 * SIZE, max_pending_size=10 * SIZE, **config
    )


async def test_queued_writes_count_by_their_size(world: World) -> None:
    coordinator = await sized(world)
    coordinator.try_write("x" * 60)
    coordinator.try_write("y" * 40)
    with pytest.raises(Backpressure, match="unflushed data has reached its limit"):
        coordinator.try_write("z")


async def test_a_write_larger_than_the_limit_gets_in_when_nothing_else_is_pending(world: World) -> None:
    coordinator = await sized(world)
    coordinator.try_write("x" * 1000)
    coordinator.start()
    handle = await coordinator.write("y" * 1000)
    await coordinator.close()
    await handle.wait(Durability.DURABLE)


async def test_a_write_counts_once_whether_it_is_queued_or_applied(world: World) -> None:
    held = world.storage.gate("apply")
    coordinator = await sized(world, batch_writes_max=4)
    coordinator.start()
    for number in range(9):
        await (await coordinator.write(f"{number:010d}")).wait(Durability.APPLIED)
    coordinator.try_write("the 10th  ")
    with pytest.raises(Backpressure):
        coordinator.try_write("the 11th")
    held.set()
    await coordinator.close()
    assert marks(coordinator) == (10, 10, 10)


async def test_waiting_writers_are_admitted_by_size_too(world: World) -> None:
    coordinator = await sized(world)
    coordinator.try_write("x" * 100)
    waiting = [asyncio.create_task(coordinator.write(str(number) * 60)) for number in range(4)]
    await turns()
    channel = coordinator.channel("default")
    channel.take(1)
    channel.admit()
    await turns()
    assert [task.done() for task in waiting] == [True, True, False, False]
    coordinator.start()
    for task in waiting:
        await task


async def test_a_cancelled_wait_gives_its_size_back(world: World) -> None:
    coordinator = await sized(world)
    coordinator.try_write("x" * 100)
    waiting = asyncio.create_task(coordinator.write("y" * 100))
    await turns()
    channel = coordinator.channel("default")
    channel.take(1)
    channel.admit()
    waiting.cancel()
    await turns()
    assert waiting.cancelled()
    assert channel.size == 0
    coordinator.try_write("room again")


async def test_the_queue_of_a_paused_channel_stops_no_other_channel(world: World) -> None:
    coordinator = await sized(world)
    side = coordinator.channel("side")
    side.pause()
    side.try_write("x" * 100)
    with pytest.raises(Backpressure):
        side.try_write("y")
    coordinator.try_write("z")
    side.resume()
    with pytest.raises(Backpressure):
        coordinator.try_write("z")
