"""A time-series database in memory: writes are found completely, also after a restart."""

from __future__ import annotations

import asyncio
import random

import numpy as np
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

from penstock.coordinator import ApplyError, Durability, FlushFenced, WriteTimeout
from penstock.coordinator.storage import KEY_BYTES_MAX
from penstock.errors import Corrupt, Fenced, InvalidInput
from penstock.metrics import Registry
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import Labels, Metadata, MetricType, Samples, Series, TimeSeries
from penstock.timeseries.keys import (
    FAMILY_PREFIX,
    DictionaryKey,
    ForwardKey,
    RecordType,
    bucket_prefix,
    record_prefix,
)
from penstock.timeseries.model import Bucket, SeriesId
from penstock.timeseries.promql import StaticSource, TooManySamples, parse_selector
from penstock.timeseries.records import block_prefix, merge_records
from penstock.timeseries.series_index import BucketSeries

FIRST = Bucket.at(START_MS)


async def test_what_is_durable_is_found_by_a_query() -> None:
    async with await opened(disk().open()) as database:
        handle = await database.write([series("up", (0, 1.0), job="a"), series("up", (5, 2.0), job="b")])
        await database.flush()
        await handle.wait(Durability.DURABLE)
        result = await database.query("sum(up)", START_MS + 10)
        assert [one.values.tolist() for one in result.series] == [[3.0]]


async def test_a_write_is_seen_when_it_is_flushed_and_not_before() -> None:
    async with await opened(disk().open()) as database:
        await (await database.write([series("up", (0, 1.0))])).wait(Durability.APPLIED)
        assert await contents(database) == {}
        await database.sync()
        assert await contents(database) == {"up{}": {0: 1.0}}


async def test_a_write_over_two_hours_is_one_write() -> None:
    async with await opened(disk().open()) as database:
        before = await database.write([series("up", (-1, 1.0), (0, 2.0), (HOUR_MS, 3.0))])
        assert await before.epoch() == 1
        await database.sync()
        assert [bucket.start_ms - START_MS for bucket in database.buckets] == [-HOUR_MS, 0, HOUR_MS]
        assert await contents(database) == {"up{}": {-1: 1.0, 0: 2.0, HOUR_MS: 3.0}}


async def test_a_refused_series_leaves_nothing_of_its_write_in_any_bucket() -> None:
    async with await opened(disk().open()) as database:
        bad = series("up", (HOUR_MS, 1.0), long="x" * 20_000)
        refused = await database.write([series("up", (0, 1.0), job="good"), bad])
        with pytest.raises(ApplyError, match="more than 16384"):
            await refused.wait(Durability.APPLIED)
        kept = await database.write([series("up", (1, 2.0))])
        await database.sync()
        await kept.wait(Durability.DURABLE)
        assert await contents(database) == {"up{}": {1: 2.0}}
        assert await database.label_values("job") == set()


async def test_times_out_of_range_are_refused_before_anything_is_queued() -> None:
    async with await opened(disk().open()) as database:
        with pytest.raises(InvalidInput):
            await database.write([series("up", (-START_MS - 1, 1.0))])
        assert database._directory._buckets == {}


async def test_labels_that_are_not_in_order_are_refused() -> None:
    async with await opened(disk().open()) as database:
        labels = Labels((("b", "1"), ("a", "2")))
        handle = await database.write([Series(labels=labels, samples=Samples.of([(START_MS, 1.0)]))])
        with pytest.raises(ApplyError, match=r"Labels\.of"):
            await handle.epoch()


async def test_the_sample_written_last_counts_within_a_write_a_delta_and_between_flushes() -> None:
    async with await opened(disk().open()) as database:
        await database.write([series("up", (0, 1.0), (0, 2.0)), series("up", (0, 3.0), (1, 1.0))])
        await database.write([series("up", (1, 4.0))])
        await database.sync()
        assert await contents(database) == {"up{}": {0: 3.0, 1: 4.0}}
        await database.write([series("up", (1, 5.0))])
        await database.sync()
        assert await contents(database) == {"up{}": {0: 3.0, 1: 5.0}}


async def test_ids_continue_after_the_largest_after_a_restart() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, float(number)), n=str(number)) for number in range(3)])
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 3.0), n="3"), series("up", (1, 0.5), n="0")])
        await database.sync()
        assert database._directory[FIRST].next_id == 4
        found = await contents(database)
    assert found['up{n="0"}'] == {0: 0.0, 1: 0.5}
    assert {name: samples[0] for name, samples in found.items()} == {
        f'up{{n="{number}"}}': float(number) for number in range(4)
    }


