"""One damaged record is left out and reported. All other data is written, read and kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

import pytest
from tests.unit.timeseries.database_doubles import (
    HOUR_MS,
    START_MS,
    config,
    contents,
    disk,
    opened,
    series,
)

from penstock.coordinator import KeyValue
from penstock.errors import Corrupt
from penstock.metrics import Registry
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage
from penstock.timeseries import Labels, Metadata, MetricType, TimeSeries
from penstock.timeseries.keys import (
    FAMILY_PREFIX,
    DictionaryKey,
    ForwardKey,
    InvertedKey,
    RecordType,
    SamplesKey,
    bucket_prefix,
    record_prefix,
)
from penstock.timeseries.model import Bucket, SeriesId
from penstock.timeseries.records import block_key, block_prefix, load_bucket, merge_records

FIRST = Bucket.at(START_MS)
HOUR = "2023-11-14T22:00Z"
BROKEN = b"\xff\xff\xff"
UP, DOWN = Labels.of({"__name__": "up"}), Labels.of({"__name__": "down"})


def forward(series_id: int) -> bytes:
    return ForwardKey(FIRST, SeriesId(series_id)).encode()


def damage(there: MemoryDisk, key: bytes) -> None:
    there.persisted[key] = there.persisted[key]._replace(value=BROKEN)


async def filled(there: MemoryDisk) -> None:
    """Return a disk where `up` is series 0 and `down` is series 1, in the first hour and in the next one."""
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0)), series("down", (0, 2.0))])
        await database.sync()
        await database.write([series("up", (HOUR_MS, 3.0)), series("down", (HOUR_MS, 4.0))])


async def reopened(there: MemoryDisk, registry: Registry | None = None, **settings: object) -> TimeSeries:
    return await TimeSeries.open(there.open(), config(**settings), registry=registry)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [one for one in map(logging.LogRecord.getMessage, caplog.records) if text in one]


class Unreadable:
    """A storage that cannot scan the keys with a certain prefix."""

    def __init__(self, storage: MemoryStorage, prefix: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scan_all: Callable[..., AsyncIterator[list[KeyValue]]] = storage.scan
        self.prefix = prefix
        self.asked = 0
        monkeypatch.setattr(storage, "scan", self.scan)

    async def scan(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        if prefix.startswith(self.prefix):
            self.asked += 1
            raise Corrupt("a table breaks its checksum")
        async for page in self.scan_all(prefix, start=start, stop=stop):
            yield page


# Writing


@pytest.mark.parametrize("lost", [False, True])
async def test_a_series_whose_labels_are_damaged_or_lost_is_written_under_a_new_id(
    lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    there, registry = disk(), Registry()
    await filled(there)
    if lost:
        del there.persisted[forward(1)]
    else:
        damage(there, forward(1))
    with caplog.at_level(logging.WARNING, "penstock.timeseries"):
        async with await reopened(there, registry) as database:
            await database.write([series("up", (1, 1.5)), series("down", (1, 2.5))])
            await database.sync()
            assert database._directory[FIRST].ids == {UP: 0, DOWN: 2}
    stored = await load_bucket(there.open(), FIRST)
    assert stored.ids == {UP: 0, DOWN: 2}
    assert stored.fingerprints == {UP.fingerprint(): 0, DOWN.fingerprint(): 2}
    assert registry.value("timeseries.records_damaged") == 1
    told = lines(caplog, "has damage")
    assert len(told) == 1
    assert HOUR in told[0]
    assert "labels of series 1" in told[0]


async def test_the_id_of_damaged_labels_is_not_given_again_though_nothing_else_names_it() -> None:
    there = disk()
    await filled(there)
    damage(there, forward(1))
    del there.persisted[DictionaryKey(FIRST, DOWN.fingerprint()).encode()]
    del there.persisted[block_key(FIRST, 0)]
    assert (await load_bucket(there.open(), FIRST)).next_id == 2


@pytest.mark.parametrize("lost", [False, True])
async def test_a_dictionary_record_that_is_damaged_or_lost_is_rebuilt_from_the_labels(lost: bool) -> None:
    there, registry = disk(), Registry()
    await filled(there)
    key = DictionaryKey(FIRST, DOWN.fingerprint()).encode()
    if lost:
        del there.persisted[key]
    else:
        damage(there, key)
    async with await reopened(there, registry) as database:
        await database.write([series("down", (1, 2.5))])
        await database.sync()
        assert database._directory[FIRST].ids == {UP: 0, DOWN: 1}
        assert database._directory[FIRST].fingerprints == {UP.fingerprint(): 0, DOWN.fingerprint(): 1}
        assert (await contents(database, "down"))["down{}"] == {0: 2.0, 1: 2.5, HOUR_MS: 4.0}
    assert registry.value("timeseries.records_damaged") == 1


async def test_a_fingerprint_that_names_another_series_gives_way_to_its_own() -> None:
    there = disk()
    await filled(there)
    key = DictionaryKey(FIRST, DOWN.fingerprint()).encode()
    there.persisted[key] = there.persisted[key]._replace(value=(0).to_bytes(4, "little"))
    stored = await load_bucket(there.open(), FIRST)
    assert stored.fingerprints == {UP.fingerprint(): 0, DOWN.fingerprint(): 1}
    assert len(stored.damaged) == 1


async def test_a_series_of_which_labels_and_dictionary_are_damaged_is_new() -> None:
    there = disk()
    await filled(there)
    damage(there, forward(0))
    damage(there, DictionaryKey(FIRST, UP.fingerprint()).encode())
    stored = await load_bucket(there.open(), FIRST)
    assert (stored.ids, stored.next_id) == ({DOWN: 1}, 2)
    assert any(UP.fingerprint().hex() in one for one in stored.damaged)


async def test_a_damaged_block_does_not_refuse_the_writes_of_its_hour_and_keeps_its_number() -> None:
    there, registry = disk(), Registry()
    await filled(there)
    damage(there, block_key(FIRST, 0))
    async with await reopened(there, registry) as database:
        await database.write([series("new", (1, 5.0))])
        await database.sync()
        assert database._directory[FIRST].ids[Labels.of({"__name__": "new"})] == 2
    assert there.persisted[block_key(FIRST, 0)].value == BROKEN
    assert block_key(FIRST, 1) in there.persisted
    assert registry.value("timeseries.records_damaged") == 1


async def test_damage_is_logged_and_counted_once_however_often_the_hour_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, registry = disk(), Registry()
    await filled(there)
    damage(there, forward(0))
    with caplog.at_level(logging.WARNING, "penstock.timeseries"):
        async with await reopened(there, registry) as database:
            for at in range(3):
                await database.write([series("down", (at, 1.0))])
                await database.sync()
                database._directory._buckets.clear()
    assert registry.value("timeseries.records_damaged") == 1
    assert len(lines(caplog, "has damage")) == 1


async def test_an_hour_that_the_storage_cannot_read_refuses_the_write_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = disk()
    await filled(there)
    async with await reopened(there) as database:
        with monkeypatch.context() as patched:
            snapshot = database._coordinator.view().snapshot
            Unreadable(snapshot, record_prefix(FIRST, RecordType.FORWARD), patched)  # type: ignore[arg-type]
            with pytest.raises(Corrupt, match=HOUR):
                await database.write([series("up", (1, 1.0))])
        await database.write([series("up", (1, 1.0))])


# Opening, flushing, dropping


async def test_the_damaged_description_of_one_metric_leaves_those_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, registry = disk(), Registry()
    about = Metadata(metric_type=MetricType.GAUGE, description="text")
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0))], families={"up": about, "down": about})
    damage(there, FAMILY_PREFIX + b"down")
    there.persisted[FAMILY_PREFIX + b"\xff"] = there.persisted[FAMILY_PREFIX + b"up"]
    with caplog.at_level(logging.WARNING, "penstock.timeseries"):
        async with await reopened(there, registry) as database:
            assert database.metadata() == {"up": [about]}
            await database.write([series("down", (0, 1.0))], families={"down": about})
    assert "'down'" in caplog.text
    assert registry.value("timeseries.records_damaged") == 2
    async with await reopened(there) as database:
        assert database.metadata() == {"up": [about], "down": [about]}


async def test_an_hour_whose_blocks_cannot_be_counted_does_not_prevent_an_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = disk()
    await filled(there)
    storage = there.open()
    Unreadable(storage, block_prefix(FIRST), monkeypatch)
    with caplog.at_level(logging.WARNING, "penstock.timeseries"):
        database = await TimeSeries.open(storage, config(fold_blocks=1))
    assert HOUR in caplog.text
    await database.write([series("up", (2 * HOUR_MS, 5.0))])
    await database.sync()
    await database.write([series("up", (2 * HOUR_MS + 1, 6.0))])
    await database.sync()
    assert await contents(database, "up") == {
        "up{}": {0: 1.0, HOUR_MS: 3.0, 2 * HOUR_MS: 5.0, 2 * HOUR_MS + 1: 6.0}
    }
    await database.close()
    assert block_key(FIRST, 0) in there.persisted


async def test_an_expired_hour_that_cannot_be_read_stays_and_later_ones_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(START_MS)
    there = MemoryDisk(merge=merge_records, clock=clock)
    async with await TimeSeries.open(there.open(), config(), clock=clock) as database:
        await database.write([series("up", (0, 1.0), (HOUR_MS, 2.0), (9 * HOUR_MS, 3.0))])
    await clock.advance(9 * 3600)
    storage = there.open()
    unreadable = Unreadable(storage, bucket_prefix(FIRST), monkeypatch)
    database = await TimeSeries.open(storage, config(retention="3h"), clock=clock)
    with caplog.at_level(logging.WARNING, "penstock.timeseries"):
        for at in range(1, 5):
            await database.write([series("up", (9 * HOUR_MS + at, 3.0))])
            await database.sync()
    assert await contents(database) == {"up{}": {9 * HOUR_MS + at: 3.0 for at in range(5)}}
    await database.close()
    assert unreadable.asked == 1
    assert HOUR in caplog.text
    assert any(key.startswith(bucket_prefix(FIRST)) for key in there.persisted)
    second = bucket_prefix(Bucket.at(START_MS + HOUR_MS))
    assert not any(key.startswith(second) for key in there.persisted)


async def test_an_hour_that_could_not_be_compacted_is_dropped_when_it_expires() -> None:
    clock = ManualClock(START_MS)
    there = MemoryDisk(merge=merge_records, clock=clock)
    async with await TimeSeries.open(there.open(), config(), clock=clock) as database:
        await database.write([series("up", (0, 1.0)), series("down", (0, 1.0))])
    damage(there, forward(0))
    database = await TimeSeries.open(there.open(), config(retention="3h", fold_blocks=1), clock=clock)
    await database.write([series("up", (HOUR_MS, 3.0))])
    await database.sync()
    assert FIRST in database._flusher._damaged
    await clock.advance(5 * 3600)
    for at in range(3):
        await database.write([series("up", (5 * HOUR_MS + at, 3.0))])
        await database.sync()
    await database.close()
    assert not any(key.startswith(bucket_prefix(FIRST)) for key in there.persisted)


async def test_the_hour_and_the_record_that_prevent_a_compaction_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for key, what in ((forward(1), "labels of series 1"), (block_key(FIRST, 0), "block 0")):
        there = disk()
        await filled(there)
        damage(there, key)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "penstock.timeseries"):
            async with await reopened(there, fold_blocks=1) as database:
                for at in range(3):
                    await database.write([series("up", (2 * HOUR_MS + at, 1.0))])
                    await database.sync()
        told = lines(caplog, "is not compacted")
        assert len(told) == 1
        assert HOUR in told[0]
        assert what in told[0]


async def test_damaged_labels_do_not_stop_the_compaction_of_other_series() -> None:
    there = disk()
    await folded(there)
    damage(there, forward(1))
    async with await reopened(there, fold_blocks=1) as database:
        for at in range(1, 4):
            await database.write([series("up", (at, 1.0))])
            await database.sync()
        await database.write([])
        await database.sync()
        assert FIRST not in database._flusher._damaged
        assert (await contents(database, "up"))["up{}"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, HOUR_MS: 3.0}
    assert SamplesKey(FIRST, "down", SeriesId(1)).encode() in there.persisted


# Reading


@pytest.mark.parametrize("selector", ["down", '{__name__=~"d.+"}', '{__name__=~"down|up"}'])
async def test_a_damaged_record_of_the_inverted_index_changes_no_answer(selector: str) -> None:
    there, registry = disk(), Registry()
    await filled(there)
    async with await reopened(there) as database:
        expected = await contents(database, selector)
    damage(there, InvertedKey(FIRST, "__name__", "down").encode())
    async with await reopened(there, registry) as database:
        assert await contents(database, selector) == expected
        assert await contents(database, selector) == expected
    assert registry.value("timeseries.records_damaged") == 1


async def folded(there: MemoryDisk) -> None:
    await filled(there)
    async with await opened(there.open(), fold_blocks=1) as database:
        for at in range(3):
            await database.write([series("other", (5 * HOUR_MS + at, 1.0))])
            await database.sync()
    assert not any(key.startswith(block_prefix(FIRST)) for key in there.persisted)


DAMAGE = {
    "labels of series 1": forward(1),
    "block 0": block_key(FIRST, 0),
    "samples of series 1": SamplesKey(FIRST, "down", SeriesId(1)).encode(),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_without_a_list_of_warnings_damage_is_an_error_that_names_hour_and_record(what: str) -> None:
    there = disk()
    await (folded if what.startswith("samples") else filled)(there)
    damage(there, DAMAGE[what])
    async with await reopened(there) as database:
        with pytest.raises(Corrupt, match=f"{HOUR}.*{what}"):
            await contents(database)
        later = START_MS + HOUR_MS + 299_999  # the lookback ends where the hour does
        found = await database.query('{__name__=~"up|down"}', later)
        assert sorted(one.values.tolist() for one in found.series) == [[3.0], [4.0]]


@pytest.mark.parametrize("what", DAMAGE)
async def test_with_a_list_of_warnings_damaged_records_are_left_out_and_named(what: str) -> None:
    there, registry = disk(), Registry()
    await (folded if what.startswith("samples") else filled)(there)
    damage(there, DAMAGE[what])
    async with await reopened(there, registry) as database:
        warnings: list[str] = []
        result = await database.query('{__name__=~"up|down"}[9h]', START_MS + 8 * HOUR_MS, warnings=warnings)
        found = {one.labels.metric: one.values.tolist() for one in result.series}
        assert found == {"up": [3.0] if what == "block 0" else [1.0, 3.0], "down": [4.0]}
        assert len(warnings) == 1
        assert HOUR in warnings[0]
        assert what in warnings[0]
    assert registry.value("timeseries.records_damaged") == 1


async def test_lost_labels_are_reported_too() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0), n=str(number)) for number in range(2000)])
    del there.persisted[forward(0)]
    del there.persisted[forward(1500)]
    for selector, found in (("up", 1998), ('up{n=~"0|1999"}', 1)):
        async with await reopened(there) as database:
            with pytest.raises(Corrupt, match=f"{HOUR}.*labels of series 0"):
                await contents(database, selector)
            warnings: list[str] = []
            result = await database.query(selector, START_MS, warnings=warnings)
            assert len(result.series) == found
            assert [HOUR in one for one in warnings] == [True] * (2000 - found if found > 1 else 1)


async def test_the_number_of_warnings_is_limited() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0), n=str(number)) for number in range(500)])
    for number in range(400):
        damage(there, forward(number))
    async with await reopened(there) as database:
        warnings: list[str] = []
        assert len((await database.query("up", START_MS, warnings=warnings)).series) == 100
        assert 10 <= len(warnings) <= 30
        assert "more" in warnings[-1]


async def test_listings_leave_damaged_labels_out_and_say_so() -> None:
    there = disk()
    await filled(there)
    damage(there, forward(1))
    async with await reopened(there) as database:
        warnings: list[str] = []
        assert await database.series(end_ms=START_MS + HOUR_MS - 1, warnings=warnings) == {UP}
        assert len(warnings) == 1
        with pytest.raises(Corrupt, match=f"{HOUR}.*labels of series 1"):
            await database.series(end_ms=START_MS + HOUR_MS - 1)


async def test_samples_of_two_ids_of_one_series_are_one_series_in_order() -> None:
    there = disk()
    await filled(there)
    intact = there.persisted[forward(1)]
    damage(there, forward(1))
    async with await reopened(there) as database:
        await database.write([series("down", (0, 9.0), (5, 2.5))])
        await database.sync()
        await database.write([series("down", (3, 2.25))])
    there.persisted[forward(1)] = intact
    async with await reopened(there) as database:
        result = await database.query("down[1h]", START_MS + HOUR_MS - 1)
        (one,) = result.series
        assert (one.timestamps - START_MS).tolist() == [0, 3, 5]
        assert one.values.tolist() == [9.0, 2.25, 2.5]
