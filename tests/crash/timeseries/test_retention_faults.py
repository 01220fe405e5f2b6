"""A fault at every storage call while hours are dropped, and records that expire in any order.

An hour is always complete or gone, and a gone hour never returns, whatever the retention becomes.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, config, contents, series

from penstock.coordinator import CoordinatorError
from penstock.errors import OutcomeUnknown
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage, StorageFault
from penstock.timeseries import TimeSeries
from penstock.timeseries import flush as flushing
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import bucket_of, merge_records

HOURS = 5
SERIES = 4
FLUSHES = 5


@pytest.fixture(autouse=True)
def small_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the deletion of an hour take several flushes."""
    monkeypatch.setattr(flushing, "_DROPS_MAX", 9)


async def filled(retention: str | None) -> MemoryDisk:
    """Return a disk with five hours of four series, written in two flushes."""
    clock = ManualClock(START_MS)
    there = MemoryDisk(merge=merge_records, clock=clock)
    database = await TimeSeries.open(there.open(), config(retention=retention), clock=clock)
    for minute in (0, 1):
        await database.write(
            [
                series("up", *((hour * HOUR_MS + minute, 1.0) for hour in range(HOURS)), n=str(number))
                for number in range(SERIES)
            ]
        )
        await database.sync()
    await database.close()
    await clock.advance(HOURS * 3600)
    return there


async def dropping(storage: MemoryStorage, clock: ManualClock) -> None:
    """Run some flushes with a retention of two hours. Each deletes a part of the oldest hour."""
    try:
        database = await TimeSeries.open(storage, config(retention="2h", fold_blocks=1), clock=clock)
    except OutcomeUnknown:
        return
    try:
        for number in range(FLUSHES):
            await database.write([series("now", (HOURS * HOUR_MS + number, 1.0))])
            await (await database.flush()).wait()
        await database.close()
    except CoordinatorError:
        await storage.close()


async def hours(there: MemoryDisk, retention: str | None, kept: int = 0) -> set[int]:
    """Return the visible hours. Check that each is complete, and can be written to and compacted."""
    clock = there.clock
    assert isinstance(clock, ManualClock)
    database = await TimeSeries.open(there.open(kept=kept), config(retention=retention), clock=clock)
    found = await contents(database, "up")
    by_hour: dict[int, int] = {}
    for samples in found.values():
        for at in samples:
            by_hour[at // HOUR_MS] = by_hour.get(at // HOUR_MS, 0) + 1
    assert set(by_hour.values()) <= {2 * SERIES}, by_hour
    await database.write([series("late", *((hour * HOUR_MS + 9, 1.0) for hour in range(HOURS)))])
    await database.sync()
    late = set().union(*(await contents(database, "late")).values()) if by_hour else set()
    assert {at // HOUR_MS for at in late} >= by_hour.keys()
    await database.close()
    return set(by_hour)


async def calls_of_a_whole_drop() -> int:
    there = await filled(None)
    storage = there.open()
    assert isinstance(there.clock, ManualClock)
    await dropping(storage, there.clock)
    return len(storage.calls)


CALLS = asyncio.run(calls_of_a_whole_drop())


def test_a_drop_without_faults_makes_enough_calls_to_sweep() -> None:
    assert CALLS >= 3 * FLUSHES


@pytest.mark.parametrize("later", [None, "30d"])
@pytest.mark.parametrize("fault", StorageFault)
@pytest.mark.parametrize("call", range(1, CALLS + 1))
async def test_whatever_fails_an_hour_is_whole_or_gone_permanently(
    call: int, fault: StorageFault, later: str | None
) -> None:
    for kept in range(3):
        there = await filled(None)
        storage = there.open()
        storage.fail_at(call, fault)
        assert isinstance(there.clock, ManualClock)
        await dropping(storage, there.clock)
        left = await hours(there, later, kept)
        assert left >= {HOURS - 1}
        # Nothing is deleted before the new retention is stored. Afterwards nothing older becomes visible
        # again.
        assert left in ({*range(HOURS)}, {HOURS - 1})
        assert await hours(there, None) == left


@pytest.mark.parametrize("later", [None, "30d", "3h"])
@pytest.mark.parametrize("seed", range(12))
async def test_records_that_expire_one_by_one_take_their_hour_with_them(seed: int, later: str | None) -> None:
    there, rng = await filled("2h"), random.Random(seed)
    now_ms = there.clock.now_ms()
    over = {key for key, entry in there.persisted.items() if (entry.expire_at_ms or now_ms + 1) <= now_ms}
    assert {bucket_of(key) for key in over} == {
        Bucket.at(START_MS + hour * HOUR_MS) for hour in range(HOURS - 1)
    }
    # As in the store, some records are already gone and others are still readable.
    gone = {key for key in over if rng.random() < 0.5}
    there.persisted = {
        key: entry._replace(expire_at_ms=None) if key in over else entry
        for key, entry in there.persisted.items()
        if key not in gone
    }
    assert await hours(there, later) == {HOURS - 1}
    assert await hours(there, None) == {HOURS - 1}
