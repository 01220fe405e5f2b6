"""Triggers of flushes, the writes that a flush covers, and durability."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, WordDelta, World, marks, turns, words_in

from penstock.coordinator import Durability, EpochNotAssigned, FlushEvent, FlushReason, Shutdown, StorageRead
from penstock.coordinator.events import Broadcast
from penstock.coordinator.watermarks import Watermarks
from penstock.errors import InvalidInput

APPLIED, FLUSHED, DURABLE = Durability


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


def reasons(world: World) -> dict[str, float]:
    name = "write_coordinator.flush_total"
    return {r.value: n for r in FlushReason if (n := world.registry.value(name, reason=r.value))}


# Triggers


async def test_a_delta_is_flushed_when_it_is_large_enough(world: World) -> None:
    coordinator = await world.open(flush_size_threshold=3 * SIZE)
    for word in ("a", "b"):
        await coordinator.write(word)
    await turns()
    assert marks(coordinator) == (2, 0, 0)
    await (await coordinator.write("c")).wait(FLUSHED)
    assert await words_in(coordinator.view().snapshot) == ["a", "b", "c"]
    assert reasons(world) == {"size_threshold": 1}


async def test_a_delta_is_flushed_when_the_interval_is_over(world: World) -> None:
    coordinator = await world.open(flush_interval="10s")
    await coordinator.write("a")
    await world.clock.advance(9.999)
    assert marks(coordinator) == (1, 0, 0)
    await world.clock.advance(0.001)
    assert marks(coordinator) == (1, 1, 0)
    assert reasons(world) == {"interval": 1}


async def test_every_flush_restarts_the_interval(world: World) -> None:
    coordinator = await world.open(flush_interval="10s")
    await coordinator.write("a")
    await world.clock.advance(6)
    await (await coordinator.flush()).wait()
    await coordinator.write("b")
    await world.clock.advance(9)
    assert marks(coordinator) == (2, 1, 0)
    await world.clock.advance(1)
    assert marks(coordinator) == (2, 2, 0)


async def test_the_timer_is_heard_while_writes_keep_coming(world: World) -> None:
    coordinator = await world.open(flush_interval="10s", queue_capacity=10, flush_size_threshold="1GiB")

    async def chatter() -> None:
        while True:
            await coordinator.write("a")

    writers = [asyncio.create_task(chatter()) for _ in range(3)]
    await turns()
    world.clock._elapsed_ns += 10_000_000_000
    await turns()
    assert coordinator.watermark(FLUSHED) > 0
    for writer in writers:
        writer.cancel()


async def test_nothing_is_flushed_while_nothing_is_written(world: World) -> None:
    coordinator = await world.open(flush_interval="1s", sync_mode="interval")
    await world.clock.advance(100)
    await (await coordinator.flush()).wait()
    assert world.storage.calls == []
    await coordinator.close()
    assert world.storage.calls == []


async def test_a_durable_flush_syncs_although_nothing_was_written(world: World) -> None:
    coordinator = await world.open()
    await (await coordinator.flush(durable=True)).wait(DURABLE)
    await turns()
    assert world.storage.calls == ["flush"]


# What a flush covers


async def test_a_flush_covers_every_write_that_returned_before_it(world: World) -> None:
    coordinator = await world.build()
    handles = [coordinator.try_write(str(number)) for number in range(600)]
    flush = await coordinator.flush()
    coordinator.start()
    assert await flush.epoch() >= 600
    await flush.wait()
    assert coordinator.watermark(FLUSHED) >= 600
    await handles[-1].wait(FLUSHED)


async def test_a_flush_gets_through_although_the_queue_is_full(world: World) -> None:
    coordinator = await world.build(queue_capacity=2)
    coordinator.try_write("a")
    coordinator.try_write("b")
    flush = await coordinator.flush()
    coordinator.start()
    await flush.wait()
    assert marks(coordinator) == (2, 2, 0)


async def test_a_flush_up_to_a_flushed_epoch_does_nothing(world: World) -> None:
    coordinator = await world.open()
    await coordinator.write("a")
    await (await coordinator.flush()).wait()
    await coordinator.write("b")
    await turns()
    calls = list(world.storage.calls)
    again = await coordinator.flush(1)
    assert again.sequenced
    await again.wait()
    await turns()
    assert world.storage.calls == calls


async def test_a_flush_up_to_an_epoch_that_is_frozen_already_freezes_nothing_more(world: World) -> None:
    held = world.storage.gate("apply")
    coordinator = await world.open()
    await (await coordinator.write("a")).epoch()
    await coordinator.flush()
    await (await coordinator.write("b")).epoch()
    flush = await coordinator.flush(1)
    await turns()
    assert len(coordinator.view().frozen) == 1
    held.set()
    await flush.wait()
    assert marks(coordinator) == (2, 1, 0)


async def test_a_flush_up_to_a_later_epoch_waits_for_it(world: World) -> None:
    coordinator = await world.open()
    await coordinator.write("a")
    flush = await coordinator.flush(3)
    await coordinator.write("b")
    await turns()
    assert not flush.sequenced
    await coordinator.write("c")
    await flush.wait()
    assert marks(coordinator) == (3, 3, 0)


async def test_a_strict_flush_refuses_an_epoch_that_no_write_has(world: World) -> None:
    coordinator = await world.open()
    with pytest.raises(EpochNotAssigned, match="no write has epoch 3 yet: the last one is 0") as caught:
        await coordinator.flush(3, strict=True)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InvalidInput)


async def test_an_epoch_that_never_comes_ends_with_the_coordinator(world: World) -> None:
    coordinator = await world.open()
    flush = await coordinator.flush(3)
    await coordinator.close()
    with pytest.raises(Shutdown):
        await flush.wait()


# While a flush runs


async def test_a_write_during_a_flush_lands_in_the_next_delta(world: World) -> None:
    coordinator = await world.open()
    held = world.storage.gate("apply")
    await coordinator.write("a")
    first = await coordinator.flush()
    await turns()
    handle = await coordinator.write("b")
    await handle.wait(APPLIED)
    assert marks(coordinator) == (2, 0, 0)
    assert list(coordinator.view().frozen[0].delta.words.values()) == ["a"]
    assert list(coordinator.view().current.words.values()) == ["b"]
    held.set()
    await first.wait()
    assert marks(coordinator) == (2, 1, 0)
    assert await words_in(coordinator.view().snapshot) == ["a"]


async def test_flushes_are_in_order_and_their_ranges_leave_no_hole(world: World) -> None:
    coordinator = await world.open()
    subscription = coordinator.subscribe()
    for number in range(7):
        for word in range(number):
            await coordinator.write(str(word))
        await coordinator.flush()
        await turns(3)
    await coordinator.close()
    events = [event async for event in subscription]
    assert all(isinstance(event, FlushEvent) for event in events)
    ranges = [event.epoch_range for event in events]
    assert ranges[0].lo == 0
    assert ranges[-1].hi == 21
    assert [after.lo for after in ranges[1:]] == [before.hi for before in ranges[:-1]]
    assert all(lo < hi for lo, hi in ranges)


async def test_one_flush_runs_at_a_time_and_a_limited_number_of_deltas_wait(world: World) -> None:
    coordinator = await world.open(max_frozen_deltas=2)
    held = world.storage.gate("apply")
    flushes = []
    for number in range(5):
        await coordinator.write(str(number))
        flushes.append(await coordinator.flush())
        await turns()
    assert world.storage.calls == ["apply"]
    assert [frozen.epoch_range for frozen in coordinator.view().frozen] == [(2, 3), (1, 2), (0, 1)]
    assert [flush.sequenced for flush in flushes] == [True, True, True, False, False]
    held.set()
    await flushes[-1].wait()
    assert marks(coordinator) == (5, 5, 0)


async def test_the_image_survives_flushes_and_numbers_continue(world: World) -> None:
    coordinator = await world.open(flush_size_threshold=2 * SIZE)
    handles = [await coordinator.write(str(number)) for number in range(50)]
    await coordinator.close()
    assert [await handle.result() for handle in handles] == list(range(50))
    again = await world.open(world.disk.open())
    assert await (await again.write("next")).result() == 50


async def test_an_image_can_be_handed_over_instead_of_copied(world: World) -> None:
    class Moving(WordDelta):
        def fork_image(self) -> int:
            raise AssertionError("a delta with freeze is not asked for a copy")

        def freeze(self) -> int:
            return self.next_number

    coordinator = await world.build(delta=Moving)
    coordinator.start()
    await coordinator.write("a")
    await (await coordinator.flush()).wait()
    assert await (await coordinator.write("b")).result() == 1


async def test_readers_find_the_new_snapshot_before_the_mark_moves_and_the_event_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = await world.open()
    order: list[str] = []
    raise_to, send = Watermarks.raise_to, Broadcast.send

    def mark(self: Watermarks, level: Durability, epoch: int) -> None:
        if level is FLUSHED:
            order.append(f"mark {epoch}, view {coordinator.view().epoch}")
        raise_to(self, level, epoch)

    def event(self: Broadcast[WordDelta, StorageRead], event: FlushEvent[WordDelta, StorageRead]) -> None:
        if isinstance(event, FlushEvent):
            order.append(f"event, mark {coordinator.watermark(FLUSHED)}")
        send(self, event)

    monkeypatch.setattr(Watermarks, "raise_to", mark)
    monkeypatch.setattr(Broadcast, "send", event)
    await coordinator.write("a")
    await (await coordinator.flush()).wait()
    assert order == ["mark 1, view 1", "event, mark 1"]


# Durability


async def test_a_flush_alone_is_not_durable(world: World) -> None:
    coordinator = await world.open(flush_interval="1s")
    await coordinator.write("a")
    await world.clock.advance(60)
    await coordinator.write("b")
    await (await coordinator.flush()).wait()
    assert marks(coordinator) == (2, 2, 0)
    assert "flush" not in world.storage.calls


async def test_a_durable_flush_is_persisted_in_its_order(world: World) -> None:
    coordinator = await world.open()
    await coordinator.write("a")
    first = await coordinator.flush(durable=True)
    await turns(2)
    await coordinator.write("b")
    await coordinator.flush()
    await first.wait(DURABLE)
    await turns()
    assert world.storage.calls == ["apply", "snapshot", "flush", "apply", "snapshot"]
    assert marks(coordinator) == (2, 2, 1)


async def test_with_sync_mode_every_flush_durability_follows_each_flush(world: World) -> None:
    coordinator = await world.open(sync_mode="every_flush", flush_size_threshold=SIZE)
    await (await coordinator.write("a")).wait(DURABLE)
    assert marks(coordinator) == (1, 1, 1)


async def test_with_sync_mode_interval_the_timer_syncs_what_was_flushed(world: World) -> None:
    coordinator = await world.open(sync_mode="interval", sync_interval="3s", flush_size_threshold=SIZE)
    await coordinator.write("a")
    await world.clock.advance(2.9)
    assert marks(coordinator) == (1, 1, 0)
    await world.clock.advance(0.1)
    assert marks(coordinator) == (1, 1, 1)
    calls = len(world.storage.calls)
    await world.clock.advance(30)
    assert len(world.storage.calls) == calls


async def test_durable_is_what_a_crash_leaves(world: World) -> None:
    coordinator = await world.open()
    await (await coordinator.write("a")).wait(APPLIED)
    await (await coordinator.flush(durable=True)).wait(DURABLE)
    await coordinator.write("b")
    await (await coordinator.flush()).wait()
    assert await words_in(world.disk.open()) == ["a"]


# Shutdown


async def test_close_applies_flushes_and_syncs_what_is_queued(world: World) -> None:
    coordinator = await world.build()
    handles = [coordinator.try_write(str(number)) for number in range(1000)]
    await coordinator.close()
    await coordinator.close()
    for handle in handles:
        await handle.wait(DURABLE)
    assert marks(coordinator) == (1000, 1000, 1000)
    assert len(await words_in(world.disk.open())) == 1000
    assert reasons(world).keys() <= {"shutdown", "size_threshold"}


async def test_after_close_nothing_is_taken(world: World) -> None:
    async with await world.build() as coordinator:
        await coordinator.write("a")
    for call in (coordinator.write("b"), coordinator.flush()):
        with pytest.raises(Shutdown):
            await call
    with pytest.raises(Shutdown):
        coordinator.try_write("b")
    assert [event async for event in coordinator.subscribe()] == []


async def test_close_serves_requested_flushes(world: World) -> None:
    coordinator = await world.build()
    coordinator.try_write("a")
    flush = await coordinator.flush(durable=True)
    await coordinator.close()
    await flush.wait(DURABLE)


async def test_a_close_that_is_cut_short_says_so(world: World) -> None:
    coordinator = await world.open()
    held = world.storage.gate("apply")
    await coordinator.write("a")
    closing = asyncio.create_task(coordinator.close())
    await turns()
    await coordinator.abort()
    with pytest.raises(Shutdown, match="aborted"):
        await closing
    held.set()


async def test_abort_leaves_everything_as_a_crash_would(world: World) -> None:
    coordinator = await world.open()
    applied = await coordinator.write("a")
    await applied.wait(APPLIED)
    wait = asyncio.create_task(applied.wait(FLUSHED))
    await turns()
    await coordinator.abort()
    with pytest.raises(Shutdown):
        await wait
    assert world.storage.calls == []
    await applied.wait(APPLIED)
    await coordinator.close()


async def test_without_an_interval_a_delta_is_flushed_as_soon_as_the_one_before_is_stored(
    world: World,
) -> None:
    held = world.storage.gate("apply")
    coordinator = await world.open(flush_interval=0, sync_mode="every_flush")
    first = await coordinator.write("a")
    await turns()
    later = [await coordinator.write(word) for word in "bcd"]
    await turns()
    assert [frozen.epoch_range.hi for frozen in coordinator.view().frozen] == [1]
    held.set()
    await first.wait(DURABLE)
    await later[-1].wait(DURABLE)
    assert world.storage.calls.count("apply") == 2
    assert world.clock.sleeping == 0


async def test_without_an_interval_every_writer_woken_by_a_sync_is_in_the_next_flush(world: World) -> None:
    coordinator = await world.open(flush_interval=0, sync_mode="every_flush", batch_writes_max=4)

    async def writer(name: str) -> None:
        for number in range(5):
            await (await coordinator.write(f"{name}{number}")).wait(DURABLE)

    await asyncio.gather(*(writer(f"w{number}-") for number in range(4)))
    assert world.storage.calls.count("apply") == 5
    assert marks(coordinator) == (20, 20, 20)


async def test_without_an_interval_a_stream_that_never_ends_is_flushed_too(world: World) -> None:
    coordinator = await world.build(flush_interval=0, batch_writes_max=4)
    for number in range(100):
        coordinator.try_write(str(number))
    coordinator.start()
    await turns(20)
    assert marks(coordinator)[1] > 0
    assert coordinator.channel("default").depth > 0


async def test_without_an_interval_nothing_is_flushed_when_nothing_was_written(world: World) -> None:
    await world.open(flush_interval=0, sync_mode="every_flush")
    await world.clock.advance(100)
    assert world.storage.calls == []


async def test_the_next_flush_continues_while_the_storage_is_synced(world: World) -> None:
    held = world.storage.gate("flush")
    coordinator = await world.open(sync_mode="every_flush")
    await coordinator.write("a")
    await (await coordinator.flush()).wait(FLUSHED)
    await coordinator.write("b")
    await (await coordinator.flush()).wait(FLUSHED)
    assert marks(coordinator) == (2, 2, 0)
    held.set()
    await turns()
    assert marks(coordinator) == (2, 2, 2)


async def test_a_sync_covers_only_what_was_flushed_before_it_began(world: World) -> None:
    held = world.storage.gate("flush")
    coordinator = await world.open()
    await coordinator.write("a")
    await (await coordinator.flush(durable=True)).wait(FLUSHED)
    await turns()
    await coordinator.write("b")
    await (await coordinator.flush()).wait(FLUSHED)
    held.set()
    await turns()
    assert marks(coordinator) == (2, 2, 1)


async def test_flushes_wait_for_a_storage_that_cannot_keep_up_with_syncs(world: World) -> None:
    world.storage.gate("flush")
    coordinator = await world.open(sync_mode="every_flush", flush_size_threshold=SIZE)
    for number in range(20):
        if number < 5:
            await coordinator.write(str(number))
        await turns(10)
    assert marks(coordinator)[1] == 3
    assert world.storage.calls.count("flush") == 1