async def test_two_series_of_one_fingerprint_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "fingerprint", lambda self: b"0123456789abcdef")
    async with await opened(disk().open()) as database:
        both = await database.write([series("up", (0, 1.0), n="1"), series("up", (0, 1.0), n="2")])
        with pytest.raises(ApplyError, match="fingerprint"):
            await both.epoch()
        one = await database.write([series("up", (0, 1.0), n="1")])
        await one.wait(Durability.APPLIED)
        other = await database.write([series("up", (0, 1.0), n="2")])
        with pytest.raises(ApplyError, match="fingerprint"):
            await other.epoch()


async def test_a_flush_stores_one_block_for_a_bucket_and_no_merge_of_samples() -> None:
    storage = disk().open()
    async with await opened(storage) as database:
        for at in range(3):
            await database.write([series("up", (at, 1.0), n=str(number)) for number in range(50)])
            await database.sync()
        blocks = [row async for page in storage.scan(block_prefix(FIRST)) for row in page]
        streams = [
            row async for page in storage.scan(record_prefix(FIRST, RecordType.SAMPLES)) for row in page
        ]
        assert (len(blocks), len(streams)) == (3, 0)


async def test_compacted_samples_are_what_they_were_in_blocks() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        rng = random.Random(4)
        for _ in range(6):
            await database.write(
                [
                    series("up", *((rng.randrange(2 * HOUR_MS), rng.random()) for _ in range(9)), n=str(n))
                    for n in range(5)
                ]
            )
            await database.sync()
        before = await contents(database)
    storage = there.open()
    async with await opened(storage, fold_blocks=1) as database:
        for at in range(3):
            await database.write([series("other", (at, 1.0))])
            await database.sync()
        after = await contents(database, '{__name__="up"}')
        streams = [
            row async for page in storage.scan(record_prefix(FIRST, RecordType.SAMPLES)) for row in page
        ]
        assert streams
    assert after == before


async def test_a_late_sample_wins_over_a_compacted_one_and_is_compacted_again() -> None:
    there = disk()
    async with await opened(there.open(), fold_blocks=1) as database:
        for value in (1.0, 2.0, 3.0, 4.0):
            await database.write([series("up", (0, value), (int(value), value))])
            await database.sync()
            assert (await contents(database))["up{}"][0] == value
    async with await opened(there.open()) as database:
        assert await contents(database) == {"up{}": {0: 4.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}}


async def test_a_query_reads_one_instant() -> None:
    storage = disk().open()
    async with await opened(storage, fold_blocks=1) as database:
        await database.write([series("up", (0, 1.0), n="1"), series("up", (HOUR_MS, 1.0), n="1")])
        await database.sync()
        snapshot, buckets = database._within(None, None)
        await database.write([series("up", (0, 7.0), n="1"), series("up", (HOUR_MS, 7.0), n="2")])
        await database.sync()
        from penstock.timeseries.promql import Engine, Selection
        from penstock.timeseries.read import LabelCache, select

        selection = Selection(parse_selector("up"), START_MS, START_MS + 2 * HOUR_MS)
        found = await select(snapshot, buckets, selection, LabelCache(), Engine().budget())
        assert [(str(labels), values.tolist()) for labels, _, values in found] == [('up{n="1"}', [1.0, 1.0])]


@pytest.mark.parametrize(
    "selector",
    [
        "up",
        'up{job="a"}',
        'up{job=~"a|b"}',
        'up{job!="a"}',
        'up{job!~"a.*"}',
        'up{job=""}',
        'up{job=~".*"}',
        'up{job=~".+"}',
        '{job="a",n=~"1."}',
        '{__name__=~"u.|down"}',
        '{n!=""}',
        'nothing{job="a"}',
        'up{job="nothing"}',
        'up{job="a",job!="a"}',
        'up{no_such=""}',
    ],
)
@pytest.mark.parametrize("folded", [False, True])
async def test_selectors_find_what_a_scan_of_everything_finds(selector: str, folded: bool) -> None:
    written = [
        series(name, (at, float(number + at)), n=str(number), **({"job": job} if job else {}))
        for number, (name, job) in enumerate(
            [(name, job) for name in ("up", "down") for job in ("a", "b", "ab", "", "a") for _ in range(3)]
        )
        for at in (0, 60_000, HOUR_MS)
    ]
    async with await opened(disk().open(), fold_blocks=1 if folded else 1000) as database:
        for one in written:
            await database.write([one])
        await database.sync()
        await database.write([])
        await database.sync()
        matchers = parse_selector(selector)
        expected = {
            str(labels): values.tolist()
            for labels, _, values in StaticSource(written).select(matchers, START_MS, START_MS + 2 * HOUR_MS)
        }
        found = await contents(database, selector if selector != '{n!=""}' else '{n!="",__name__!=""}')
        assert {name: list(samples.values()) for name, samples in found.items()} == expected
        assert {str(one) for one in await database.series([matchers])} == set(expected)


