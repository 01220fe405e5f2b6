"""Views, subscriptions, and caches that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, WordDelta, Words, World, turns, words_in

from penstock.coordinator import (
    Durability,
    FlushError,
    FlushEvent,
    FreezeEvent,
    IncrementalCache,
    Lagged,
    Shutdown,
    StorageRead,
    Subscription,
)
from penstock.errors import Conflict
from penstock.testing.memory_storage import StorageFault

Events = Subscription[WordDelta, StorageRead]
Cache = IncrementalCache[WordDelta, StorageRead, list[str]]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


def add(state: list[str], delta: WordDelta) -> list[str]:
    return state + list(delta.words.values())


async def flushed(coordinator: Words, *words: str) -> None:
    for word in words:
        await coordinator.write(word)
    await (await coordinator.flush()).wait()


async def test_a_view_shows_snapshot_frozen_and_current_deltas(world: World) -> None:
    coordinator = await world.open()
    await flushed(coordinator, "a")
    held = world.storage.gate("apply")
    for word in ("b", "c"):
        await coordinator.write(word)
        await coordinator.flush()
        await turns()
    await (await coordinator.write("d")).epoch()
    view = coordinator.view()
    assert view.epoch == 1
    assert await words_in(view.snapshot) == ["a"]
    assert view.last_flushed is not None
    assert list(view.last_flushed.words.values()) == ["a"]
    assert [list(frozen.delta.words.values()) for frozen in view.frozen] == [["c"], ["b"]]
    assert list(view.current.words.values()) == ["d"]
    held.set()
    await coordinator.close()
    assert [list(frozen.delta.words.values()) for frozen in view.frozen] == [["c"], ["b"]]


async def test_a_subscription_starts_with_the_view_of_its_instant(world: World) -> None:
    coordinator = await world.open()
    await flushed(coordinator, "a")
    subscription = coordinator.subscribe()
    assert subscription.view is coordinator.view()
    await flushed(coordinator, "b")
    event = await anext(subscription)
    assert isinstance(event, FlushEvent)
    assert event.epoch_range == (subscription.view.epoch, 2)
    assert str(event.epoch_range) == "(1, 2]"
    assert await words_in(event.snapshot) == ["a", "b"]
    assert list(event.delta.words.values()) == ["b"]


async def test_freezes_are_told_to_those_who_ask(world: World) -> None:
    coordinator = await world.open()
    subscription = coordinator.subscribe(freezes=True)
    await flushed(coordinator, "a")
    frozen, stored = await anext(subscription), await anext(subscription)
    assert isinstance(frozen, FreezeEvent)
    assert isinstance(stored, FlushEvent)
    assert frozen.epoch_range == stored.epoch_range == (0, 1)
    assert frozen.view.frozen[0].delta is stored.delta


async def test_a_subscriber_that_lags_is_told_and_gets_the_newest_event(world: World) -> None:
    coordinator = await world.open(subscription_capacity=3)
    subscription = coordinator.subscribe()
    for number in range(5):
        await flushed(coordinator, str(number))
    with pytest.raises(Lagged, match="3 events were dropped") as caught:
        await anext(subscription)
    assert (caught.value.missed, isinstance(caught.value, Conflict)) == (3, True)
    event = await anext(subscription)
    assert isinstance(event, FlushEvent)
    assert event.epoch_range == (3, 4)


async def test_a_subscriber_cannot_pin_more_than_what_may_be_pending(world: World) -> None:
    coordinator = await world.open(subscription_capacity=100, flush_size_threshold=4 * SIZE)
    subscription = coordinator.subscribe()
    for _ in range(3):
        await flushed(coordinator, "a", "b", "c")
    with pytest.raises(Lagged):
        await anext(subscription)


async def test_a_subscriber_that_waits_is_woken_and_one_that_left_is_forgotten(world: World) -> None:
    coordinator = await world.open()
    stays, leaves = coordinator.subscribe(), coordinator.subscribe()
    waiting = asyncio.create_task(anext(stays))
    await turns()
    leaves.close()
    await flushed(coordinator, "a")
    assert isinstance(await waiting, FlushEvent)
    assert [event async for event in leaves] == []


async def test_a_cache_applies_deltas_only_from_where_it_stands(world: World) -> None:
    coordinator = await world.open(subscription_capacity=2)
    await flushed(coordinator, "a")
    cache: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=add)
    assert (cache.state, cache.epoch) == (["a"], 1)
    await flushed(coordinator, "b")
    assert await cache.step()
    assert (cache.state, cache.epoch, cache.rebuilds) == (["a", "b"], 2, 0)
    for word in "cdefg":
        await flushed(coordinator, word)
    await coordinator.close()
    await cache.run()
    assert cache.rebuilds == 1
    assert (cache.state, cache.epoch) == (list("abcdefg"), 7)


async def test_a_lagging_cache_equals_one_that_keeps_up(world: World) -> None:
    coordinator = await world.open(subscription_capacity=2)
    quick: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=add)
    slow: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=add)
    for number in range(40):
        await flushed(coordinator, f"{number}.a", f"{number}.b")
        await quick.step()
        if number % 7 == 0:
            await slow.step()
    await coordinator.close()
    await slow.run()
    assert quick.rebuilds == 0
    assert slow.rebuilds > 0
    assert slow.state == quick.state
    assert slow.epoch == quick.epoch == 80


async def test_a_reader_can_wait_until_the_cache_holds_its_write(world: World) -> None:
    coordinator = await world.open()
    cache: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=add)
    following = asyncio.create_task(cache.run())
    handle = await coordinator.write("mine")
    epoch = await handle.epoch()
    read = asyncio.create_task(cache.wait(epoch))
    await turns()
    assert not read.done()
    await coordinator.flush()
    await read
    assert cache.state == ["mine"]
    await coordinator.close()
    await following
    await handle.wait(Durability.DURABLE)


@pytest.mark.parametrize("failed", [False, True], ids=["closed", "failed"])
async def test_nobody_waits_for_what_a_cache_will_never_hold(world: World, failed: bool) -> None:
    coordinator = await world.open()
    cache: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=add)
    waiting = asyncio.create_task(cache.wait(9))
    following = asyncio.create_task(cache.run())
    await turns()
    if failed:
        world.storage.fail_at(len(world.storage.calls) + 1, StorageFault.FAILED)
        await coordinator.write("a")
        await coordinator.flush()
        with pytest.raises(FlushError):
            await following
    else:
        await coordinator.close()
        await following
    for read in (waiting, asyncio.create_task(cache.wait(9))):
        with pytest.raises(FlushError if failed else Shutdown):
            await asyncio.wait_for(read, 5)


async def test_a_cache_that_cannot_be_rebuilt_says_so_to_those_who_wait(world: World) -> None:
    def broken(state: list[str], delta: WordDelta) -> list[str]:
        raise Conflict("the words do not fit")

    coordinator = await world.open()
    cache: Cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=words_in, apply=broken)
    waiting = asyncio.create_task(cache.wait(1))
    await flushed(coordinator, "a")
    with pytest.raises(Conflict):
        await cache.run()
    with pytest.raises(Shutdown, match="do not fit"):
        await asyncio.wait_for(waiting, 5)
