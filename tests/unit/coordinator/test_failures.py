"""A failed flush is fatal: every waiter gets the error, and nothing is retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, WordDelta, World, marks, turns

from penstock.coordinator import Durability, FlushError, FlushFenced
from penstock.errors import Fenced, OutcomeUnknown, Unavailable
from penstock.testing.memory_storage import StorageFault

APPLIED, FLUSHED, DURABLE = Durability


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


@pytest.mark.parametrize("call", [1, 2, 3], ids=["apply", "snapshot", "flush"])
@pytest.mark.parametrize("fault", StorageFault)
async def test_a_failed_flush_fails_every_waiter_above_the_mark(
    world: World, call: int, fault: StorageFault
) -> None:
    coordinator = await world.open(sync_mode="every_flush")
    world.storage.fail_at(call, fault)
    handle = await coordinator.write("a")
    waits = [asyncio.create_task(handle.wait(level)) for level in (FLUSHED, DURABLE)]
    flush = await coordinator.flush()
    later = await coordinator.flush(99)
    await turns()
    reached = 1 if call == 3 else 0
    assert marks(coordinator) == (1, reached, 0)
    await handle.wait(APPLIED)
    for waiting in [*waits[reached:], later.epoch()]:
        with pytest.raises(FlushError, match="failed, and the coordinator has stopped") as caught:
            await waiting
        assert isinstance(caught.value, OutcomeUnknown)
        assert isinstance(caught.value.__cause__, OutcomeUnknown)
    if reached:
        await flush.wait()
    else:
        with pytest.raises(FlushError):
            await flush.wait()


async def test_after_a_failure_every_call_raises_it(world: World) -> None:
    coordinator = await world.open()
    world.storage.fail_at(1, StorageFault.FAILED)
    subscription = coordinator.subscribe()
    await coordinator.write("a")
    with pytest.raises(FlushError, match=r"the flush of epochs \(0, 1\] failed"):
        await (await coordinator.flush()).wait()
    for call in (
        coordinator.write("b"),
        coordinator.flush(),
        anext(subscription),
        anext(coordinator.subscribe()),
    ):
        with pytest.raises(FlushError):
            await call
    with pytest.raises(FlushError):
        coordinator.try_write("b")
    for _ in range(2):
        with pytest.raises(FlushError):
            await coordinator.close()
    assert len(world.failures) == 1


async def test_a_failed_flush_is_never_tried_again(world: World) -> None:
    coordinator = await world.open(flush_interval="1s")
    world.storage.fail_at(1, StorageFault.LOST)
    await coordinator.write("a")
    await world.clock.advance(60)
    assert world.storage.calls == ["apply"]


async def test_writes_that_were_only_queued_get_the_error(world: World) -> None:
    coordinator = await world.open(flush_size_threshold=SIZE, max_pending_size=SIZE, queue_capacity=1)
    world.storage.fail_at(1, StorageFault.FAILED)
    held = world.storage.gate("apply")
    await coordinator.write("a")
    await turns()
    waiting_for_room = asyncio.create_task(coordinator.write("b"))
    paused = coordinator.channel("other")
    paused.pause()
    await turns()
    held.set()
    await turns()
    with pytest.raises(FlushError):
        await waiting_for_room


async def test_a_queued_write_is_failed_once_with_the_flush(world: World) -> None:
    coordinator = await world.open()
    other = coordinator.channel("other")
    other.pause()
    queued = other.try_write("queued")
    world.storage.fail_at(1, StorageFault.FAILED)
    coordinator.try_write("a")
    await coordinator.flush()
    await turns()
    with pytest.raises(FlushError):
        await queued.epoch()


async def test_a_fenced_flush_is_both_a_failure_and_fenced(world: World) -> None:
    coordinator = await world.open()
    handle = await coordinator.write("a")
    world.disk.open()
    await coordinator.flush()
    with pytest.raises(FlushFenced) as caught:
        await handle.wait(FLUSHED)
    assert isinstance(caught.value, Fenced)


async def test_a_delta_that_cannot_be_frozen_is_a_failure(world: World) -> None:
    coordinator = await world.open()
    handle = await coordinator.write("a")
    await handle.epoch()

    def broken() -> int:
        raise Unavailable("no memory")

    coordinator.view().current.fork_image = broken  # type: ignore[method-assign]
    await coordinator.flush()
    with pytest.raises(FlushError, match="no memory"):
        await handle.wait(FLUSHED)


async def test_a_cancelled_loop_leaves_no_waiter(world: World) -> None:
    coordinator = await world.open()
    handle = await coordinator.write("a")
    await handle.epoch()
    wait = asyncio.create_task(handle.wait(FLUSHED))
    await turns()
    for task in coordinator._tasks:
        task.cancel()
    await turns()
    assert wait.done()
    assert wait.exception() is not None


async def test_a_delta_that_cannot_be_frozen_fails_only_the_flushes_that_were_not_begun(world: World) -> None:
    class Unfreezable(WordDelta):
        def freeze(self) -> int:
            if "poison" in self.words.values():
                raise RuntimeError("no image")
            return super().freeze()

    world.storage.gate("apply")
    coordinator = await world.build(delta=Unfreezable)
    coordinator.start()
    await (await coordinator.write("one")).epoch()
    await (await coordinator.flush()).epoch()
    await (await coordinator.write("poison")).epoch()
    begun, impossible = await coordinator.flush(1, durable=True), await coordinator.flush()
    with pytest.raises(FlushError, match="no image"):
        await impossible.epoch()
    assert await begun.epoch() == 1
