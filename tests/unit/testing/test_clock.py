from __future__ import annotations

import asyncio
import itertools

import pytest

from penstock.clock import Clock
from penstock.testing import ManualClock


async def _note_after(clock: Clock, seconds: float, log: list[tuple[str, float]], name: str) -> None:
    await clock.sleep(seconds)
    log.append((name, clock.monotonic()))


async def test_time_changes_only_when_it_is_advanced() -> None:
    clock = ManualClock(start_ms=5_000)
    await asyncio.sleep(0)
    assert (clock.now_ms(), clock.monotonic()) == (5_000, 0.0)
    await clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (6_500, 1.5)


async def test_ten_tenths_make_exactly_one_second() -> None:
    clock = ManualClock(start_ms=0)
    for _ in range(10):
        await clock.advance(0.1)
    assert (clock.now_ms(), clock.monotonic()) == (1_000, 1.0)


async def test_sleepers_wake_in_the_order_of_their_deadlines_and_see_their_own_deadline() -> None:
    clock, log = ManualClock(), list[tuple[str, float]]()
    async with asyncio.TaskGroup() as group:
        for name, seconds in [("c", 3.0), ("a", 1.0), ("b2", 2.0), ("b1", 2.0)]:
            group.create_task(_note_after(clock, seconds, log, name))
        await clock.advance(10)
    assert log == [("a", 1.0), ("b2", 2.0), ("b1", 2.0), ("c", 3.0)]
    assert clock.monotonic() == 10


async def test_a_sleep_begun_by_a_woken_task_counts_from_its_waking() -> None:
    clock, ticks = ManualClock(), list[float]()

    async def tick() -> None:
        for _ in range(5):
            await clock.sleep(1)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(tick())
    await clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    assert clock.sleeping == 1
    await clock.advance(1.5)
    await task
    assert ticks == [1.0, 2.0, 3.0, 4.0, 5.0]


async def test_a_sleeper_after_the_target_time_does_not_wake() -> None:
    clock, log = ManualClock(), list[tuple[str, float]]()
    task = asyncio.create_task(_note_after(clock, 2, log, "late"))
    await clock.advance(1.999)
    assert log == []
    await clock.advance(0.001)
    assert log == [("late", 2.0)]
    await task


async def test_woken_tasks_run_until_they_are_idle() -> None:
    clock, queue, seen = ManualClock(), asyncio.Queue[int](), list[int]()

    async def feed() -> None:
        await clock.sleep(1)
        for number in range(20):
            await asyncio.sleep(0)
            await queue.put(number)

    async def drain() -> None:
        while len(seen) < 20:
            seen.append(await queue.get())

    tasks = [asyncio.create_task(feed()), asyncio.create_task(drain())]
    await clock.advance(1)
    assert seen == list(range(20))
    await asyncio.gather(*tasks)


async def test_a_cancelled_sleeper_is_removed() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1))
    await clock.advance(0.5)
    task.cancel()
    await clock.advance(1)
    assert task.cancelled()
    assert clock.sleeping == 0


async def test_a_sleep_of_nothing_returns_without_an_advance() -> None:
    clock = ManualClock()
    await clock.sleep(0)
    await clock.sleep(-1)


async def test_a_wall_clock_jump_leaves_intervals_alone() -> None:
    clock = ManualClock(start_ms=10_000)
    clock.jump_wall(-4_000)
    assert (clock.now_ms(), clock.monotonic()) == (6_000, 0.0)


async def test_time_never_goes_back() -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        await ManualClock().advance(-1)


async def test_tasks_that_never_become_idle_are_reported() -> None:
    async def spin() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    task = asyncio.create_task(spin())
    with pytest.raises(RuntimeError, match="still busy"):
        await ManualClock().advance(1)
    task.cancel()