async def test_names_values_and_series_are_listed() -> None:
    async with await opened(disk().open()) as database:
        await database.write(
            [series("up", (0, 1.0), job="a"), series("down", (HOUR_MS, 1.0), zone="\x01\xff")]
        )
        await database.sync()
        assert await database.label_names() == {"__name__", "job", "zone"}
        assert await database.label_names([parse_selector("up")]) == {"__name__", "job"}
        assert await database.label_names(end_ms=START_MS) == {"__name__", "job"}
        assert await database.label_values("__name__") == {"up", "down"}
        assert await database.label_values("zone") == {"\x01\xff"}
        assert await database.label_values("job", [parse_selector("down")]) == set()
        assert {str(one) for one in await database.series(start_ms=START_MS + HOUR_MS)} == {
            'down{zone="\x01\xff"}'
        }


async def test_a_name_that_begins_another_is_listed_too() -> None:
    async with await opened(disk().open()) as database:
        await database.write(
            [series("up", (0, 1.0), a="1", aa="2", a_b="3", **{"a\x00": "4", "a\x01b": "5"})]
        )
        await database.sync()
        assert await database.label_names() == {"__name__", "a", "aa", "a_b", "a\x00", "a\x01b"}


async def test_what_writers_say_of_metrics_is_kept() -> None:
    there = disk()
    about = Metadata(metric_type=MetricType.GAUGE, unit="celsius", description="how warm")
    async with await opened(there.open()) as database:
        warm = Series(
            labels=Labels.of({"__name__": "warm"}), samples=Samples.of([(START_MS, 1.0)]), metadata=about
        )
        bucket = Metadata(metric_type=MetricType.HISTOGRAM)
        part = Series(
            labels=Labels.of({"__name__": "h_bucket"}), samples=Samples.of([(START_MS, 1.0)]), metadata=bucket
        )
        await database.write([warm, part], families={"lone": Metadata(description="no samples yet")})
    async with await opened(there.open()) as database:
        assert database.metadata("warm") == {"warm": [about]}
        assert database.metadata("none") == {}
        assert set(database.metadata()) == {"warm", "h", "lone"}


async def test_a_name_as_long_as_a_key_can_hold_is_stored_and_a_longer_one_is_refused() -> None:
    longest = "m" * (KEY_BYTES_MAX - len(FAMILY_PREFIX))
    about = Metadata(metric_type=MetricType.GAUGE)
    async with await opened(disk().open()) as database:
        with pytest.raises(InvalidInput, match="metadata"):
            await database.write([], families={longest + "m": about})
        await database.write([], families={longest: about})
        await database.sync()
        assert database.metadata(longest)


async def test_the_newest_samples_are_those_that_have_not_ended() -> None:
    from penstock.timeseries.model import STALE_MARKER

    async with await opened(disk().open()) as database:
        ended = series("up", (10, float(STALE_MARKER)), n="2")
        await database.write([series("up", (0, 1.0), (20, 2.0), n="1"), series("up", (0, 1.0), n="2"), ended])
        await database.sync()
        newest = await database.newest([parse_selector("up")], START_MS + 30)
        assert [(str(o.labels), o.timestamps.tolist()) for o in newest] == [('up{n="1"}', [START_MS + 20])]
        assert await database.newest([parse_selector("up")], START_MS + 300_020) == []


async def test_a_bucket_is_gone_when_its_time_is_over() -> None:
    clock = ManualClock(START_MS)
    there = MemoryDisk(merge=merge_records, clock=clock)
    storage = there.open()
    database = await TimeSeries.open(storage, config(retention="2h"), clock=clock)
    await database.write([series("up", (0, 1.0), (HOUR_MS, 2.0))])
    await database.sync()
    await clock.advance(2 * 3600)
    assert [bucket.start_ms for bucket in database.buckets] == [START_MS + HOUR_MS]
    assert await contents(database) == {"up{}": {HOUR_MS: 2.0}}
    await database.write([series("up", (0, 9.0), (HOUR_MS + 1, 3.0))])
    await database.sync()
    assert await contents(database) == {"up{}": {HOUR_MS: 2.0, HOUR_MS + 1: 3.0}}
    await database.close()
    assert [page async for page in there.open().scan(bucket_prefix(FIRST))] == []


