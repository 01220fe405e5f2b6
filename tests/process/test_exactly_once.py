"""The SQLite recipe, killed at every step that it passes and at random moments, then resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.process.plant import Plant

from penstock.buffer import ProducerConfig
from penstock.buffer.sync import Producer

SEED = int(os.environ.get("PENSTOCK_KILL_SEED", "1"))
EACH_RUN = ["before the claim", "claimed", "dequeued"]
EACH_BATCH = [
    "before the fetch",
    "fetched",
    "in the transaction",
    "position written",
    "rows written",
    "committed",
    "acknowledged",
]


def produce(plant: Plant, first: int, batches: int) -> None:
    with Producer(ProducerConfig(store=plant.store, flush_size_bytes=1)) as producer:
        for number in range(first, first + batches):
            producer.produce([f"r.{number}.{place}".encode() for place in range(3)]).await_durable()


def check(plant: Plant, batches: int) -> None:
    """The table holds every record of the first `batches` batches once, in order, and the queue is empty."""
    expected = [(number, f"r.{number}.{place}") for number in range(batches) for place in range(3)]
    assert plant.rows() == expected
    assert plant.check_queue().entries == ()


def test_the_recipe_passes_every_step(tmp_path: Path) -> None:
    with Plant(tmp_path) as plant:
        produce(plant, 0, 2)
        code, out, err = plant.wait(plant.start_consumer("--once", "--trace"))
        assert code == 0, err
        assert set(out.splitlines()) == {*EACH_RUN, *EACH_BATCH}
        check(plant, 2)


def test_a_kill_at_any_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    points = [*((name, 1) for name in EACH_RUN), *((name, n) for n in (1, 2) for name in EACH_BATCH)]
    with Plant(tmp_path) as plant:
        for turn, (name, passing) in enumerate(points):
            produce(plant, turn * 2, 2)
            dying = plant.start_consumer("--once", "--die-at", name, "--passing", str(passing))
            code, _, err = plant.wait(dying)
            assert code == -signal.SIGKILL, f"{name}: {err}"
            rows = plant.rows()
            whole = [
                (number, f"r.{number}.{place}") for number in range(len(rows) // 3) for place in range(3)
            ]
            assert rows == whole, f"killed at {name!r}, passing {passing}"
        plant.drain()
        check(plant, 2 * len(points))


def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with Plant(tmp_path) as plant:
        try:
            for round_number in range(4):
                produce(plant, round_number * 40, 40)
                consumer = plant.start_consumer()
                time.sleep(rng.uniform(0.4, 1.0))
                plant.kill(consumer)
            plant.drain()
            check(plant, 160)
        except BaseException:
            print(f"seed {SEED}; again: PENSTOCK_KILL_SEED={SEED} python -m pytest {__file__}")
            raise
