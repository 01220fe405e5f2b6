"""A database fed from a queue: every batch once, and acknowledged when it is durable, despite failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.unit.timeseries.database_doubles import START_MS, contents, disk, opened

from penstock.buffer import Consumer, ConsumerConfig, FencedError, Metadata, Producer, ProducerConfig
from penstock.coordinator import ApplyError, FlushFenced, Position, WriteHandle
from penstock.errors import ConfigError, Corrupt, OutcomeUnknown, PenstockError, Unavailable
from penstock.metrics import Registry
from penstock.objects import MemoryStore
from penstock.services import Feed, FeedConfig, RefusedRecord, SetAside
from penstock.services.feed import DeadLetterFile, dead_letters_key, payload_per_record, read_dead_letters
from penstock.services.timeseries_feed import METRICS_PAYLOAD, FedTimeSeries
from penstock.testing.memory_storage import MemoryDisk, StorageFault
from penstock.timeseries import Labels, TimeSeries


def gauge(name: str, at: int, value: float) -> bytes:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name=name)
    metric.gauge.data_points.add(time_unix_nano=(START_MS + at) * 1_000_000, as_double=value)
    return request.SerializeToString()


async def produce(store: MemoryStore, batches: Sequence[tuple[list[bytes], bytes]]) -> None:
    """Append each batch to the queue."""
    async with Producer(ProducerConfig(store=store, flush_interval="1ms")) as producer:
        for records, payload in batches:
            handle = await producer.produce(records, payload)
            await handle.watcher.await_durable()


def feed(store: MemoryStore, database: TimeSeries, **settings: object) -> Feed:
    config = FeedConfig(queue=ConsumerConfig(store=store, gc_enabled=False), poll_interval="1ms")
    return Feed(config, FedTimeSeries(database), **settings)  # type: ignore[arg-type]


async def letters(store: MemoryStore, sequence: int) -> DeadLetterFile:
    return read_dead_letters(bytes((await store.get(dead_letters_key("ingest/manifest", sequence))).data))


async def copied(store: MemoryStore, target: MemoryStore) -> None:
    for info in await store.list(""):
        await target.put(info.key, (await store.get(info.key)).data)


async def queue_length(store: MemoryStore) -> int:
    consumer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False))
    try:
        return len(consumer)
    finally:
        await consumer.release()


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore("queue")
    yield store
    await store.close()


async def test_batches_become_series_and_leave_the_queue(store: MemoryStore) -> None:
    await produce(
        store,
        [
            ([gauge("a", 0, 1.0), gauge("b", 0, 2.0)], METRICS_PAYLOAD),
            ([gauge("a", 1, 3.0)], METRICS_PAYLOAD),
        ],
    )
    async with await opened(disk().open()) as database:
        report = await feed(store, database).run(once=True)
        assert (report.batches, report.records, report.refused, report.through) == (2, 3, 0, 1)
        assert await contents(database) == {"a{}": {0: 1.0, 1: 3.0}, "b{}": {0: 2.0}}
        assert await database.stored_sequence() == 1
    assert await queue_length(store) == 0


async def test_nothing_is_acknowledged_before_it_is_durable(store: MemoryStore) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    storage = disk().open()
    async with await opened(storage) as database:
        work = feed(store, database)
        storage.gate("flush").set()
        running = asyncio.create_task(work.run(once=True))
        while not storage.calls.count("flush"):  # noqa: ASYNC110 - the storage does not tell
            await asyncio.sleep(0.001)
        gate = storage.gate("flush")
        gate.clear()
        done, _ = await asyncio.wait({running}, timeout=0.3)
        assert not done
        assert "apply" in storage.calls
        assert work.report.batches == 0
        gate.set()
        assert (await running).batches == 1


async def test_a_feed_continues_after_the_stored_position(store: MemoryStore) -> None:
    await produce(store, [([gauge("a", at, float(at))], METRICS_PAYLOAD) for at in range(4)])
    there = disk()
    async with await opened(there.open()) as database:
        await database.write([], sequence=2)
        report = await feed(store, database).run(once=True)
        assert (report.batches, report.through) == (1, 3)
        assert await contents(database) == {"a{}": {3: 3.0}}


async def test_unreadable_records_become_dead_letters_before_their_batch_is_stored(
    store: MemoryStore,
) -> None:
    long = gauge("x" * 20_000, 0, 1.0)
    await produce(
        store,
        [
            ([b"\xff\xff", gauge("a", 0, 1.0), long], METRICS_PAYLOAD),
            ([gauge("b", 0, 1.0)], b"\x01\x02\x01\x00"),
        ],
    )
    registry = Registry()
    async with await opened(disk().open()) as database:
        report = await feed(store, database, registry=registry).run(once=True)
        assert await contents(database) == {"a{}": {0: 1.0}}
        assert await database.stored_sequence() == 1
    assert (report.records, report.refused) == (1, 3)
    assert registry.value("feed.records_refused") == 3
    assert [letter.index for letter in report.letters] == [0, 2, 0]
    assert "logs, not metrics" in report.letters[2].reason
    first = await letters(store, 0)
    assert [(one.index, one.data, one.stored_in_part) for one in first.records] == [
        (0, b"\xff\xff", False),
        (2, long, False),
    ]
    assert len(await store.list("ingest/manifest.dead/")) == 2


async def test_a_crash_after_the_letter_and_before_the_write_repeats_the_letter(store: MemoryStore) -> None:
    await produce(store, [([b"\xff", gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    there = disk()
    storage = there.open()
    database = await opened(storage)
    storage.fail_at(len(storage.calls) + 2, StorageFault.FAILED)
    with pytest.raises(Exception, match="failed"):
        await feed(store, database).run(once=True)
    async with await opened(there.open()) as again:
        report = await feed(store, again).run(once=True)
        assert (report.records, report.refused) == (1, 1)


async def test_no_batch_is_stored_after_one_that_the_database_refuses(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Labels, "fingerprint", lambda self: b"0123456789abcdef")
    names = ("up", "other", "up")  # the second has the fingerprint of the first
    await produce(store, [([gauge(name, at, 1.0)], METRICS_PAYLOAD) for at, name in enumerate(names)])
    there = disk()
    async with await opened(there.open()) as database:
        with pytest.raises(ApplyError, match="fingerprint"):
            await feed(store, database).run(once=True)
    async with await opened(there.open()) as again:
        assert await again.stored_sequence() == 0


async def test_a_letter_that_cannot_be_stored_delays_its_batch(store: MemoryStore) -> None:
    async with await opened(disk().open()) as database:

        async def no_store(refused: Sequence[RefusedRecord]) -> None:
            raise Unavailable("the store is away")

        with pytest.raises(Unavailable):
            await FedTimeSeries(database).write_batch([b"\xff"], [METRICS_PAYLOAD], Position(0), no_store)
        assert await database.stored_sequence() is None


@pytest.mark.parametrize(
    "payload", [b"", b"\x01\x01\x01", b"\x02\x01\x01\x00", b"\x01\x03\x01\x00", b"\x01\x01\x02\x00"]
)
async def test_a_record_with_a_wrong_payload_becomes_a_dead_letter(
    store: MemoryStore, payload: bytes
) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], payload)])
    async with await opened(disk().open()) as database:
        report = await feed(store, database).run(once=True)
        assert (report.records, report.refused) == (0, 1)
        assert await database.stored_sequence() == 0


async def test_requests_stored_by_the_collector_are_accepted(store: MemoryStore) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], b"metrics")])
    async with await opened(disk().open()) as database:
        report = await feed(store, database).run(once=True)
        assert (report.records, report.refused) == (1, 0)


def test_a_record_has_the_payload_of_the_last_item_at_or_before_it() -> None:
    items = [
        Metadata(start_index=at, ingestion_time_ms=0, payload=text)
        for at, text in ((2, b"two"), (4, b"four"))
    ]
    assert payload_per_record(items, 6) == [b"", b"", b"two", b"two", b"four", b"four"]
    assert payload_per_record([], 2) == [b"", b""]


async def test_a_partly_stored_record_is_also_a_dead_letter(store: MemoryStore) -> None:
    request = ExportMetricsServiceRequest.FromString(gauge("a", 0, 1.0))
    metric = request.resource_metrics[0].scope_metrics[0].metrics.add(name="latency")
    metric.exponential_histogram.data_points.add(time_unix_nano=START_MS * 1_000_000, count=3)
    record = request.SerializeToString()
    await produce(store, [([record], METRICS_PAYLOAD)])
    registry = Registry()
    async with await opened(disk().open()) as database:
        report = await feed(store, database, registry=registry).run(once=True)
        assert await contents(database) == {"a{}": {0: 1.0}}
    assert (report.records, report.refused, report.stored_in_part) == (1, 0, 1)
    assert registry.value("feed.records_stored_in_part") == 1
    (letter,) = (await letters(store, 0)).records
    assert letter.stored_in_part
    assert letter.data == record
    assert letter.reason.startswith("1 point has no series: ")


async def test_a_letter_whose_outcome_is_unknown_is_written_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await produce(store, [([b"\xff"], METRICS_PAYLOAD)])
    put, tries = store.put, 0

    async def uncertain(key: str, data: bytes) -> object:
        nonlocal tries
        stored = await put(key, data)
        if ".dead/" in key and (tries := tries + 1) < 3:
            raise OutcomeUnknown("the answer was lost")
        return stored

    monkeypatch.setattr(store, "put", uncertain)
    async with await opened(disk().open()) as database:
        report = await feed(store, database).run(once=True)
    assert (report.refused, tries) == (1, 3)


# Which queue


async def fed_from(there: MemoryDisk, queue: MemoryStore, adopt: str | None = None) -> list[int]:
    """Run one database that is fed from `queue`. Return the values of its series afterwards."""
    config = FeedConfig(queue=ConsumerConfig(store=queue, gc_enabled=False), adopt_queue=adopt)
    async with await opened(there.open()) as database:
        await Feed(config, FedTimeSeries(database)).run(once=True)
        return sorted(
            int(value) for samples in (await contents(database)).values() for value in samples.values()
        )


async def numbers(store: MemoryStore, first: int, count: int) -> None:
    await produce(
        store, [([gauge("n", at, float(at))], METRICS_PAYLOAD) for at in range(first, first + count)]
    )


async def test_another_queue_is_refused_before_any_batch_is_dequeued(store: MemoryStore) -> None:
    there, other = disk(), MemoryStore("other")
    await numbers(store, 0, 2)
    await numbers(other, 10, 5)
    assert await fed_from(there, store) == [0, 1]
    with pytest.raises(ConfigError, match=r"was fed from memory://queue/ingest/manifest, up to batch 1, not"):
        await fed_from(there, other)
    assert await queue_length(other) == 5


async def test_a_queue_adopted_as_new_is_read_from_its_beginning(store: MemoryStore) -> None:
    there, other = disk(), MemoryStore("other")
    await numbers(store, 0, 3)
    await numbers(other, 10, 2)
    assert await fed_from(there, store) == [0, 1, 2]
    assert await fed_from(there, other, "new") == [0, 1, 2, 10, 11]
    assert await fed_from(there, other, "new") == [0, 1, 2, 10, 11]
    await numbers(other, 12, 1)
    assert await fed_from(there, other) == [0, 1, 2, 10, 11, 12]
    with pytest.raises(ConfigError, match="was fed from memory://other/"):
        await fed_from(there, store)


async def test_a_queue_that_has_moved_continues_after_the_stored_position(store: MemoryStore) -> None:
    there, moved = disk(), MemoryStore("moved")
    await numbers(store, 0, 2)
    assert await fed_from(there, store) == [0, 1]
    await copied(store, moved)
    await numbers(moved, 2, 1)
    assert await fed_from(there, moved, "moved") == [0, 1, 2]


async def test_a_queue_with_other_batches_is_not_accepted_as_moved(store: MemoryStore) -> None:
    there, other = disk(), MemoryStore("other")
    await numbers(store, 0, 2)
    assert await fed_from(there, store) == [0, 1]
    await numbers(other, 100, 3)
    with pytest.raises(Corrupt, match=r"batch 1 of .* was ingest/.* and now ingest/"):
        await fed_from(there, other, "moved")


async def test_a_queue_older_than_the_database_is_refused_before_it_is_changed(
    store: MemoryStore,
) -> None:
    there, older = disk(), MemoryStore("queue")
    await numbers(store, 0, 2)
    await copied(store, older)
    await numbers(store, 2, 3)
    assert await fed_from(there, store) == [0, 1, 2, 3, 4]
    before = (await older.get("ingest/manifest")).version
    with pytest.raises(Corrupt, match="up to 4, but the queue has assigned numbers only up to 1"):
        await fed_from(there, older)
    assert (await older.get("ingest/manifest")).version == before
    await numbers(older, 100, 9)  # past the position: numbers no longer show the difference, but names do
    with pytest.raises(Corrupt, match="has this number: the queue was replaced by an older copy"):
        await fed_from(there, older)


async def test_a_database_that_is_older_than_the_queue_is_refused_until_the_gap_is_accepted(
    store: MemoryStore,
) -> None:
    older, newer = disk(), disk()
    await numbers(store, 0, 2)
    assert await fed_from(older, store) == [0, 1]
    await numbers(store, 2, 2)
    async with await opened(newer.open()) as database:
        await database.write([], sequence=1)
    await fed_from(newer, store)
    await numbers(store, 4, 1)
    with pytest.raises(Corrupt, match="up to 1, but the queue begins at 4: 2 batches after 1"):
        await fed_from(older, store)
    assert await fed_from(older, store, "new") == [0, 1, 4]


async def test_letters_of_records_do_not_hide_that_a_database_is_older_than_the_queue(
    store: MemoryStore,
) -> None:
    older, newer = disk(), disk()
    await numbers(store, 0, 2)
    assert await fed_from(older, store) == [0, 1]
    await numbers(store, 2, 2)
    async with await opened(newer.open()) as database:
        await database.write([], sequence=1)
    await fed_from(newer, store)
    for number in (2, 3):
        # Their numbers are those of batches whose other records are stored, or of records of a topic.
        for folder in ("records", "relay/t"):
            await store.put(f"ingest/manifest.dead/{folder}/{number:020d}.json", b"{}")
    with pytest.raises(Corrupt, match="2 batches after 1"):
        await fed_from(older, store)


async def test_a_position_without_a_name_is_adopted_at_the_first_start(store: MemoryStore) -> None:
    there = disk()
    await numbers(store, 0, 3)
    async with await opened(there.open()) as database:
        await database.write([], sequence=1)
    assert await fed_from(there, store) == [2]
    async with await opened(there.open()) as database:
        assert await database.stored_position() == Position(2, "memory://queue/ingest/manifest")


def test_an_unknown_adoption_is_refused(store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="'moved' or 'new'"):
        FeedConfig(queue=ConsumerConfig(store="memory://q"), adopt_queue="yes")


class Crowded:
    """A database that has no room for the first attempts of each batch."""

    def __init__(self, database: TimeSeries) -> None:
        self._fed = FedTimeSeries(database)
        self.offers: list[int] = []

    async def write_batch(
        self, records: Sequence[bytes], metadata: Sequence[bytes], position: Position, set_aside: SetAside
    ) -> WriteHandle:
        self.offers.append(position.sequence)
        await set_aside([RefusedRecord(0, "no good")])
        if self.offers.count(position.sequence) < 3:
            raise Unavailable("no room")
        return await self._fed.write_batch(records[1:], metadata[1:], position, set_aside)

    async def stored_position(self) -> Position | None:
        return await self._fed.stored_position()

    async def sync(self) -> None:
        await self._fed.sync()


async def test_a_batch_without_room_is_written_again_and_its_letters_count_once(
    store: MemoryStore,
) -> None:
    await produce(store, [([b"x", gauge("a", at, 1.0)], METRICS_PAYLOAD) for at in range(2)])
    async with await opened(disk().open()) as database:
        crowded = Crowded(database)
        config = FeedConfig(queue=ConsumerConfig(store=store, gc_enabled=False))
        report = await Feed(config, crowded).run(once=True)
        assert crowded.offers == [0, 0, 0, 1, 1, 1]
        assert (report.records, report.refused) == (2, 2)
        assert await contents(database) == {"a{}": {0: 1.0, 1: 1.0}}


async def test_a_stop_ends_the_feed_with_everything_acknowledged(store: MemoryStore) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    async with await opened(disk().open()) as database:
        caught_up = asyncio.Event()
        work = feed(store, database, on_progress=lambda report: report.caught_up and caught_up.set())
        running = asyncio.create_task(work.run())
        await caught_up.wait()
        work.stop()
        report = await running
        assert (report.batches, report.through) == (1, 0)
    assert await queue_length(store) == 0


async def test_a_stop_while_waiting_for_a_batch_does_not_report_an_empty_queue(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    polled = asyncio.Event()

    async def next_batch(self: Consumer) -> None:
        polled.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Consumer, "next_batch", next_batch)
    async with await opened(disk().open()) as database:
        work = feed(store, database)
        running = asyncio.create_task(work.run(once=True))
        await polled.wait()
        work.stop()
        assert not (await running).caught_up


@pytest.mark.parametrize("damage", ["damaged", "missing"])
async def test_a_bad_batch_ends_the_feed_or_becomes_a_dead_letter(store: MemoryStore, damage: str) -> None:
    await produce(store, [([gauge("a", at, float(at))], METRICS_PAYLOAD) for at in range(3)])
    second = sorted(one.key for one in await store.list("ingest/") if one.key.endswith(".batch"))[1]
    if damage == "damaged":
        await store.put(second, b"not a batch, and longer than a footer")
    else:
        await store.delete_many([second])
    async with await opened(disk().open()) as database:
        with pytest.raises(PenstockError):
            await feed(store, database).run(once=True)
        assert await database.stored_sequence() in (None, 0)
        queue = ConsumerConfig(store=store, gc_enabled=False, on_bad_batch="skip")
        skipping = Feed(FeedConfig(queue=queue, poll_interval="1ms"), FedTimeSeries(database))
        report = await skipping.run(once=True)
        assert (report.through, report.caught_up) == (2, True)
        assert await contents(database) == {"a{}": {0: 0.0, 2: 2.0}}
    assert await store.list("ingest/manifest.dead/")
    assert await queue_length(store) == 0


async def test_a_stop_ends_the_feed_while_the_queue_is_unavailable(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def away(*arguments: object, **settings: object) -> Consumer:
        tried.set()
        raise Unavailable("the queue is away")

    monkeypatch.setattr(Consumer, "open", away)
    async with await opened(disk().open()) as database:
        work = feed(store, database)
        running = asyncio.create_task(work.run())
        await tried.wait()
        work.stop()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(5):
                await running


async def test_a_newer_owner_of_the_queue_stops_the_feed(store: MemoryStore) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    async with await opened(disk().open()) as database:
        caught_up = asyncio.Event()
        work = feed(store, database, on_progress=lambda report: report.caught_up and caught_up.set())
        running = asyncio.create_task(work.run())
        await caught_up.wait()
        newer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False), 0)
        with pytest.raises(FencedError):
            async with asyncio.timeout(10):
                await running
        await newer.release()


async def test_a_newer_writer_of_the_database_stops_the_feed_and_the_batch_stays_in_the_queue(
    store: MemoryStore,
) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    there = disk()
    older = await opened(there.open())
    assert await older.stored_sequence() is None
    newer = await opened(there.open())
    with pytest.raises(FlushFenced):
        await feed(store, older).run(once=True)
    with pytest.raises(FlushFenced):
        await older.close()
    report = await feed(store, newer).run(once=True)
    assert report.records == 1
    await newer.close()


@pytest.mark.parametrize("seed", range(8))
async def test_every_batch_counts_once_after_any_crash(seed: int) -> None:
    """Run feeds that end at any storage call of the database."""
    rng = random.Random(seed)
    store = MemoryStore(f"queue-{seed}")
    batches = [
        ([gauge("n", 10 * at + place, 1.0) for place in range(1 + at % 3)], METRICS_PAYLOAD)
        for at in range(12)
    ]
    await produce(store, batches)
    there = disk()
    for life in range(40):
        if await life_of(there, store, rng, last=life == 39):
            break
    async with await opened(there.open()) as database:
        found = await contents(database)
        assert sum(found["n{}"].values()) == sum(len(records) for records, _ in batches)
        assert await database.stored_sequence() == 11


async def life_of(there: MemoryDisk, store: MemoryStore, rng: random.Random, *, last: bool) -> bool:
    """Return whether the queue was emptied."""
    storage = there.open(kept=rng.randrange(3))
    database = await opened(storage, fold_blocks=2)
    if not last:
        storage.fail_at(rng.randrange(2, 12), rng.choice(list(StorageFault)))
    try:
        async with asyncio.timeout(20):
            await feed(store, database).run(once=True)
        await database.close()
    except Exception:
        await database._coordinator.abort()
        return False
    return True


class Stopped(Crowded):
    """A database whose storage has stopped permanently."""

    async def write_batch(
        self, records: Sequence[bytes], metadata: Sequence[bytes], position: Position, set_aside: SetAside
    ) -> WriteHandle:
        self.offers.append(position.sequence)
        raise OutcomeUnknown("the database has stopped permanently: open it again")


async def test_a_permanently_stopped_database_is_not_offered_the_batch_again(
    store: MemoryStore,
) -> None:
    await produce(store, [([gauge("a", 0, 1.0)], METRICS_PAYLOAD)])
    async with await opened(disk().open()) as database:
        stopped = Stopped(database)
        config = FeedConfig(queue=ConsumerConfig(store=store, gc_enabled=False))
        with pytest.raises(OutcomeUnknown, match="permanently"):
            await Feed(config, stopped).run()
        assert stopped.offers == [0]
    assert await queue_length(store) == 1
