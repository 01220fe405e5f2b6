"""A compaction over several flushes: no step changes query results, and it may stop at any point."""

from __future__ import annotations

import random

import pytest
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, config, contents, disk, opened, series

from penstock.coordinator import KeyValue, Put
from penstock.errors import ConfigError, Corrupt
from penstock.metrics import Registry
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import Samples, Series, TimeSeries
from penstock.timeseries.compaction import compaction_operations, plan_compaction
from penstock.timeseries.delta import Rows, encode_block
from penstock.timeseries.gorilla import decode, decode_many
from penstock.timeseries.keys import RecordType, record_prefix
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import block_key, block_prefix, merge_records

FIRST = Bucket.at(START_MS)
SECOND = Bucket.at(START_MS + HOUR_MS)
NAMES = ("a", "b", "c")
KEPT = '{__name__=~"[abc]"}'


def all_of(value: float, at: int = 0) -> list[Series]:
    """Return a sample of two series of each name, at the same time for all writes."""
    return [series(name, (0, value), (at, value), n=str(n)) for n in range(2) for name in NAMES]


def blocks_in(there: MemoryDisk, bucket: Bucket = FIRST) -> int:
    return sum(key.startswith(block_prefix(bucket)) for key in there.persisted)


def streams_in(there: MemoryDisk, bucket: Bucket = FIRST) -> int:
    return sum(key.startswith(record_prefix(bucket, RecordType.SAMPLES)) for key in there.persisted)


async def filled(there: MemoryDisk, flushes: int = 3) -> None:
    async with await opened(there.open()) as database:
        for number in range(1, flushes + 1):
            await database.write(all_of(float(number), at=number))
            await database.sync()


async def flush(database: TimeSeries) -> None:
    """Flush an empty delta."""
    await database.write([])
    await database.sync()


def rows_of(*samples: tuple[int, int, float]) -> Rows:
    ids, times, values = zip(*samples, strict=True)
    return Rows.of_series(ids, [Samples.of([one]) for one in zip(times, values, strict=True)])


# ---- the core -------------------------------------------------------------------------------------------


def test_a_plan_names_the_series_of_all_blocks_in_the_order_of_their_streams() -> None:
    blocks = [
        KeyValue(block_key(FIRST, 4), encode_block(rows_of((0, 1, 1.0), (2, 1, 1.0)))),
        KeyValue(block_key(FIRST, 5), encode_block(rows_of((2, 2, 1.0), (7, 1, 1.0)))),
    ]
    compaction = plan_compaction(FIRST, blocks, {0: "z", 2: "m", 5: "unused", 7: "a"})
    assert [key[-4:] for key in compaction.streams] == [b"\0\0\0\7", b"\0\0\0\2", b"\0\0\0\0"]
    assert list(compaction.streams) == sorted(compaction.streams)
    assert list(compaction.counts) == [1, 2, 1]
    assert list(compaction.blocks) == [block_key(FIRST, 4), block_key(FIRST, 5)]


@pytest.mark.parametrize("metrics", [{}, {0: "a"}, {0: "a", 5: "b"}])
def test_samples_of_a_series_without_a_name_are_not_compacted(metrics: dict[int, str]) -> None:
    blocks = [KeyValue(block_key(FIRST, 0), encode_block(rows_of((0, 1, 1.0), (3, 1, 1.0))))]
    with pytest.raises(Corrupt, match=r"labels of series \d are missing or damaged"):
        plan_compaction(FIRST, blocks, metrics)


def test_the_last_step_takes_the_blocks_away_and_no_other() -> None:
    rows = rows_of((0, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0))
    blocks = [KeyValue(block_key(FIRST, 0), encode_block(rows))]
    compaction = plan_compaction(FIRST, blocks, {0: "a", 1: "a", 2: "a"})
    assert all(isinstance(one, Put) for one in compaction_operations(compaction, 2, blocks, [], None))
    assert len(compaction_operations(compaction, 3, blocks, [], None)) == 4


def test_a_block_wins_over_a_stream_and_a_later_block_over_an_earlier() -> None:
    blocks = [
        KeyValue(block_key(FIRST, 0), encode_block(rows_of((0, 1, 1.0), (0, 2, 1.0)))),
        KeyValue(block_key(FIRST, 1), encode_block(rows_of((0, 2, 2.0)))),
    ]
    compaction = plan_compaction(FIRST, blocks, {0: "a"})
    before = rows_of((0, 0, 0.0), (0, 1, 0.0), (0, 2, 0.0))
    put, *_ = compaction_operations(compaction, 1, blocks, [before], None)
    assert isinstance(put, Put)
    assert decode(put.value).values.tolist() == [0.0, 1.0, 2.0]


