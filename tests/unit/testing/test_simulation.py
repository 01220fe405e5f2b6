from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.testing import Deadlock, HorizonReached, SimLoop, Simulation, run_simulation

SEEDS = range(20)


async def _busy_program(sim: Simulation) -> str:
    """Queues, locks, events, timeouts and task groups, with a trace of what happened in which order."""
    queue, lock, opened = asyncio.Queue[str](maxsize=3), asyncio.Lock(), asyncio.Event()

    async def produce(name: str) -> None:
        await opened.wait()
        for number in range(5):
            await asyncio.sleep(sim.rng.random() * 0.01)
            async with lock:
                await queue.put(f"{name}{number}")
                sim.trace(f"put {name}{number}")

    async def consume() -> None:
        while True:
            try:
                async with asyncio.timeout(0.004):
                    sim.trace(f"got {await queue.get()}")
            except TimeoutError:
                sim.trace("nothing")

    consumer = asyncio.create_task(consume())
    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(produce(name))
        await asyncio.sleep(1)
        opened.set()
    await asyncio.sleep(1)
    consumer.cancel()
    return sim.trace_hash()


def _trace(seed: int, *, shuffle: bool = True) -> str:
    return run_simulation(_busy_program, seed=seed, horizon_s=60, shuffle=shuffle)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    assert _trace(seed) == _trace(seed)


def test_different_seeds_give_different_traces() -> None:
    assert len({_trace(seed) for seed in SEEDS}) == len(SEEDS)


def test_the_trace_does_not_depend_on_hash_order_or_on_the_process() -> None:
    program = (
        "from tests.unit.testing.test_simulation import _trace; print([_trace(seed) for seed in range(5)])"
    )
    root = Path(__file__).parents[3]
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        }
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout.strip())
    assert outputs == {str([_trace(seed) for seed in range(5)])}


def test_without_shuffling_ready_tasks_run_first_come_first_served() -> None:
    assert _order_of_ten(shuffle=False, seed=1) == list(range(10))


def test_shuffling_reorders_ready_tasks_by_the_seed() -> None:
    orders = {tuple(_order_of_ten(shuffle=True, seed=seed)) for seed in SEEDS}
    assert len(orders) > 1
    assert all(sorted(order) == list(range(10)) for order in orders)


def _order_of_ten(*, shuffle: bool, seed: int) -> list[int]:
    order: list[int] = []

    async def main(sim: Simulation) -> None:
        async def note(number: int) -> None:
            order.append(number)

        await asyncio.gather(*(note(number) for number in range(10)))

    run_simulation(main, seed=seed, horizon_s=1, shuffle=shuffle)
    return order


def test_hours_of_virtual_time_pass_immediately() -> None:
    async def main(sim: Simulation) -> tuple[float, int]:
        clock = sim.clock()
        start_ms = clock.now_ms()
        await clock.sleep(7200)
        return clock.monotonic(), clock.now_ms() - start_ms

    started = time.perf_counter()
    assert run_simulation(main, seed=1, horizon_s=10_000) == (7200.0, 7_200_000)
    assert time.perf_counter() - started < 1


def test_clocks_differ_by_their_skew_which_may_change() -> None:
    async def main(sim: Simulation) -> list[int]:
        true, late = sim.clock(), sim.clock(skew_ms=-3_600_000)
        first = late.now_ms() - true.now_ms()
        late.skew_ms = 50
        return [first, late.now_ms() - true.now_ms()]

    assert run_simulation(main, seed=1, horizon_s=1) == [-3_600_000, 50]


def test_many_short_sleeps_do_not_lose_milliseconds() -> None:
    async def main(sim: Simulation) -> int:
        clock = sim.clock()
        start_ms = clock.now_ms()
        for _ in range(10):
            await clock.sleep(0.1)
        return clock.now_ms() - start_ms

    assert run_simulation(main, seed=1, horizon_s=2) == 1_000


def test_tasks_that_wait_for_what_cannot_happen_are_named_in_a_deadlock() -> None:
    async def main(sim: Simulation) -> None:
        async def wait_for_nobody() -> None:
            await asyncio.Event().wait()

        await asyncio.create_task(wait_for_nobody(), name="the waiter")

    with pytest.raises(Deadlock, match=r"seed 7: .*the waiter \(Event.wait:\d+\)"):
        run_simulation(main, seed=7, horizon_s=1)


