"""Retention: expired hours never return, whatever happens to the retention, the clock and the records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.timeseries.database_doubles import HOUR_MS, START_MS, config, contents, series

from penstock.coordinator import StorageRead
from penstock.errors import Corrupt
from penstock.metrics import Registry
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk
from penstock.timeseries import TimeSeries
from penstock.timeseries.keys import RecordType, bucket_prefix, record_prefix
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import load_bucket, merge_records
from penstock.timeseries.retention import RETENTION_KEY, Retention
from penstock.timeseries.series_index import BucketSeries

FIRST = Bucket.at(START_MS)
SECOND = Bucket.at(START_MS + HOUR_MS)


class Server:
    """A database that is opened with different retentions in succession."""

    def __init__(self) -> None:
        self.clock = ManualClock(START_MS)
        self.there = MemoryDisk(merge=merge_records, clock=self.clock)
        self.registry = Registry()

    async def open(self, retention: str | None, **settings: object) -> TimeSeries:
        return await TimeSeries.open(
            self.there.open(),
            config(retention=retention, **settings),
            clock=self.clock,
            registry=self.registry,
        )

    async def life(self, retention: str | None, *samples: tuple[int, float]) -> dict[int, float]:
        """Open, write, and close. Return the content found when opening."""
        database = await self.open(retention)
        found = (await contents(database)).get("up{}", {})
        if samples:
            await database.write([series("up", *samples)])
        await database.close()
        return found

    def never_expire(self) -> None:
        """Keep expired records readable, as SlateDB does until it compacts."""
        entries = self.there.persisted
        self.there.persisted = {key: entry._replace(expire_at_ms=None) for key, entry in entries.items()}

    def lose(self, prefix: bytes) -> None:
        self.there.persisted = {
            key: entry for key, entry in self.there.persisted.items() if not key.startswith(prefix)
        }


@pytest.mark.parametrize("later", [None, "30d", "2h"])
async def test_an_hour_that_expired_stays_gone_whatever_the_retention_becomes(later: str | None) -> None:
    server = Server()
    await server.life("2h", (0, 1.0), (2 * HOUR_MS, 2.0))
    server.never_expire()
    await server.clock.advance(2 * 3600)
    server.lose(record_prefix(FIRST, RecordType.FORWARD))
    database = await server.open(later, fold_blocks=1)
    assert await contents(database) == {"up{}": {2 * HOUR_MS: 2.0}}
    await database.write([series("up", (1, 9.0), (2 * HOUR_MS + 1, 3.0))])
    await database.write([series("other", (2 * HOUR_MS + 1, 3.0))])
    await database.sync()
    assert await contents(database, "up") == {"up{}": {2 * HOUR_MS: 2.0, 2 * HOUR_MS + 1: 3.0}}
    assert [bucket.start_ms for bucket in database.buckets] == [START_MS + 2 * HOUR_MS]
    await database.close()
    assert server.registry.value("timeseries.folds_given_up") == 0


async def test_hours_that_were_written_to_keep_their_shorter_retention_and_later_ones_get_the_longer() -> (
    None
):
    server = Server()
    await server.life("2h", (0, 1.0), (HOUR_MS, 2.0))
    await server.life("10h", (1, 1.5), (2 * HOUR_MS, 3.0))
    ends = {entry.expire_at_ms for key, entry in server.there.persisted.items() if is_of(key, FIRST)}
    assert ends == {START_MS + 2 * HOUR_MS}
    await server.clock.advance(2 * 3600)
    assert await server.life("10h") == {HOUR_MS: 2.0, 2 * HOUR_MS: 3.0}
    await server.clock.advance(5 * 3600)
    assert await server.life("10h") == {2 * HOUR_MS: 3.0}
    await server.clock.advance(5 * 3600)
    assert await server.life("10h") == {}


async def test_a_retention_that_was_lowered_and_raised_again_brings_nothing_back() -> None:
    server = Server()
    await server.life(None, *((hour * HOUR_MS, 1.0) for hour in range(6)))
    await server.clock.advance(6 * 3600)
    assert sorted(await server.life("3h")) == [4 * HOUR_MS, 5 * HOUR_MS]
    assert sorted(await server.life("30d")) == [4 * HOUR_MS, 5 * HOUR_MS]
    assert sorted(await server.life(None)) == [4 * HOUR_MS, 5 * HOUR_MS]
    await server.clock.advance(3600)
    assert sorted(await server.life(None)) == [5 * HOUR_MS]


async def test_an_hour_of_which_half_is_deleted_stays_gone() -> None:
    server = Server()
    database = await server.open(None)
    many = [series("up", (0, 1.0), n=str(number)) for number in range(50)]
    await database.write([*many, series("up", (9 * HOUR_MS, 1.0))])
    await database.close()
    await server.clock.advance(9 * 3600)
    database = await server.open("3h")
    await database.write([series("up", (9 * HOUR_MS + 1, 1.0))])
    await database.close()
    kept = {key for key in server.there.persisted if is_of(key, FIRST)}
    assert not kept
    database = await server.open(None)
    assert sorted(await contents(database)) == ["up{}"]
    await database.close()


async def test_a_clock_that_goes_back_brings_nothing_back() -> None:
    server = Server()
    await server.life(None, (0, 1.0), (9 * HOUR_MS, 2.0))
    await server.clock.advance(9 * 3600)
    await server.life("3h", (9 * HOUR_MS + 1, 2.5))
    server.clock = ManualClock(START_MS)
    assert await server.life("3h") == {9 * HOUR_MS: 2.0, 9 * HOUR_MS + 1: 2.5}


async def test_a_clock_that_was_ahead_takes_what_was_there_and_not_what_comes() -> None:
    server = Server()
    await server.life("3h", (0, 1.0))
    server.clock = ManualClock(START_MS + 10_000 * HOUR_MS)
    assert await server.life("3h") == {}
    server.never_expire()
    server.clock = ManualClock(START_MS + HOUR_MS)
    assert await server.life("3h", (1, 1.0), (2 * HOUR_MS, 2.0)) == {}
    assert await server.life("3h") == {2 * HOUR_MS: 2.0}


@pytest.mark.parametrize("folded", [False, True])
async def test_ids_are_never_given_twice_even_if_all_that_names_them_is_lost(folded: bool) -> None:
    server = Server()
    database = await server.open(None, fold_blocks=1 if folded else 1000)
    await database.write([series("old", (0, float(number)), n=str(number)) for number in range(3)])
    await database.sync()
    await database.write([series("old", (HOUR_MS, 0.0))])
    await database.close()
    assert folded == any(is_of(key, FIRST) and key[7] == RecordType.SAMPLES for key in server.there.persisted)
    for kind in (RecordType.FORWARD, RecordType.DICTIONARY, RecordType.INVERTED):
        server.lose(record_prefix(FIRST, kind))
    database = await server.open(None)
    await database.write([series("old", (5, 7.0), n="new")])
    await database.sync()
    assert (await contents(database))['old{n="new"}'] == {5: 7.0}
    await database.close()


async def test_an_hour_that_expires_while_it_is_loaded_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    await server.life("2h", (0, 1.0), (HOUR_MS, 1.0))
    await server.clock.advance(2 * 3600 - 0.001)
    server.lose(record_prefix(FIRST, RecordType.FORWARD))
    database = await server.open("2h")

    async def over_meanwhile(read: StorageRead, bucket: Bucket) -> BucketSeries:
        found = load_bucket(read, bucket)
        if bucket == FIRST:
            await server.clock.advance(0.001)
            server.never_expire()
        return await found

    monkeypatch.setattr("penstock.timeseries.read.load_bucket", over_meanwhile)
    assert (await load_bucket(database._storage, FIRST)).damaged
    await database.write([series("up", (1, 2.0), (2 * HOUR_MS, 3.0))])
    await database.sync()
    assert await contents(database) == {"up{}": {HOUR_MS: 1.0, 2 * HOUR_MS: 3.0}}
    await database.close()
    assert server.registry.value("timeseries.records_damaged") == 0


async def test_the_floor_is_stored_with_what_is_deleted() -> None:
    server = Server()
    await server.life(None, (0, 1.0), (HOUR_MS, 1.0), (5 * HOUR_MS, 1.0))
    database = await server.open("3h")
    storage = server.there
    await server.clock.advance(4 * 3600)
    await database.write([series("up", (5 * HOUR_MS + 1, 1.0))])
    await (await database.flush()).wait()
    batch = next(
        batch for batch in storage.unflushed if any(is_of(operation.key, FIRST) for operation in batch)
    )
    assert any(operation.key == RETENTION_KEY for operation in batch)
    await database.close()
    stored = Retention.decode(server.there.persisted[RETENTION_KEY].value)
    assert stored.is_expired(FIRST, START_MS)
    assert stored.is_expired(SECOND, START_MS)


async def test_a_database_without_a_retention_stores_nothing_of_it() -> None:
    server = Server()
    await server.life(None, (0, 1.0))
    assert RETENTION_KEY not in server.there.persisted


def test_a_record_of_another_length_is_damaged() -> None:
    for size in (0, 3, 5, 15):
        with pytest.raises(Corrupt):
            Retention.decode(bytes(size))


def test_spans_that_say_nothing_more_are_not_kept() -> None:
    retention = Retention()
    buckets = [FIRST]
    for hours in (9, 8, 7, 6):
        retention = retention.changed_to(hours * HOUR_MS, buckets, START_MS)
    assert len(retention.encode()) == 4 + 12
    for hours in (7, 8, 9):
        retention = retention.changed_to(hours * HOUR_MS, buckets, START_MS)
    assert len(retention.encode()) == 4 + 2 * 12
    retention = retention.changed_to(None, [], START_MS + 100 * HOUR_MS)
    assert len(retention.encode()) == 4
    assert Retention.decode(retention.encode()).is_expired(FIRST, 0)


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(1, 12)), st.integers(0, 5 * 60), st.lists(st.integers(-6, 6))
        ),
        max_size=8,
    )
)
def test_no_end_moves_later_and_no_hour_comes_back(
    lives: list[tuple[int | None, int, list[int]]],
) -> None:
    """Each round changes the retention, writes to hours around the current one, and lets minutes pass."""
    now_ms, retention = START_MS, Retention()
    ends: dict[Bucket, int | None] = {}
    gone: set[Bucket] = set()
    for hours, minutes, written in lives:
        retention = Retention.decode(retention.encode())
        retention = retention.changed_to(
            None if hours is None else hours * HOUR_MS, ends.keys() - gone, now_ms
        )
        for hour in written:
            bucket = Bucket.at(now_ms + hour * HOUR_MS)
            if not retention.is_expired(bucket, now_ms):
                ends.setdefault(bucket, retention.expiry_ms(bucket))
        now_ms += minutes * 60_000
        for bucket, before in ends.items():
            now = retention.expiry_ms(bucket)
            assert bucket in gone or before is None or (now is not None and now <= before)
            is_expired = now is not None and now <= now_ms
            assert retention.is_expired(bucket, now_ms) == (is_expired or bucket in gone)
            ends[bucket] = now
        gone |= {bucket for bucket in ends if retention.is_expired(bucket, now_ms)}


def is_of(key: bytes, bucket: Bucket) -> bool:
    return key.startswith(bucket_prefix(bucket))


@pytest.mark.parametrize("step_ms", [HOUR_MS, 24 * HOUR_MS])
async def test_a_clock_set_forward_ends_no_hour_before_its_time(step_ms: int) -> None:
    server = Server()
    database = await server.open("2h")
    await database.write([series("up", (0, 1.0))])
    await database.sync()
    server.clock.jump_wall(step_ms)
    await server.clock.advance(3600)
    await database.write([series("other", (HOUR_MS, 1.0))])
    await database.sync()
    assert [bucket.start_ms for bucket in database.buckets] == [START_MS, START_MS + HOUR_MS]
    await server.clock.advance(3600)
    assert [bucket.start_ms for bucket in database.buckets] == [START_MS + HOUR_MS]
    await database.close()


async def test_a_clock_set_back_keeps_an_hour_longer_by_at_most_the_step() -> None:
    server = Server()
    database = await server.open("2h")
    await database.write([series("up", (0, 1.0))])
    await database.sync()
    server.clock.jump_wall(-HOUR_MS)
    await server.clock.advance(3 * 3600)
    assert [bucket.start_ms for bucket in database.buckets] == []
    await database.close()