async def test_a_bucket_that_was_stored_without_an_end_is_deleted_when_retention_is_set() -> None:
    clock = ManualClock(START_MS)
    there = MemoryDisk(merge=merge_records, clock=clock)
    database = await TimeSeries.open(there.open(), config(), clock=clock)
    await database.write([series("up", (0, 1.0))])
    await database.close()
    database = await TimeSeries.open(there.open(), config(retention="2h"), clock=clock)
    await clock.advance(5 * 3600)
    await database.write([series("up", (5 * HOUR_MS, 1.0))])
    await database.sync()
    await database.close()
    assert not [key for key in there.persisted if key.startswith(bucket_prefix(FIRST))]


async def test_a_restart_finds_every_bucket_however_large() -> None:
    there = disk()
    hours = [-48, -1, 0, 5, 700]
    async with await opened(there.open()) as database:
        for hour in hours:
            many = [series("up", (hour * HOUR_MS, 1.0), n=str(number)) for number in range(120)]
            await database.write(many)
    async with await opened(there.open()) as database:
        assert [(bucket.start_ms - START_MS) // HOUR_MS for bucket in database.buckets] == hours
        assert sum(map(len, (await contents(database)).values())) == 120 * len(hours)


async def test_a_series_that_expires_while_a_query_runs_is_gone_and_not_damaged() -> None:
    there = disk()
    async with await opened(there.open(), retention="87600h") as database:
        await database.write([series("up", (0, 1.0), n=str(number)) for number in range(70)])
    there.persisted.pop(ForwardKey(FIRST, SeriesId(0)).encode())
    async with await opened(there.open(), retention="87600h") as database:
        assert len(await contents(database, "up")) == 69
        assert await contents(database, 'up{n="0"}') == {}


async def test_a_bucket_of_another_day_is_read_again_with_all_that_was_flushed() -> None:
    async with await opened(disk().open()) as database:
        await database.write([series("up", (0, 1.0), n="1")])
        for hour in range(1, 12):
            await database.write([series("up", (hour * HOUR_MS, 1.0), n="1")])
            await database.sync()
        assert FIRST not in database._directory
        await database.write([series("up", (1, 2.0), n="1"), series("up", (1, 2.0), n="2")])
        await database.sync()
        assert database._directory[FIRST].next_id == 2
        assert (await contents(database))['up{n="1"}'][1] == 2.0


async def test_a_bucket_stays_while_a_write_that_needs_it_is_queued() -> None:
    async with await opened(disk().open()) as database:
        await database.write([series("up", (0, 1.0))])
        await database.sync()
        database._directory.reserve([FIRST])
        for hour in range(1, 12):
            await database.write([series("up", (hour * HOUR_MS, 1.0))])
            await database.sync()
        assert FIRST in database._directory
        database._directory.release([FIRST])


async def test_concurrent_writers_of_a_new_bucket_share_its_ids() -> None:
    async with await opened(disk().open()) as database:
        writes = [database.write([series("up", (n, 1.0), n=str(n % 7))]) for n in range(100)]
        await asyncio.gather(*writes)
        await database.sync()
        assert database._directory[FIRST].next_id == 7
        assert sum(map(len, (await contents(database)).values())) == 100


async def test_a_sequence_is_stored_with_its_write_and_never_goes_back() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        assert await database.stored_sequence() is None
        await database.write([series("up", (0, 1.0))], sequence=0)
        assert await database.stored_sequence() == 0
        again = await database.write([series("up", (0, 2.0))], sequence=0)
        with pytest.raises(ApplyError, match="not after 0"):
            await again.epoch()
        await database.write([], sequence=7)
    async with await opened(there.open()) as database:
        assert await database.stored_sequence() == 7
        assert await contents(database) == {"up{}": {0: 1.0}}


async def test_a_newer_writer_fences_an_older_one() -> None:
    there = disk()
    older = await opened(there.open())
    await older.write([series("up", (0, 1.0))])
    await older.sync()
    newer = await opened(there.open())
    with pytest.raises(Fenced):
        await older.check()
    await older.write([series("up", (1, 2.0))])
    with pytest.raises(FlushFenced):
        await older.sync()
    assert isinstance(await older.failure(), FlushFenced)
    with pytest.raises(FlushFenced):
        await older.close()
    assert await contents(newer) == {"up{}": {0: 1.0}}
    await newer.close()


async def test_a_write_for_which_there_is_no_room_is_given_back_and_holds_no_bucket() -> None:
    storage = disk().open()
    database = await TimeSeries.open(
        storage,
        config().from_mapping(
            {
                "coordinator": {
                    "flush_size_threshold": "1KiB",
                    "max_pending_size": "1KiB",
                    "flush_interval": "1h",
                }
            }
        ),
    )
    gate = storage.gate("apply")
    await database.write([series("up", *((at, 1.0) for at in range(100)))])

    async def write_until_refused() -> None:
        for _ in range(10_100):
            await database.write([series("up", (0, 1.0))], timeout=0.01)
            await asyncio.sleep(0)

    with pytest.raises(WriteTimeout):
        await write_until_refused()
    gate.set()
    await database.close()
    assert all(database._directory[bucket].reserved == 0 for bucket in database._directory)


async def test_a_query_that_reads_too_much_is_refused() -> None:
    from penstock.timeseries.promql import EngineConfig

    async with await opened(disk().open(), engine=EngineConfig(samples_max=10)) as database:
        await database.write([series("up", *((at, 1.0) for at in range(50)))])
        await database.sync()
        with pytest.raises(TooManySamples):
            await database.query("up[1h]", START_MS + 100)


async def test_a_dictionary_that_lost_a_record_is_noticed() -> None:
    there, registry = disk(), Registry()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0))])
    there.persisted.pop(ForwardKey(FIRST, SeriesId(0)).encode())
    async with await TimeSeries.open(there.open(), config(), registry=registry) as database:
        await database.write([series("up", (1, 1.0))])
        assert registry.value("timeseries.records_damaged") == 1
        with pytest.raises(Corrupt, match="labels of series 0"):
            await contents(database, "up")