def test_a_waiting_task_without_references_is_kept_and_named() -> None:
    async def main(sim: Simulation) -> None:
        async def orphan() -> None:
            await asyncio.get_running_loop().create_future()

        asyncio.create_task(orphan(), name="orphan")  # noqa: RUF006 (that nobody keeps it is the point)
        await asyncio.sleep(1)
        gc.collect()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="orphan"):
        run_simulation(main, seed=1, horizon_s=2)


def test_a_run_past_its_horizon_is_stopped() -> None:
    async def main(sim: Simulation) -> None:
        for _ in itertools.count():
            await asyncio.sleep(1)

    with pytest.raises(HorizonReached, match=r"not finished after 30 s"):
        run_simulation(main, seed=1, horizon_s=30)


def test_a_busy_loop_that_never_lets_time_pass_is_stopped() -> None:
    async def main(sim: Simulation) -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(HorizonReached, match="steps were not enough"):
        run_simulation(main, seed=1, horizon_s=30, steps_max=1_000)


def test_threads_are_refused_with_a_clear_error() -> None:
    async def main(sim: Simulation) -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        run_simulation(main, seed=1, horizon_s=1)


def test_leftover_tasks_are_cancelled_oldest_first_and_may_clean_up() -> None:
    ended: list[int] = []

    async def main(sim: Simulation) -> None:
        async def leftover(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(number)
                ended.append(number)

        tasks = [asyncio.create_task(leftover(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert len(tasks) == 3

    run_simulation(main, seed=1, horizon_s=1)
    assert ended == [0, 1, 2]


def test_unfinished_async_generators_are_closed() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append("closed")

    async def main(sim: Simulation) -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(5)

    run_simulation(main, seed=1, horizon_s=10)
    assert closed == ["closed"]


def test_an_error_of_the_program_is_raised_as_it_is_with_its_seed() -> None:
    async def main(sim: Simulation) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken") as caught:
        run_simulation(main, seed=41, horizon_s=1)
    assert caught.value.__notes__ == ["in the simulation with seed 41"]


def test_a_leftover_task_that_will_not_be_cancelled_is_reported() -> None:
    async def main(sim: Simulation) -> None:
        async def stubborn() -> None:
            for _ in itertools.count():
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    sim.trace("no")

        task = asyncio.create_task(stubborn(), name="stubborn")
        await asyncio.sleep(1)
        assert not task.done()

    with pytest.raises(HorizonReached, match="stubborn"):
        run_simulation(main, seed=1, horizon_s=10)


def test_an_error_in_a_callback_that_is_never_retrieved_fails_the_run() -> None:
    async def main(sim: Simulation) -> None:
        sim.loop.call_soon(int, "not a number")
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup, match="never retrieved") as caught:
        run_simulation(main, seed=3, horizon_s=2)
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


def test_an_error_of_a_forgotten_task_fails_the_run() -> None:
    async def main(sim: Simulation) -> None:
        async def fail() -> None:
            raise OSError("forgotten")

        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        assert task.done()

    with pytest.raises(ExceptionGroup, match="never retrieved"):
        run_simulation(main, seed=3, horizon_s=2)


def test_a_cancelled_timer_does_not_move_time() -> None:
    async def main(sim: Simulation) -> float:
        sim.loop.call_later(1_000, print).cancel()
        async with asyncio.timeout(500):
            await asyncio.sleep(1)
        await asyncio.sleep(1)
        return sim.loop.time()

    assert run_simulation(main, seed=1, horizon_s=5) == 2.0


def test_unnamed_tasks_are_numbered_per_loop() -> None:
    async def main(sim: Simulation) -> str:
        task = asyncio.create_task(asyncio.sleep(0))
        await task
        return task.get_name()

    names = {run_simulation(main, seed=1, horizon_s=1) for _ in range(3)}
    assert len(names) == 1


async def test_a_simulation_inside_another_loop_is_refused() -> None:
    async def main(sim: Simulation) -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="inside another event loop"):
        run_simulation(main, seed=1, horizon_s=1)


def test_a_closed_loop_takes_no_more_work() -> None:
    loop = SimLoop(1)
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


def test_tens_of_thousands_of_steps_take_well_under_a_second_each() -> None:
    steps: list[int] = []

    async def main(sim: Simulation) -> None:
        async def hop() -> None:
            for _ in range(500):
                await asyncio.sleep(sim.rng.random())

        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(hop())
        steps.append(sim.loop.steps)

    started = time.process_time()
    run_simulation(main, seed=1, horizon_s=1_000)
    assert steps[0] / (time.process_time() - started) > 20_000