# ---- in the database ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples_max", "steps"),
    [
        (1, [1, 2, 3, 4, 5, 6]),
        (6, [1, 2, 3, 4, 5, 6]),
        (12, [2, 4, 6]),
        (13, [3, 6]),
        (24, [4, 6]),
        (36, [6]),
    ],
)
async def test_each_flush_takes_its_share_and_what_is_read_stays(samples_max: int, steps: list[int]) -> None:
    there = disk()
    await filled(there, flushes=3)  # two samples of each series with every flush
    async with await opened(there.open(), fold_blocks=3, fold_samples=samples_max) as database:
        before = await contents(database)
        for number, streams in enumerate(steps, 1):
            await flush(database)
            assert await contents(database, KEPT) == before
            assert streams_in(there) == streams
            assert blocks_in(there) == (0 if number == len(steps) else 3)
        await flush(database)
        assert (streams_in(there), blocks_in(there)) == (6, 0)


async def test_what_streams_hold_already_counts_too() -> None:
    there = disk()
    rng = random.Random(3)
    values = [(at, rng.random()) for at in range(36_000)]  # which do not compress: each stream is large
    async with await opened(there.open(), fold_blocks=1) as database:
        await database.write([series("a", *values, n=str(n)) for n in range(2)])
        await database.sync()
        await flush(database)
        assert (streams_in(there), blocks_in(there)) == (2, 0)
        await database.write([series("a", (0, -1.0), n=str(n)) for n in range(2)])
    async with await opened(there.open(), fold_blocks=1, fold_samples=30_000) as database:
        seen = []
        for _ in range(2):
            await flush(database)
            seen.append([values[0] for values in stored(there)])
        assert blocks_in(there) == 0
        found = await contents(database, "a")
    assert seen == [[-1.0, values[0][1]], [-1.0, -1.0]], "each was a step of its own"
    assert {labels: (len(one), one[0], one[9]) for labels, one in found.items()} == {
        f'a{{n="{n}"}}': (36_000, -1.0, values[9][1]) for n in range(2)
    }


def stored(there: MemoryDisk) -> list[list[float]]:
    """Return the values of every stream of the first hour."""
    prefix = record_prefix(FIRST, RecordType.SAMPLES)
    streams = [entry.value for key, entry in sorted(there.persisted.items()) if key.startswith(prefix)]
    return [one.values.tolist() for one in decode_many(streams)]


async def test_compaction_keeps_up_with_a_load() -> None:
    there = disk()
    async with await opened(there.open(), fold_samples=1, fold_size=200) as database:
        for number in range(60):
            await database.write(all_of(float(number), at=number))
            await database.sync()
            assert blocks_in(there) <= 9
        assert set(map(len, (await contents(database, KEPT)).values())) == {60}


async def test_a_late_sample_does_not_rewrite_a_whole_hour_in_one_flush() -> None:
    there = disk()
    rng = random.Random(5)
    values = [(at, rng.random()) for at in range(36_000)]
    async with await opened(there.open(), fold_blocks=1) as database:
        await database.write([series("a", *values, n=str(n)) for n in range(2)])
        await database.sync()
        await flush(database)
    async with await opened(there.open(), fold_blocks=1, fold_samples=30_000) as database:
        await database.write([series("a", (0, -1.0), n=str(n)) for n in range(2)])
        await database.sync()
        await database.write([series("b", (HOUR_MS, 1.0), n=str(n)) for n in range(50)])
        await database.sync()
        assert sorted(one[0] for one in stored(there)) == [-1.0, values[0][1]]
        assert blocks_in(there) == 1


async def test_a_compaction_takes_the_oldest_blocks_of_a_size_and_leaves_the_others_to_the_next() -> None:
    there = disk()
    await filled(there, flushes=3)
    async with await opened(there.open(), fold_size=1) as database:
        before = await contents(database)
        for left in (2, 1, 0):
            await flush(database)
            assert blocks_in(there) == left
            assert await contents(database) == before


async def test_hours_that_are_due_take_turns() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        for number in range(3):
            await database.write([series("a", (number, 1.0), (HOUR_MS + number, 1.0))])
            await database.sync()
    async with await opened(there.open(), fold_size=1) as database:
        for _ in range(2):
            await flush(database)
        assert [blocks_in(there), blocks_in(there, SECOND)] == [2, 2]


