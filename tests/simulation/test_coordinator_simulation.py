"""Seeded simulations of a coordinated database: many writers, slow storage, crashes and takeovers.

PENSTOCK_SEEDS sets the number of seeds. PENSTOCK_SEED selects one: the message of a failure names it.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.unit.coordinator.doubles import COUNTER, SIZE, Follower, WordDelta, WordFlusher, Words, words_in

from penstock.coordinator import (
    ApplyError,
    Backpressure,
    CoordinatorConfig,
    CoordinatorError,
    Durability,
    SyncMode,
    WriteCoordinator,
)
from penstock.metrics import Registry
from penstock.testing import Simulation, run_simulation
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage, StorageFault

SEEDS = int(os.environ.get("PENSTOCK_SEEDS", "240"))
ONE_SEED = os.environ.get("PENSTOCK_SEED")
CHUNKS = 1 if ONE_SEED else 6
HORIZON_S = 24 * 3600.0


class Day:
    """One disk, its writers, and the results that they received."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.rng = sim.rng
        self.clock = sim.clock()
        self.disk = MemoryDisk(clock=self.clock)
        self.written: set[str] = set()
        self.durable: set[str] = set()

    def slow(self, storage: MemoryStorage) -> MemoryStorage:
        """Add a delay before every call of the storage. Some delays are long."""
        begin, rng = storage._begin, self.sim.child_rng(f"storage {self.disk.owner}")

        async def later(name: str) -> StorageFault | None:
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.2, 5.0]))
            return await begin(name)

        storage._begin = later  # type: ignore[method-assign]
        return storage

    async def open(self) -> Words:
        rng = self.rng
        storage = self.slow(self.disk.open(kept=rng.randint(0, 3)))
        if rng.random() < 0.3:
            storage.fail_at(rng.randint(2, 30), rng.choice(list(StorageFault)))
        config = CoordinatorConfig(
            queue_capacity=rng.randint(1, 20),
            flush_size_threshold=rng.randint(1, 10) * SIZE,
            flush_interval=rng.choice([0.5, 5, 60]),
            max_frozen_deltas=rng.randint(0, 2),
            sync_mode=rng.choice(list(SyncMode)),
            batch_writes_max=rng.randint(1, 8),
            subscription_capacity=rng.randint(1, 4),
        )
        coordinator: Words = WriteCoordinator(
            WordDelta,
            WordFlusher(storage),
            image=int(await storage.get(COUNTER) or 0),
            snapshot=storage.seen,
            config=config,
            clock=self.clock,
            registry=Registry(),
        )
        coordinator.start()
        return coordinator

    async def writer(self, name: str, coordinator: Words) -> None:
        rng = self.sim.child_rng(name)
        last = 0
        for number in range(rng.randint(1, 25)):
            word = f"{'bad ' if rng.random() < 0.1 else ''}{name}.{number}"
            try:
                timeout = rng.choice([None, 0.1])
                handle = await coordinator.channel(rng.choice(["default", "other"])).write(
                    word, timeout=timeout
                )
                self.written.add(word)
                level = rng.choice(list(Durability))
                if level is Durability.DURABLE and rng.random() < 0.5:
                    await coordinator.flush(durable=True)
                epoch = await handle.epoch()
                assert epoch > last, "epochs of one writer rise"
                last = epoch
                if level is not Durability.DURABLE or rng.random() < 0.5:
                    await handle.wait(min(level, Durability.FLUSHED))
                    assert coordinator.view().epoch >= epoch or level is Durability.APPLIED
                else:
                    async with asyncio.timeout(30):
                        await handle.wait(Durability.DURABLE)
                    self.durable.add(word)
            except (ApplyError, Backpressure, TimeoutError):
                continue
            except CoordinatorError as error:
                self.sim.trace(f"{name} stopped: {type(error).__name__}")
                return

    async def reader(self, coordinator: Words) -> None:
        follower = await Follower.open(coordinator)
        try:
            while await follower.step():
                if self.rng.random() < 0.3:
                    await asyncio.sleep(self.rng.uniform(0, 10))
        except CoordinatorError:
            return
        assert follower.words == await words_in(coordinator.view().snapshot)

    async def life(self, name: str) -> None:
        coordinator = await self.open()
        work = [asyncio.create_task(self.writer(f"{name}{number}", coordinator)) for number in range(4)]
        reading = asyncio.create_task(self.reader(coordinator))
        pausing = asyncio.create_task(self.pauser(coordinator))
        how = self.rng.choice(["close", "close", "abort", "fenced"])
        await asyncio.sleep(self.rng.uniform(0, 60))
        if how == "close":
            await asyncio.gather(*work)
            await self.closed(coordinator)
        elif how == "abort":
            await coordinator.abort()
        else:
            self.disk.open()
            # Whoever still runs finds out with the next call to the storage.
            await self.closed(coordinator)
        await asyncio.gather(*work, reading)
        pausing.cancel()
        self.sim.trace(f"{name}: {how}, {len(self.durable)} durable")

    async def pauser(self, coordinator: Words) -> None:
        while True:
            for act in (coordinator.channel("other").pause, coordinator.channel("other").resume):
                act()
                await asyncio.sleep(self.rng.uniform(0, 3))

    async def closed(self, coordinator: Words) -> None:
        try:
            await coordinator.close()
        except CoordinatorError:
            pass

    async def check(self) -> None:
        stored = await words_in(self.disk.open())
        assert len(stored) == len(set(stored)), "a word is stored twice"
        assert self.durable <= set(stored), "a durable word is gone"
        assert set(stored) <= self.written, "a word that nobody wrote"
        counter = self.disk.persisted.get(COUNTER)
        assert int(counter.value if counter else 0) == len(stored), "numbers have a hole"


async def live(sim: Simulation) -> str:
    day = Day(sim)
    for number in range(sim.rng.randint(1, 4)):
        await day.life(f"life{number}.")
        await day.check()
    return sim.trace_hash()


def run(seed: int) -> str:
    return run_simulation(live, seed=seed, horizon_s=HORIZON_S)


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(7) == run(7)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_durable_write_is_lost_and_every_wait_ends(chunk: int) -> None:
    seeds = [int(ONE_SEED)] if ONE_SEED else range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS)
    for seed in seeds:
        run(seed)
