"""Channels: shared epochs, fair shares, pauses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain

import pytest
from tests.unit.coordinator.doubles import World, is_waiting, marks, turns

from penstock.coordinator import Backpressure, Durability
from penstock.errors import ConfigError


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


async def test_channels_share_epochs_and_keep_their_own_order(world: World) -> None:
    coordinator = await world.build(batch_writes_max=4)
    left, right = coordinator.channel("left"), coordinator.channel("right")
    handles = {channel.name: [channel.try_write(str(n)) for n in range(20)] for channel in (left, right)}
    coordinator.start()
    epochs = {name: [await handle.epoch() for handle in mine] for name, mine in handles.items()}
    assert all(mine == sorted(mine) for mine in epochs.values())
    assert sorted(chain(*epochs.values())) == list(range(1, 41))


async def test_a_busy_channel_does_not_starve_a_quiet_one(world: World) -> None:
    coordinator = await world.build(batch_writes_max=10)
    busy, quiet = coordinator.channel("busy"), coordinator.channel("quiet")
    for number in range(1000):
        busy.try_write(str(number))
    handle = quiet.try_write("hello")
    coordinator.start()
    assert await handle.epoch() <= 10


async def test_more_channels_than_a_batch_takes_get_their_turns(world: World) -> None:
    coordinator = await world.build(batch_writes_max=2)
    channels = [coordinator.channel(str(number)) for number in range(5)]
    handles = [channel.try_write(str(turn)) for turn in range(20) for channel in channels]
    coordinator.start()
    first = [await handle.epoch() for handle in handles[:5]]
    assert max(first) <= 15


async def test_a_paused_channel_keeps_its_writes_and_fills_up(world: World) -> None:
    coordinator = await world.open()
    channel = coordinator.channel("backfill", capacity=2)
    coordinator.pause("backfill")
    first = channel.try_write("a")
    channel.try_write("b")
    with pytest.raises(Backpressure, match="'backfill'"):
        channel.try_write("c")
    waiting = asyncio.create_task(channel.write("c"))
    other = await coordinator.write("other")
    assert await other.epoch() == 1
    await turns()
    assert not first.sequenced
    assert is_waiting(waiting)
    coordinator.resume("backfill")
    assert await first.epoch() == 2
    assert await (await waiting).epoch() == 4


async def test_a_flush_does_not_wait_for_a_paused_channel(world: World) -> None:
    coordinator = await world.build()
    channel = coordinator.channel("backfill")
    channel.try_write("held back")
    coordinator.try_write("a")
    before = await coordinator.flush()
    channel.pause()
    after = await coordinator.flush()
    coordinator.start()
    await before.wait()
    await after.wait()
    assert marks(coordinator) == (1, 1, 0)


async def test_close_applies_the_writes_of_a_paused_channel(world: World) -> None:
    coordinator = await world.open()
    channel = coordinator.channel("backfill")
    channel.pause()
    handle = channel.try_write("a")
    await coordinator.close()
    await handle.wait(Durability.DURABLE)


async def test_a_channel_has_one_capacity(world: World) -> None:
    coordinator = await world.build()
    channel = coordinator.channel("x", capacity=5)
    assert coordinator.channel("x") is channel
    assert coordinator.channel("x", capacity=5) is channel
    with pytest.raises(ConfigError, match="has the capacity 5, not 6"):
        coordinator.channel("x", capacity=6)
    with pytest.raises(ConfigError, match="at least 1"):
        coordinator.channel("y", capacity=0)


async def test_an_unknown_channel_cannot_be_paused(world: World) -> None:
    coordinator = await world.build()
    with pytest.raises(ConfigError, match=r"no channel is named 'x': there are \['default'\]"):
        coordinator.pause("x")
