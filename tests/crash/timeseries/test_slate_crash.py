"""A time-series database over SlateDB in a directory, whose process dies at any storage operation.

The writes come from a numbered list, as from a queue: write n is stored with sequence n, and is acknowledged
when it is durable. The next process that opens the directory finds the complete writes up to the stored
sequence and none after it. It continues from there and ends with all writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.slate_crash import WRITES, Journal, Life, Lives, Moment, Sweep, feed
from tests.crash.timeseries.numbered_writes import expected, left, write
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS

from penstock.coordinator import CoordinatorConfig, Durability, SyncMode, WriteHandle
from penstock.timeseries import TimeSeries, TimeSeriesConfig
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import load_bucket

QUEUE = "file:///queue/ingest/manifest"
BUCKETS = (Bucket.at(START_MS), Bucket.at(START_MS + HOUR_MS))
EVERY = 13
"""The usual run tests one of this many points."""


def config(sync_mode: SyncMode = SyncMode.EVERY_FLUSH) -> TimeSeriesConfig:
    """Return a configuration with explicit flushes, frequent compaction, and a different retention for
    each start."""
    return TimeSeriesConfig(
        coordinator=CoordinatorConfig(flush_interval="1h", sync_mode=sync_mode),
        retention="20000d" if sync_mode is SyncMode.EVERY_FLUSH else None,
        fold_blocks=3,
        fold_samples=1,
    )


class Fed:
    """See `tests.crash.slate_crash.Fed`."""

    def __init__(self, database: TimeSeries, position: int | None) -> None:
        self._database = database
        self.position = position

    async def write(self, number: int) -> WriteHandle:
        return await self._database.write(write(number), sequence=number, source=QUEUE)

    def ids(self, number: int) -> list[list[Any]]:
        directory = self._database._directory
        return [
            [place, str(one.labels), directory[bucket].ids[one.labels]]
            for place, bucket in enumerate(BUCKETS)
            for one in write(number)
            if one.labels in directory[bucket].ids
        ]

    async def flush(self, level: Durability) -> None:
        await (await self._database.flush(durable=level is Durability.DURABLE)).wait(level)

    async def close(self) -> None:
        await self._database.close()


async def life(place: Path, journal: Journal) -> None:
    """Run the work of a process that will be killed."""

    async def opened(sync_mode: SyncMode) -> Fed:
        database = await TimeSeries.open(place, config(sync_mode))
        return Fed(database, await database.stored_sequence())

    await feed(opened, journal)


async def ids(database: TimeSeries) -> dict[tuple[int, str], int]:
    """Return the stored id of each series in each hour. Check that no two series of an hour share an id."""
    found: dict[tuple[int, str], int] = {}
    for place, bucket in enumerate(BUCKETS):
        loaded = await load_bucket(database._coordinator.view().snapshot, bucket)
        assert not loaded.damaged  # a repair would hide a bug
        stored = loaded.ids
        assert len(set(stored.values())) == len(stored)
        found |= {(place, str(labels)): number for labels, number in stored.items()}
    return found


async def total(database: TimeSeries, function: str) -> float:
    """Return the total over all stored samples, by PromQL."""
    query = f'sum({function}({{__name__!=""}}[3650d]))'
    return float((await database.query(query, START_MS + 1000 * HOUR_MS)).series[0].values[0])


async def check(dead: Life) -> None:
    """Check the state that the process left, continue the feed after it, and check that every write is
    stored once."""
    async with await TimeSeries.open(dead.place, config()) as database:
        count = await left(database)
        assert dead.last_durable < count <= dead.last_sent + 1
        there = await ids(database)
        given = {(place, labels): one for told in dead.durable.values() for place, labels, one in told}
        assert given.items() <= there.items()
        for number in range(count, WRITES):
            await database.write(write(number), sequence=number, source=QUEUE)
            if number % 3 == 0:
                await (await database.flush()).wait()
        assert await database.stored_sequence() == WRITES - 1
    async with await TimeSeries.open(dead.place, config()) as database:
        assert await left(database) == WRITES
        assert there.items() <= (await ids(database)).items()
        samples = [value for one in expected(WRITES).values() for value in one.values()]
        assert await total(database, "sum_over_time") == sum(samples)
        assert await total(database, "count_over_time") == len(samples)


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    with Lives("tests.crash.timeseries.test_slate_crash") as lives:
        yield Sweep(lives, check)


def test_a_process_that_dies_at_an_operation_loses_and_doubles_nothing(sweep: Sweep, tmp_path: Path) -> None:
    """Test every kind of kill at some of the operations, in one test, because they share the forked
    process."""
    sweep.check_the_end(tmp_path)
    assert sum(sweep.run(moment, tmp_path, every=EVERY) for moment in Moment) >= 20
    assert sum(sweep.run_again(moment, tmp_path, every=EVERY) for moment in (Moment.TORN, Moment.STORED)) >= 2


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", Moment)
def test_a_process_that_dies_at_any_operation_loses_and_doubles_nothing(
    sweep: Sweep, tmp_path: Path, moment: Moment
) -> None:
    assert sweep.run(moment, tmp_path) >= 30


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", [Moment.TORN, Moment.STORED, Moment.AFTER])
def test_a_process_that_dies_at_any_operation_of_a_take_over_loses_and_doubles_nothing(
    sweep: Sweep, tmp_path: Path, moment: Moment
) -> None:
    assert sweep.run_again(moment, tmp_path) >= 10
