"""Every accepted write can be stored. Any other write is refused alone, before the flush."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, contents, disk, opened, series

from penstock.coordinator import StorageRead, WriteTimeout
from penstock.coordinator.position import Position
from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries import (
    Labels,
    Metadata,
    MetricType,
    Samples,
    Series,
    Temporality,
    TimeSeries,
    TimeSeriesConfig,
    read,
)
from penstock.timeseries.delta import SeriesDelta, check_series, prepare_write, write_size
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import load_bucket
from penstock.timeseries.series_index import BucketSeries, SeriesIndex

LONG = "x" * 65_536


def about(metadata: Metadata, number: int = 0) -> Series:
    return Series(
        labels=Labels.of({"__name__": "m", "n": str(number)}),
        samples=Samples.of([(START_MS, 1.0)]),
        metadata=metadata,
    )


UNSTORABLE = {
    "a unit too long": Metadata(metric_type=MetricType.GAUGE, unit=LONG),
    "a unit too long of a metric nobody knows": Metadata(unit=LONG),
    "a unit too long in bytes": Metadata(unit="é" * 32_768),
    "a unit that is no text": Metadata(unit="\ud800"),
    "a unit of bytes": Metadata(unit=b"s"),  # type: ignore[arg-type]
    "a description too long": Metadata(description=LONG),
    "a type that is none": Metadata(metric_type=300),  # type: ignore[arg-type]
    "a temporality that is none": Metadata(temporality=4),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("metadata", UNSTORABLE.values(), ids=UNSTORABLE)
async def test_metadata_that_cannot_be_stored_refuse_their_write_whichever_series_has_them(
    metadata: Metadata,
) -> None:
    good = about(Metadata(metric_type=MetricType.GAUGE, unit="s", description="d"))
    for written in ([about(metadata)], [good, about(metadata, 1)]):
        with pytest.raises(InvalidInput, match="metadata"):
            check_series(written)
        async with await opened(disk().open()) as database:
            with pytest.raises(InvalidInput, match="metadata"):
                await database.write(written)
            with pytest.raises(InvalidInput, match="metadata"):
                await database.write([], families={"m": metadata})
            await database.write([good])
            await database.sync()


async def test_texts_as_long_as_they_may_be_are_stored() -> None:
    longest = Metadata(unit="é" * 32_767 + "x", description="x" * 65_535, temporality=Temporality.DELTA)
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([about(longest)], families={"other": longest})
    async with await opened(there.open()) as database:
        assert database.metadata() == {"m": [longest], "other": [longest]}


@pytest.mark.parametrize("labels", [Labels((("b", "1"), ("a", "2"))), Labels((("a", "\ud800"),))])
def test_a_record_with_labels_that_the_delta_refuses_is_refused_before(labels: Labels) -> None:
    with pytest.raises(InvalidInput):
        check_series([Series(labels=labels, samples=Samples.of([(START_MS, 1.0)]))])


@pytest.mark.parametrize("source", ["\ud800", LONG, "é" * 32_768, b"queue"])
async def test_a_source_whose_name_cannot_be_stored_is_refused(source: str) -> None:
    async with await opened(disk().open()) as database:
        with pytest.raises(InvalidInput, match="name of a source"):
            await database.write([series("up", (0, 1.0))], sequence=1, source=source)
        await database.write([series("up", (0, 1.0))], sequence=1, source="é" * 32_767)
        assert await database.stored_position() == Position(1, "é" * 32_767)


def test_a_stored_source_that_is_too_long_is_damage() -> None:
    with pytest.raises(Corrupt, match="name of a source"):
        Position.decode(bytes(8) + LONG.encode())


async def test_arrays_that_change_after_a_write_change_nothing_of_it() -> None:
    async with await opened(disk().open()) as database:
        times, values = np.array([START_MS]), np.array([1.0])
        one = Series(labels=Labels.of({"__name__": "up"}), samples=Samples(times, values))
        await (await database.write([one])).epoch()
        times[0], values[0] = START_MS + 2 * HOUR_MS, 99.0
        await database.sync()
        assert await contents(database) == {"up{}": {0: 1.0}}


def delta_of(*writes: list[Series], families: dict[str, Metadata] | None = None) -> SeriesDelta:
    directory = SeriesIndex()
    delta = SeriesDelta(unflushed_max=1)
    delta.init(directory)
    for one in writes:
        write = prepare_write(one, families)
        for bucket in write.parts:
            if bucket not in directory:
                directory.load(bucket, BucketSeries())
        directory.reserve(write.parts)
        delta.apply_one(write)
    return delta


def test_labels_count_before_a_write_is_applied_once_however_many_hours_it_reaches() -> None:
    wide = {f"l{number}": "v" * 15_000 for number in range(4)}
    for hours in (1, 10):
        size = write_size(prepare_write([series("x", *((n * HOUR_MS, 1.0) for n in range(hours)), **wide)]))
        assert 60_000 < size < 70_000


def test_texts_of_metrics_count_before_and_after_a_write_is_applied() -> None:
    families = {f"m{number}": Metadata(description="x" * 60_000, unit="y" * 1_000) for number in range(20)}
    texts = 20 * 61_000
    assert texts < write_size(prepare_write([], families)) < 2 * texts
    assert texts < delta_of([], families=families).estimate_size() < 3 * texts


def test_the_unit_of_each_new_series_counts_because_each_stores_it() -> None:
    unit = Metadata(unit="y" * 60_000)
    first = [about(unit, number) for number in range(10)]
    assert delta_of(first).estimate_size() > 600_000
    assert delta_of(first, first).estimate_size() - delta_of(first).estimate_size() < 1_000


async def test_a_write_for_which_there_is_no_room_comes_back_as_it_was_given() -> None:
    storage = disk().open()
    settings = {"flush_size_threshold": "1KiB", "max_pending_size": "1KiB", "flush_interval": "1h"}
    database = await TimeSeries.open(storage, TimeSeriesConfig.from_mapping({"coordinator": settings}))
    gate = storage.gate("apply")
    await (await database.write([series("up", *((at, 1.0) for at in range(100)))])).epoch()
    with pytest.raises(WriteTimeout) as refused:
        await database.write([series("down", (0, 2.0))], timeout=0.01)
    gate.set()
    await database.write(refused.value.write)  # type: ignore[arg-type]
    await database.sync()
    assert await contents(database, "down") == {"down{}": {0: 2.0}}
    await database.close()


async def test_a_write_whose_hours_are_not_read_in_time_comes_back_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def held(read: StorageRead, bucket: Bucket) -> BucketSeries:
        await gate.wait()
        return await load_bucket(read, bucket)

    monkeypatch.setattr(read, "load_bucket", held)
    async with await opened(disk().open()) as database:
        with pytest.raises(WriteTimeout) as refused:
            await database.write([series("up", (0, 2.0))], timeout=0.01)
        gate.set()
        await database.write(refused.value.write)  # type: ignore[arg-type]
        await database.sync()
        assert await contents(database) == {"up{}": {0: 2.0}}
