"""Histories of a time-series database against a dictionary: flushes, compactions, restarts and crashes."""

from __future__ import annotations

import random

import pytest
from tests.unit.timeseries.database_doubles import HOUR_MS, contents, disk, opened, series

from penstock.coordinator import CoordinatorError
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import Series, TimeSeries

Model = dict[str, dict[int, float]]

pytestmark = pytest.mark.properties


class History:
    """One database, its expected content, and the content that a crash may remove."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.there: MemoryDisk = disk()
        self.durable: Model = {}
        self.pending: list[list[Series]] = []

    async def run(self, steps: int) -> None:
        database = await self.open()
        for _ in range(steps):
            await self.write(database)
            deed = self.rng.random()
            if deed < 0.5:
                await database.sync()
                self.settle(len(self.pending))
                assert await contents(database) == self.durable
            elif deed < 0.6:
                await database.close()
                self.settle(len(self.pending))
                database = await self.open()
            elif deed < 0.7:
                database = await self.crash(database)
        await database.close()

    async def open(self) -> TimeSeries:
        database = await opened(
            self.there.open(),
            fold_blocks=self.rng.choice([1, 2, 5, 1000]),
            fold_samples=self.rng.choice([1, 4, 20, 1_000_000]),
        )
        assert await contents(database) == self.durable
        return database

    async def write(self, database: TimeSeries) -> None:
        write = [self.one_series() for _ in range(self.rng.randrange(4))]
        await database.write(write)
        self.pending.append(write)

    def one_series(self) -> Series:
        rng = self.rng
        hour = rng.choice([0, 0, 0, 1, 2, rng.randrange(20)])
        samples = [
            (hour * HOUR_MS + rng.randrange(-5, 5), float(rng.randrange(100)))
            for _ in range(rng.randrange(1, 6))
        ]
        return series(rng.choice(["a", "b"]), *samples, n=str(rng.randrange(5)))

    async def crash(self, database: TimeSeries) -> TimeSeries:
        """Crash. Writes since the last sync are not flushed, so they are lost."""
        await database._coordinator.abort()
        with pytest.raises(CoordinatorError):
            await database.flush()
        self.pending = []
        return await self.open()

    def settle(self, count: int) -> None:
        for write in self.pending[:count]:
            for one in write:
                known = self.durable.setdefault(str(one.labels), {})
                times = one.samples.timestamps.tolist()
                for at, value in zip(times, one.samples.values.tolist(), strict=True):
                    known[at - START] = value
        self.pending = self.pending[count:]


START = series("a", (0, 0.0)).samples.timestamps.tolist()[0]


@pytest.mark.parametrize("seed", range(12))
async def test_a_database_holds_what_a_dictionary_would(seed: int) -> None:
    await History(seed).run(60)
