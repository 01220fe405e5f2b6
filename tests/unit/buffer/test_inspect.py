from __future__ import annotations

import random

import pytest

from penstock.buffer import (
    BatchMissing,
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    SerializationError,
    StorageRejected,
)
from penstock.buffer.inspect import QueueReader, summarise, survey
from penstock.buffer.manifest import EMPTY_MANIFEST
from penstock.buffer.manifest_file import Snapshot
from penstock.buffer.side_objects import NO_FLOOR
from penstock.ids import mint_ulid
from penstock.objects import MemoryStore, ObjectInfo

MANIFEST = "ingest/manifest"


async def fill(store: MemoryStore, batches: int, *, per_batch: int = 2) -> None:
    async with Producer(ProducerConfig(store=store)) as producer:
        for number in range(batches):
            await producer.produce([b"%d/%d" % (number, place) for place in range(per_batch)], b"meta")
            await producer.flush()


async def test_a_reader_sees_every_record_and_leaves_no_trace() -> None:
    store = MemoryStore()
    await fill(store, 3)
    before = {info.key: info.version for info in await store.list("")}
    reader = QueueReader(store, MANIFEST)
    batches = [await reader.fetch(descriptor) for descriptor in await reader.entries()]
    assert [batch.entries for batch in batches] == [[b"%d/0" % n, b"%d/1" % n] for n in range(3)]
    assert {info.key: info.version for info in await store.list("")} == before


async def test_a_reader_does_not_fence_the_consumer() -> None:
    store = MemoryStore()
    await fill(store, 2)
    async with await Consumer.open(ConsumerConfig(store=store, gc_enabled=False)) as consumer:
        reader = QueueReader(store, MANIFEST)
        assert len(await reader.entries()) == 2
        batch = await consumer.next_batch()
        assert batch is not None
        await consumer.ack_through(batch.sequence)
        assert [descriptor.sequence for descriptor in await reader.entries()] == [1]


async def test_a_reader_follows_appends_from_where_it_is() -> None:
    store = MemoryStore()
    reader = QueueReader(store, MANIFEST)
    assert await reader.entries() == []
    await fill(store, 2)
    assert [descriptor.sequence for descriptor in await reader.entries(after=0)] == [1]
    await fill(store, 1)
    assert [descriptor.sequence for descriptor in await reader.entries(after=1)] == [2]
    assert [descriptor.sequence for descriptor in await reader.entries(limit=1)] == [0]


async def test_a_missing_manifest_is_an_empty_queue_unless_it_is_required() -> None:
    reader = QueueReader(MemoryStore(), MANIFEST)
    assert len(await reader.index()) == 0
    with pytest.raises(StorageRejected, match="there is no manifest ingest/manifest"):
        await reader.require()


async def test_a_damaged_manifest_is_distinguished_from_a_missing_batch() -> None:
    store = MemoryStore()
    await fill(store, 1)
    reader = QueueReader(store, MANIFEST)
    (descriptor,) = await reader.entries()
    await store.delete_many([descriptor.location])
    with pytest.raises(BatchMissing):
        await reader.fetch(descriptor)
    await store.put(MANIFEST, b"not a manifest, but long enough")
    with pytest.raises(SerializationError):
        await reader.entries()


async def test_a_survey_counts_queued_batches_and_other_objects() -> None:
    store = MemoryStore()
    await fill(store, 3)
    await store.put("ingest/readme.txt", b"foreign")
    await store.put("ingest/manifest.dead/00000000000000000007.json", b"{}")
    consumer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False))
    await consumer.next_batch()
    await consumer.ack_through(0)
    await consumer.close()
    snapshot = await QueueReader(store, MANIFEST).snapshot()
    time_ms = (await QueueReader(store, MANIFEST).entries())[0].metadata[0].ingestion_time_ms
    found = await survey(QueueReader(store, MANIFEST), "ingest", now_ms=time_ms + 5000, grace_ms=0)
    assert (found.queue_length, found.first_sequence, found.next_sequence, found.epoch) == (2, 1, 3, 1)
    assert found.manifest_bytes == len(snapshot.raw)
    assert found.oldest_entry_age_ms == found.ingestion_lag_ms == 5000
    assert (found.data_objects, found.unreferenced_objects) == (3, 1)
    assert (found.foreign_objects, found.dead_letters) == (1, 1)
    assert found.floor_ms is None


def test_only_batches_past_the_grace_period_are_collectable() -> None:
    minted = [mint_ulid(ms, random.Random(ms)) for ms in (1000, 9000)]
    listed = [
        ObjectInfo(key=f"ingest/{ulid}.batch", size=10, modified_ms=ms)
        for ulid, ms in zip(minted, (1000, 9000), strict=True)
    ]
    found = summarise(
        Snapshot(raw=EMPTY_MANIFEST, version=None),
        listed,
        manifest_path=MANIFEST,
        prefix="ingest",
        floor=NO_FLOOR,
        dead_letters=0,
        now_ms=10_000,
        grace_ms=5000,
    )
    assert (found.unreferenced_objects, found.unreferenced_bytes, found.collectable_objects) == (2, 20, 1)


async def test_a_survey_excludes_a_queue_below_its_prefix() -> None:
    store = MemoryStore()
    await fill(store, 2)
    alone = await survey(QueueReader(store, MANIFEST), "ingest", now_ms=2**47, grace_ms=0)
    async with Producer(
        ProducerConfig(store=store, data_path_prefix="ingest/eu", manifest_path="ingest/eu/manifest")
    ) as producer:
        await producer.produce([b"of the inner queue"])
    assert await survey(QueueReader(store, MANIFEST), "ingest", now_ms=2**47, grace_ms=0) == alone


async def test_an_empty_queue_has_no_lag_rather_than_a_lag_of_zero() -> None:
    found = await survey(QueueReader(MemoryStore(), MANIFEST), "ingest", now_ms=1, grace_ms=0)
    assert found.exists is False
    assert found.ingestion_lag_ms is None
    assert found.oldest_entry_age_ms is None


async def test_a_damaged_manifest_stays_an_error_until_it_is_repaired() -> None:
    store = MemoryStore()
    await fill(store, 1)
    whole = (await store.get(MANIFEST)).data
    reader = QueueReader(store, MANIFEST)
    assert len(await reader.index()) == 1
    await store.put(MANIFEST, b"\xff" * 200)
    for _ in range(3):
        with pytest.raises(SerializationError):
            await reader.index()
    await store.put(MANIFEST, whole)
    assert len(await reader.index()) == 1


async def test_entries_are_current_even_after_another_reader_cached_the_manifest() -> None:
    store = MemoryStore()
    await fill(store, 1)
    reader = QueueReader(store, MANIFEST)
    assert len(await reader.index()) == 1
    await fill(store, 2)
    await survey(reader, "ingest", now_ms=0, grace_ms=0)
    assert len(await reader.index()) == 3
