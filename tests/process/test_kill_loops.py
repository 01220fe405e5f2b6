"""Real producers and consumers on a directory store, killed and stalled for real."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.plant import Plant, pause

PRODUCERS = 3
SOAK_S = 300.0
SEED = int(os.environ.get("PENSTOCK_KILL_SEED", "1"))


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    with Plant(tmp_path) as plant:
        yield plant


@contextlib.contextmanager
def replayable(seed: int) -> Iterator[random.Random]:
    """Print how to run the same decisions again. What the machine does with them is its own."""
    try:
        yield random.Random(seed)
    except BaseException:
        print(f"seed {seed}; again: PENSTOCK_KILL_SEED={seed} python -m pytest {__file__}")
        raise


@pytest.mark.parametrize(
    "seconds",
    [6.0, pytest.param(SOAK_S, marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_S + 300)])],
)
def test_killed_producers_and_consumers_lose_and_double_nothing(plant: Plant, seconds: float) -> None:
    with replayable(SEED) as rng:
        producers = [plant.start_producer() for _ in range(PRODUCERS)]
        consumer = plant.start_consumer()
        plant.wait_for_acks(1)
        end = time.monotonic() + seconds
        kills = 0
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.05, 0.7))
            victim = rng.randrange(PRODUCERS + 1)
            if victim == PRODUCERS:
                plant.expect_alive(consumer)
                plant.kill(consumer)
                consumer = plant.start_consumer()
            else:
                plant.expect_alive(producers[victim])
                plant.kill(producers[victim])
                producers[victim] = plant.start_producer()
            kills += 1
        for process in [*producers, consumer]:
            plant.kill(process)
        plant.check_queue()
        plant.drain()
        plant.check_drained()
        assert kills > seconds / 2
        assert len(plant.journaled("acked")) > 20


def test_a_superseded_consumer_is_fenced_and_its_successor_goes_on(plant: Plant) -> None:
    with replayable(SEED) as rng:
        producer = plant.start_producer()
        consumer = plant.start_consumer()
        for _ in range(3):
            plant.wait_for_rows(len(plant.rows()) + 1)
            time.sleep(rng.uniform(0.0, 0.2))
            successor = plant.start_consumer()
            code, _, err = plant.wait(consumer)
            assert code == 1, err
            assert "FencedError" in err, err
            consumer = successor
        plant.wait_for_rows(len(plant.rows()) + 1)
        plant.kill(producer)
        plant.kill(consumer)
        plant.drain()
        plant.check_drained()


def test_a_producer_that_stalls_past_the_grace_period_loses_nothing(plant: Plant) -> None:
    with replayable(SEED) as rng:
        producers = [plant.start_producer() for _ in range(2)]
        consumer = plant.start_consumer()
        plant.wait_for_rows(1)
        for _ in range(3):
            time.sleep(rng.uniform(0.05, 0.15))
            stalled = rng.choice(producers)
            pause(stalled, 0.9)
            before = len(plant.journaled("acked"))
            plant.wait_for_acks(before + 5)
            _all_alive(plant, [*producers, consumer])
        for process in producers:
            plant.kill(process)
        plant.kill(consumer)
        plant.check_queue()
        plant.drain()
        plant.check_drained()


def _all_alive(plant: Plant, processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        plant.expect_alive(process)
