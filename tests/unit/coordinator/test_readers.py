"""Views, subscriptions, and readers that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.coordinator.doubles import SIZE, Follower, WordDelta, Words, World, turns, words_in

from penstock.coordinator import (
    FlushError,
    FlushEvent,
    FreezeEvent,
    Lagged,
    StorageRead,
    Subscription,
)
from penstock.errors import Conflict
from penstock.testing.memory_storage import StorageFault

Events = Subscription[WordDelta, StorageRead]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


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


async def test_freezes_are_sent_to_subscribers_that_request_them(world: World) -> None:
    coordinator = await world.open()
    subscription = coordinator.subscribe(freezes=True)
    await flushed(coordinator, "a")
    frozen, stored = await anext(subscription), await anext(subscription)
    assert isinstance(frozen, FreezeEvent)
    assert isinstance(stored, FlushEvent)
    assert frozen.epoch_range == stored.epoch_range == (0, 1)
    assert frozen.view.frozen[0].delta is stored.delta


async def test_a_subscriber_that_lags_gets_an_error_and_then_the_newest_event(world: World) -> None:
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


async def test_a_waiting_subscriber_is_woken_and_a_closed_one_is_forgotten(world: World) -> None:
    coordinator = await world.open()
    stays, leaves = coordinator.subscribe(), coordinator.subscribe()
    waiting = asyncio.create_task(anext(stays))
    await turns()
    leaves.close()
    await flushed(coordinator, "a")
    assert isinstance(await waiting, FlushEvent)
    assert [event async for event in leaves] == []


async def test_a_lagging_reader_arrives_where_one_that_keeps_up_does(world: World) -> None:
    coordinator = await world.open(subscription_capacity=2)
    await flushed(coordinator, "first")
    quick, slow = await Follower.open(coordinator), await Follower.open(coordinator)
    for number in range(40):
        await flushed(coordinator, f"{number}.a", f"{number}.b")
        await quick.step()
        if number % 7 == 0:
            await slow.step()
    await coordinator.close()
    await slow.run()
    assert quick.rebuilds == 0
    assert slow.rebuilds > 0
    assert slow.words == quick.words
    assert slow.epoch == quick.epoch == 81


@pytest.mark.parametrize("failed", [False, True], ids=["closed", "failed"])
async def test_a_subscription_ends_with_the_coordinator(world: World, failed: bool) -> None:
    coordinator = await world.open()
    follower = await Follower.open(coordinator)
    following = asyncio.create_task(follower.run())
    await turns()
    if failed:
        world.storage.fail_at(len(world.storage.calls) + 1, StorageFault.FAILED)
        await coordinator.write("a")
        await coordinator.flush()
        with pytest.raises(FlushError):
            await asyncio.wait_for(following, 5)
    else:
        await coordinator.close()
        await asyncio.wait_for(following, 5)