async def test_a_bucket_that_cannot_be_compacted_is_left_as_it_is_and_writes_continue() -> None:
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0)), series("down", (0, 2.0))])
    there.persisted.pop(ForwardKey(FIRST, SeriesId(0)).encode())
    blocks = [key for key in there.persisted if key.startswith(block_prefix(FIRST))]
    registry = Registry()
    async with await TimeSeries.open(there.open(), config(fold_blocks=1), registry=registry) as database:
        for at in range(2):
            await database.write([series("other", (HOUR_MS + at, 3.0))])
            await database.sync()
        assert await contents(database, "other") == {"other{}": {HOUR_MS: 3.0, HOUR_MS + 1: 3.0}}
    assert set(blocks) <= there.persisted.keys()
    assert "timeseries_folds_given_up 1" in registry.prometheus_text()


def test_a_lookup_changes_nothing() -> None:
    known = BucketSeries()
    labels = [Labels.of({"a": "1"}), Labels.of({"a": "2"}), Labels.of({"a": "1"})]
    ids, new = known.lookup(labels, [Metadata()] * 3)
    assert (ids, [one.series_id for one in new]) == ([0, 1, 0], [0, 1])
    assert (known.ids, known.next_id) == ({}, 0)
    known.add(new)
    assert known.lookup(labels, [Metadata()] * 3) == ([0, 1, 0], [])


async def test_values_are_kept_bit_by_bit() -> None:
    odd = [float("nan"), float("-inf"), -0.0, 5e-324, 1.7976931348623157e308]
    async with await opened(disk().open(), fold_blocks=1) as database:
        await database.write([series("odd", *enumerate(odd))])
        await database.sync()
        await database.write([])
        await database.sync()
        result = await database.query("odd[1h]", START_MS + HOUR_MS - 1)
        found = result.series[0].values.view(np.uint64).tolist()
        assert found == np.array(odd).view(np.uint64).tolist()


def test_a_dictionary_key_names_its_fingerprint() -> None:
    fingerprint = Labels.of({"a": "1"}).fingerprint()
    assert DictionaryKey(FIRST, fingerprint).encode().endswith(fingerprint)


async def test_remembered_labels_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.timeseries.read._CACHED_BYTES_MAX", 20_000)
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([series("up", (0, 1.0), n=f"{number:01000}") for number in range(60)])
    async with await opened(there.open()) as database:
        for number in range(60):
            assert len(await contents(database, f'up{{n="{number:01000}"}}')) == 1
            kept = [labels for known in database._cache.buckets.values() for labels in known.values()]
            assert sum(len(labels.value("n")) for labels in kept) <= 20_000
        assert len(await contents(database, "up")) == 60
