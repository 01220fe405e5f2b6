"""Writes over many hours: split once, read in parallel, each hour once, without delaying other writers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.servers.doubles import until
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, config, contents, disk, opened, series

from penstock.coordinator import StorageRead, WriteTimeout
from penstock.errors import InvalidInput, Unavailable
from penstock.testing import ManualClock
from penstock.timeseries import Labels, Samples, Series, TimeSeries, read
from penstock.timeseries.delta import HOURS_MAX, check_series, prepare_write
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import load_bucket
from penstock.timeseries.series_index import BucketSeries, SeriesIndex


class Loads:
    """Loads of hours that block until a test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[Bucket] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.failing_from = Bucket(0)
        monkeypatch.setattr(read, "load_bucket", self._load)

    async def _load(self, read: StorageRead, bucket: Bucket) -> BucketSeries:
        self.began.append(bucket)
        await self.gate.wait()
        if self.error is not None and bucket >= self.failing_from:
            raise self.error
        return await load_bucket(read, bucket)


def hourly(count: int, first: int = 0, n: str = "") -> Series:
    return series("up", *((hour * HOUR_MS, float(hour)) for hour in range(first, first + count)), n=n)


async def begun(loads: Loads, count: int) -> None:
    await until(lambda: len(loads.began) >= count)


def reserved(database: TimeSeries) -> int:
    return sum(one.reserved for one in database._directory._buckets.values())


async def test_as_many_hours_as_allowed_are_one_write_and_one_more_is_refused() -> None:
    async with await opened(disk().open()) as database:
        with pytest.raises(InvalidInput, match=r"1,001 hours, more than 1,000"):
            await database.write([hourly(HOURS_MAX + 1)])
        assert database._directory._buckets == {}
        handle = await database.write([hourly(HOURS_MAX)])
        assert await handle.epoch() == 1
        await database.sync()
        assert len(database.buckets) == HOURS_MAX
    with pytest.raises(InvalidInput, match="hours"):
        check_series([hourly(HOURS_MAX + 1)])


async def test_a_batch_of_a_queue_may_reach_more_hours_because_its_records_were_checked() -> None:
    async with await opened(disk().open()) as database:
        handle = await database.write([hourly(600), hourly(600, 600, n="2")], sequence=1)
        assert await handle.epoch() == 1


@given(
    st.lists(st.lists(st.tuples(st.integers(-3 * HOUR_MS, 3 * HOUR_MS), st.floats()), max_size=6), max_size=5)
)
def test_parts_hold_every_sample_in_its_hour_in_the_order_of_writing(
    written: list[list[tuple[int, float]]],
) -> None:
    members = [
        Series(
            labels=Labels.of({"n": str(number)}),
            samples=Samples.of((START_MS + at, value) for at, value in samples),
        )
        for number, samples in enumerate(written)
    ]
    found: dict[Bucket, list[tuple[str, int, bytes]]] = {}
    for bucket, part in prepare_write(members).parts.items():
        assert part.counts.sum() == len(part.timestamps)
        assert part.counts.min() > 0
        owners = np.repeat([one.value("n") for one in part.labels], part.counts)
        found[bucket] = [
            (str(owner), int(at), value.tobytes())
            for owner, at, value in zip(owners, part.timestamps, part.values, strict=True)
        ]
    expected: dict[Bucket, list[tuple[str, int, bytes]]] = {}
    for one in members:
        for at, value in zip(one.samples.timestamps, one.samples.values, strict=True):
            row = (one.labels.value("n"), int(at), value.tobytes())
            expected.setdefault(Bucket.at(int(at)), []).append(row)
    assert found == expected


async def test_hours_are_read_in_parallel_once_while_others_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await opened(disk().open()) as database:
        await (await database.write([hourly(1)])).epoch()
        loads = Loads(monkeypatch)
        late = [asyncio.create_task(database.write([hourly(10, 5, n=str(n))])) for n in range(3)]
        await begun(loads, 10)
        handle = await database.write([hourly(1, n="at once")])
        assert await handle.epoch() == 2
        loads.gate.set()
        assert {await (await task).epoch() for task in late} == {3, 4, 5}
        assert len(loads.began) == len(set(loads.began)) == 10
        await database.sync()
        assert reserved(database) == 0
        assert len((await contents(database))['up{n="2"}']) == 10


