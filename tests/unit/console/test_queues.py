"""Reading a real queue in a folder: its entries, its input and its producers, without a change."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    Metadata,
    Producer,
    ProducerConfig,
    Transaction,
    append_batches,
    store_batch,
)
from penstock.buffer.batch import CompressionType
from penstock.buffer.sharded import ShardedProducer
from penstock.codec import RecordChunk
from penstock.console import queues
from penstock.console.queues import QueueSource
from penstock.ids import SYSTEM_RNG
from penstock.objects import ObjectStore, open_store
from penstock.testing import ManualClock
from penstock.up import QueuePlace


def place(folder: Path) -> QueuePlace:
    return QueuePlace(
        name="q",
        store=str(folder),
        manifest_path="ingest/manifest",
        data_path_prefix="ingest",
    )


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[QueueSource]:
    made = QueueSource(place(tmp_path), ManualClock())
    yield made
    await made.close()


async def produce(folder: Path, *batches: list[bytes]) -> None:
    async with Producer(ProducerConfig(store=str(folder))) as producer:
        for records in batches:
            await producer.produce(records, b"")
            await producer.flush()


async def relay(folder: Path, first: int, last: int, records: int, *, whole: bool = False) -> None:
    """Append a batch like a relay: with the data of records, or with whole records."""
    store = open_store(str(folder))
    config = ProducerConfig(store=store)
    numbers = range(first, first + records)
    told = msgspec.json.encode({"topic": "t", "first": first, "last": last, "ts": 1})
    batch = await store_batch(
        store,
        config.prefix,
        [RecordChunk.of_list([b'{"$seq":%d}' % number if whole else b"%d" % number for number in numbers])],
        compression=CompressionType.NONE,
        metadata=[Metadata(start_index=0, ingestion_time_ms=1, payload=told)],
        clock=ManualClock(),
        rng=SYSTEM_RNG,
    )
    await append_batches(config, [batch], Transaction(app="relay:t", version=last))
    await store.close()


class Counted:
    """A store that records its requests."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._store, name)
        if name not in ("get", "get_if_changed", "head", "list"):
            return found

        async def ask(key: str, *more: object) -> object:
            self.asked.append(f"{name} {key}")
            return await found(key, *more)

        return ask

    def take(self) -> list[str]:
        """Return the requests since the last call."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    store = Counted(open_store(str(tmp_path)))
    monkeypatch.setattr(queues, "open_store", lambda config: store)
    return store


async def test_a_poll_of_an_unchanged_queue_is_one_conditional_request(
    counted: Counted, tmp_path: Path
) -> None:
    source = QueueSource(place(tmp_path), ManualClock())
    source.apps = frozenset({"relay:t", "relay:other"})
    await relay(tmp_path, 1, 5, records=5)
    assert (await source.look()).positions == {"relay:t": 5, "relay:other": None}
    for _ in range(3):
        counted.take()
        assert (await source.look()).positions == {"relay:t": 5, "relay:other": None}
        assert counted.take() == ["get_if_changed ingest/manifest"]
    async with await Consumer.open(ConsumerConfig(store=str(tmp_path), prefetch=0), None) as consumer:
        await consumer.next_batch()
        await consumer.ack(0)
        await consumer.flush()
    assert (await source.look()).positions["relay:t"] == 5
    assert [asked for asked in counted.take() if "layout" in asked] == []
    await source.look()
    assert counted.take() == ["get_if_changed ingest/manifest"], "the position is in the book now"
    await source.close()


async def test_a_poll_of_shards_is_one_conditional_request_each(counted: Counted, tmp_path: Path) -> None:
    source = QueueSource(place(tmp_path), ManualClock())
    source.apps = frozenset({"relay:t"})
    async with await ShardedProducer.open(ProducerConfig(store=str(tmp_path)), shards=2) as producer:
        for number in range(6):
            await producer.produce([b"%d" % number], b"", key=b"%d" % number)
        await producer.flush()
    await source.look()
    counted.take()
    await source.look()
    asked = counted.take()
    assert sorted(asked) == [f"get_if_changed ingest/manifest.shards/{shard:04d}" for shard in range(2)]
    await source.close()


@pytest.mark.parametrize("was_plain", [False, True])
async def test_a_queue_that_becomes_sharded_is_noticed(was_plain: bool, tmp_path: Path) -> None:
    clock = ManualClock()
    source = QueueSource(place(tmp_path), clock)
    if was_plain:
        await produce(tmp_path, [b"before"])
    assert not (await source.look()).is_sharded
    async with await ShardedProducer.open(ProducerConfig(store=str(tmp_path)), shards=2) as producer:
        await producer.produce([b"a"], b"", key=b"a")
        await producer.flush()
    if was_plain:
        await clock.advance(queues.LAYOUT_AGAIN_S)
    assert (await source.look()).is_sharded
    await source.close()


async def test_a_queue_that_does_not_exist_yet_is_empty(source: QueueSource, tmp_path: Path) -> None:
    reading = await source.look()
    assert (reading.exists, reading.depth, reading.following) == (False, 0, 0)
    assert os.listdir(tmp_path) == []


async def test_input_between_two_polls_is_counted(source: QueueSource, tmp_path: Path) -> None:
    await produce(tmp_path, [b"before"])
    assert (await source.look()).seen_records == 0
    await produce(tmp_path, [b"a", b"b"], [b"c"])
    reading = await source.look()
    assert (reading.seen_records, reading.depth) == (3, 3)
    assert reading.seen_bytes is not None
    assert reading.seen_bytes > 3


async def test_input_that_was_dequeued_between_two_polls_is_unknown(
    source: QueueSource, tmp_path: Path
) -> None:
    await source.look()
    await produce(tmp_path, [b"a"])
    async with await Consumer.open(ConsumerConfig(store=str(tmp_path), prefetch=0), None) as consumer:
        assert await consumer.next_batch() is not None
        await consumer.ack(0)
        await consumer.flush()
    reading = await source.look()
    assert (reading.seen_records, reading.depth, reading.first) == (None, 0, 1)
    await produce(tmp_path, [b"b"])
    assert (await source.look()).seen_records == 1


async def test_a_relayed_record_is_found_even_after_its_batch_left_the_queue(
    source: QueueSource, tmp_path: Path
) -> None:
    source.apps = frozenset({"relay:t"})
    await relay(tmp_path, 1, 5, records=5)
    await relay(tmp_path, 6, 10, records=3)
    reading = await source.look()
    assert reading.positions == {"relay:t": 10}
    async with await Consumer.open(ConsumerConfig(store=str(tmp_path), prefetch=0), None) as consumer:
        for sequence in (0, 1):
            await consumer.next_batch()
            await consumer.ack(sequence)
        await consumer.flush()
    assert (await source.look()).positions == {"relay:t": 10}
    found = await source.relayed("relay:t", "t", 4)
    assert found is not None
    assert (found.sequence, found.index) == (0, 3)
    with_holes = await source.relayed("relay:t", "t", 8)
    assert with_holes is not None
    assert (with_holes.sequence, with_holes.index) == (1, None)
    assert await source.relayed("relay:t", "t", 11) is None


async def test_a_record_that_carries_its_sequence_is_found_in_stored_batches(
    source: QueueSource, tmp_path: Path
) -> None:
    """The console did not run when they were relayed and consumed."""
    for number in range(9):
        await relay(tmp_path, 10 * number + 1, 10 * number + 10, records=9, whole=True)
    async with await Consumer.open(ConsumerConfig(store=str(tmp_path), prefetch=0), None) as consumer:
        for sequence in range(6):
            await consumer.next_batch()
            await consumer.ack(sequence)
        await consumer.flush()
    entries, _ = await source.find(0, 6)
    assert entries is not None
    for seq in (1, 9, 35, 57, 89):
        found = await source.search(seq)
        assert found is not None
        assert (found.sequence, found.index) == ((seq - 1) // 10, (seq - 1) % 10)
    assert await source.search(10) is None
    assert await source.search(500) is None
    location = (await source.find(0, 0))[1]
    (tmp_path / str(location)).unlink()
    source = QueueSource(place(tmp_path), ManualClock())
    assert await source.search(1) is None
    assert await source.search(11) is not None
    await source.close()


async def test_the_place_of_records_without_a_sequence_is_not_guessed(
    source: QueueSource, tmp_path: Path
) -> None:
    await relay(tmp_path, 1, 5, records=5)
    assert await source.search(3) is None


async def test_a_batch_is_found_by_its_name_in_the_queue_and_after_its_dequeue(
    source: QueueSource, tmp_path: Path
) -> None:
    await produce(tmp_path, [b"a"], [b"b"])
    newest = (await source.newest(10))[0]
    assert await source.locate(newest.location) == (0, 1, newest.location)
    name = newest.location.removeprefix("ingest/").removesuffix(".batch")
    assert await source.locate(name) == (0, 1, newest.location)
    assert await source.locate("nowhere") is None
    assert newest.size.records == 1


async def test_all_shards_are_one_queue(source: QueueSource, tmp_path: Path) -> None:
    async with await ShardedProducer.open(ProducerConfig(store=str(tmp_path)), shards=3) as producer:
        for number in range(6):
            await producer.produce([b"%d" % number], b"", key=b"%d" % number)
        await producer.flush()
    reading = await source.look()
    assert (reading.is_sharded, len(reading.shards)) == (True, 3)
    assert reading.depth == sum(shard.depth for shard in reading.shards) >= 1
    assert len(await source.newest(100)) == reading.depth