def test_ids_may_be_far_apart() -> None:
    far = 2**31 + 5
    blocks = [KeyValue(block_key(FIRST, 0), encode_block(rows_of((0, 1, 1.0), (far, 1, 1.0))))]
    compaction = plan_compaction(FIRST, blocks, {0: "a", far: "a"})
    assert [key[-4:] for key in compaction.streams] == [bytes(4), far.to_bytes(4)]


def test_many_blocks_are_added_up_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.timeseries.compaction._COUNTED_AT_ONCE", 3)
    blocks = [
        KeyValue(block_key(FIRST, number), encode_block(rows_of((0, number, 1.0), (1 + number % 2, 1, 1.0))))
        for number in range(9)
    ]
    compaction = plan_compaction(FIRST, blocks, {0: "a", 1: "a", 2: "a"})
    assert list(compaction.counts) == [9, 5, 4]


async def test_samples_that_come_between_two_steps_win_and_stay() -> None:
    there = disk()
    await filled(there)
    async with await opened(there.open(), fold_blocks=3, fold_samples=1) as database:
        for number in range(5):
            await flush(database)
            await database.write(all_of(10.0 + number, at=100 + number))
            await database.sync()
            for values in (await contents(database, KEPT)).values():
                assert values[0] == 10.0 + number
                assert values[100 + number] == 10.0 + number
        for _ in range(30):
            await flush(database)
        assert blocks_in(there) < 3
        last = await contents(database, KEPT)
    assert len(last) == 6
    assert all(values == {0: 14.0, 1: 1.0, 2: 2.0, 3: 3.0} | late() for values in last.values())


def late() -> dict[int, float]:
    return {100 + number: 10.0 + number for number in range(5)}


@pytest.mark.parametrize("steps", range(1, 6))
async def test_an_interrupted_compaction_begins_again(steps: int) -> None:
    there = disk()
    await filled(there)
    async with await opened(there.open(), fold_blocks=3, fold_samples=1) as database:
        before = await contents(database)
        for _ in range(steps):
            await flush(database)
    async with await opened(there.open(), fold_blocks=3) as database:
        assert await contents(database, KEPT) == before
        await flush(database)
        assert (streams_in(there), blocks_in(there)) == (6, 0)
        assert await contents(database, KEPT) == before


async def test_an_hour_that_expires_during_its_compaction_is_dropped_and_the_next_one_compacted() -> None:
    clock = ManualClock(START_MS)
    there = MemoryDisk(
        merge=merge_records, clock=ManualClock(START_MS)
    )  # keeps what is over, as SlateDB does
    registry = Registry()
    settings = config(retention="2h", fold_blocks=2, fold_samples=1)
    async with await TimeSeries.open(there.open(), settings, clock=clock, registry=registry) as database:
        for number in range(2):
            await database.write([series(name, (number, 1.0), (HOUR_MS + number, 2.0)) for name in NAMES])
            await database.sync()
        await flush(database)
        assert (streams_in(there), blocks_in(there)) == (1, 2)
        await clock.advance(2 * 3600)
        for _ in range(9):
            await flush(database)
        assert (streams_in(there), blocks_in(there)) == (0, 0)
        assert streams_in(there, SECOND) >= 3
        expected = {f"{name}{{}}": {HOUR_MS: 2.0, HOUR_MS + 1: 2.0} for name in NAMES}
        assert await contents(database, KEPT) == expected
    assert registry.value("timeseries.folds_given_up") == 0


async def test_a_stream_that_does_not_decode_ends_the_compaction_and_loses_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = disk()
    await filled(there)
    async with await opened(there.open(), fold_blocks=3) as database:
        await flush(database)
        await flush(database)
        await database.write(all_of(7.0, at=7))
    prefix = record_prefix(FIRST, RecordType.SAMPLES)
    streams = sorted(key for key in there.persisted if key.startswith(prefix))
    there.persisted[streams[3]] = there.persisted[streams[3]]._replace(value=b"\xff")
    registry = Registry()
    settings = config(fold_blocks=1, fold_samples=1)
    async with await TimeSeries.open(there.open(), settings, registry=registry) as database:
        for _ in range(9):
            await flush(database)
        assert blocks_in(there) == 1
        warnings: list[str] = []
        result = await database.query(f"{KEPT}[3650d]", START_MS + 1000 * HOUR_MS, warnings=warnings)
    assert registry.value("timeseries.folds_given_up") == 1
    assert sorted(len(one.values) for one in result.series) == [2, 5, 5, 5, 5, 5]
    assert len(warnings) == 1
    (told,) = (one.message for one in caplog.records if "is not compacted" in one.message)
    assert "samples of series 4" in told


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="fold_samples must be a whole number of at least 1"):
        config(fold_samples=0)