async def test_hours_that_are_not_read_in_time_refuse_their_write_and_nothing_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await opened(disk().open()) as database:
        loads = Loads(monkeypatch)
        with pytest.raises(WriteTimeout, match="not read within"):
            await database.write([hourly(3)], timeout=0.01)
        loads.gate.set()
        await (await database.write([hourly(3)], timeout=10)).epoch()
        assert len(loads.began) == 3
        assert reserved(database) == 0


async def test_a_writer_that_gives_up_holds_nothing_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await opened(disk().open()) as database:
        loads = Loads(monkeypatch)
        for timeout in (None, 10.0):
            task = asyncio.create_task(database.write([hourly(3)], timeout=timeout))
            await begun(loads, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        loads.gate.set()
        await (await database.write([hourly(3)])).epoch()
        assert reserved(database) == 0


async def freezes(database: TimeSeries, count: int) -> None:
    for _ in range(count):
        await database.write([hourly(1, 5000, n="live")])
        await database.sync()


async def test_hours_that_were_read_too_late_wait_for_their_writer_and_are_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(START_MS)
    async with await TimeSeries.open(disk().open(), config(), clock=clock) as database:
        await freezes(database, 1)
        loads = Loads(monkeypatch)
        late = asyncio.create_task(database.write([hourly(30)], timeout=5))
        await begun(loads, 16)
        await clock.advance(5)
        with pytest.raises(WriteTimeout, match="not read within"):
            await late
        loads.gate.set()
        await begun(loads, 30)
        await clock.advance(50)
        await freezes(database, 20)
        await (await database.write([hourly(30)], timeout=5)).epoch()
        assert len(loads.began) == 30
        await freezes(database, 20)
        assert len(list(database._directory)) == 2  # written, they are kept no longer than others


async def test_hours_whose_writer_does_not_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(START_MS)
    async with await TimeSeries.open(disk().open(), config(), clock=clock) as database:
        await freezes(database, 1)
        loads = Loads(monkeypatch)
        late = asyncio.create_task(database.write([hourly(30)]))
        await begun(loads, 16)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        loads.gate.set()
        await freezes(database, 20)
        assert len(list(database._directory)) == 31
        await clock.advance(61)
        await freezes(database, 20)
        assert len(list(database._directory)) == 2


def test_no_more_hours_wait_for_their_writers_than_one_write_may_reach() -> None:
    clock = ManualClock(START_MS)
    directory = SeriesIndex(clock=clock)
    buckets = [Bucket.at(START_MS + hour * HOUR_MS) for hour in range(HOURS_MAX + 10)]
    for bucket in buckets:
        directory.load(bucket, BucketSeries())
    directory.expect(buckets)
    directory.freezes = 10
    assert directory.forget(1) == buckets[HOURS_MAX:][:-2]
    directory.expect(buckets[:1])
    assert len(list(directory)) == HOURS_MAX + 2


async def test_an_hour_that_cannot_be_read_refuses_the_writes_that_need_it_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await opened(disk().open()) as database:
        loads = Loads(monkeypatch)
        loads.error = Unavailable("no answer")
        loads.failing_from = Bucket.at(START_MS + 20 * HOUR_MS)
        loads.gate.set()
        with pytest.raises(Unavailable, match="no answer"):
            await database.write([hourly(30)])
        assert reserved(database) == 0
        loads.error = None
        await (await database.write([hourly(30)])).epoch()
        assert reserved(database) == 0


async def test_a_flush_does_not_wait_for_threads_that_others_use() -> None:
    release = threading.Event()
    loop = asyncio.get_running_loop()
    async with await opened(disk().open()) as database:
        await (await database.write([hourly(2)])).epoch()
        busy = [loop.run_in_executor(None, release.wait, 30) for _ in range(64)]
        try:
            async with asyncio.timeout(10):
                await database.sync()
        finally:
            release.set()
        await asyncio.gather(*busy)
