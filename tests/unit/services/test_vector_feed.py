"""A collection fed from a queue: every batch once, in order, with refused records as dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from tests.unit.vector.doubles import World, vector

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.coordinator import FlushFenced
from penstock.errors import ConfigError, InvalidInput
from penstock.objects import MemoryStore
from penstock.services.feed import Feed, FeedConfig
from penstock.services.vector_feed import FedVectors
from penstock.vector import Collection, Metric, Vector, VectorStore, Write
from penstock.vector.delta import VectorDelta
from penstock.vector.records import DELETE_METADATA, UPSERT_METADATA, encode_deletes, encode_upserts


@pytest.fixture
async def queue() -> AsyncIterator[MemoryStore]:
    store = MemoryStore("queue")
    yield store
    await store.close()


async def produce(queue: MemoryStore, batches: Sequence[tuple[list[bytes], bytes]]) -> None:
    async with Producer(ProducerConfig(store=queue, flush_interval="1ms")) as producer:
        for records, payload in batches:
            await (await producer.produce(records, payload)).watcher.await_durable()


def feed(queue: MemoryStore, store: VectorStore) -> Feed:
    config = FeedConfig(queue=ConsumerConfig(store=queue, gc_enabled=False), poll_interval="1ms")
    return Feed(config, FedVectors(store))


async def held(store: VectorStore) -> dict[str, list[float]]:
    hits = await store.search([0, 0, 0], k=1000)
    return {hit.id: hit.vector.tolist() for hit in hits if hit.vector is not None}


async def test_upserts_and_deletions_are_applied_in_the_order_of_the_queue(queue: MemoryStore) -> None:
    await produce(
        queue,
        [
            ([encode_upserts([vector("a", 1, 0, 0), vector("b", 2, 0, 0)])], UPSERT_METADATA),
            ([encode_deletes(["a", "b"])], DELETE_METADATA),
            ([encode_upserts([vector("b", 3, 0, 0)])], UPSERT_METADATA),
        ],
    )
    world = World()
    store = await world.open()
    report = await feed(queue, store).run(once=True)
    assert (report.records, report.refused, report.through) == (3, 0, 2)
    assert await held(store) == {"b": [3, 0, 0]}
    await store.close()
    store = await world.open()
    assert store.position == 2
    await produce(queue, [([encode_upserts([vector("c", 4, 0, 0)])], UPSERT_METADATA)])
    report = await feed(queue, store).run(once=True)
    assert (report.records, report.through) == (1, 3)
    assert await held(store) == {"b": [3, 0, 0], "c": [4, 0, 0]}
    await store.close()
    assert len(await Consumer.open(ConsumerConfig(store=queue, gc_enabled=False))) == 0


async def test_a_record_that_breaks_a_rule_is_a_dead_letter_as_a_whole(queue: MemoryStore) -> None:
    good, bad = vector("good", 1, 0, 0), vector("bad", 1, 0)
    await produce(
        queue,
        [
            (
                [encode_upserts([vector("half", 1, 0, 0), bad]), encode_upserts([good]), b"\xff"],
                UPSERT_METADATA,
            ),
            ([encode_upserts([vector("x", 1, 0, 0)])], b"\x01\x09\x01"),
        ],
    )
    store = await World().open()
    report = await feed(queue, store).run(once=True)
    assert (report.records, report.refused, report.through) == (1, 3, 1)
    assert await held(store) == {"good": [1, 0, 0]}
    assert store.position == 1
    await store.close()


async def test_a_feed_whose_collection_was_taken_over_stops_and_acknowledges_nothing(
    queue: MemoryStore,
) -> None:
    await produce(queue, [([encode_upserts([vector("a", 1, 0, 0)])], UPSERT_METADATA)])
    world = World()
    store = await world.open()
    newer = await world.open()
    with pytest.raises(FlushFenced):
        await feed(queue, store).run(once=True)
    await store.abort()
    report = await feed(queue, newer).run(once=True)
    assert report.records == 1
    assert await held(newer) == {"a": [1, 0, 0]}
    await newer.close()


async def test_another_queue_is_refused_and_unchanged(queue: MemoryStore) -> None:
    other = MemoryStore("other")
    for one in (queue, other):
        await produce(one, [([encode_upserts([vector("a", 1, 0, 0)])], UPSERT_METADATA)] * 3)
    world = World()
    store = await world.open()
    await feed(queue, store).run(once=True)
    await store.close()
    store = await world.open()
    assert (store.position, store.source) == (2, "memory://queue/ingest/manifest")
    with pytest.raises(ConfigError, match="was fed from memory://queue/ingest/manifest"):
        await feed(other, store).run(once=True)
    await store.close()
    assert len(await Consumer.open(ConsumerConfig(store=other, gc_enabled=False))) == 3


async def test_positions_never_go_back_and_never_skip_a_refused_write() -> None:
    store = await World().open()
    await store.write(Write.upsert([vector("a", 1, 0, 0)]))
    await store.write(Write((), position=3))
    with pytest.raises(InvalidInput, match="is not after 3"):
        await store.write(Write((), position=3))
    with pytest.raises(InvalidInput, match="has 2 components"):
        await store.write(Write((("b", vector("b", 1, 0)),), position=4))
    with pytest.raises(InvalidInput, match="cannot be stored before 4, which was refused"):
        await store.write(Write((), position=5))
    await store.write(Write((), position=4))
    await store.write(Write((), position=5))
    await store.close()


def test_a_write_has_the_same_size_in_the_queue_and_the_delta() -> None:
    delta = VectorDelta()
    delta.init(Collection(dimensions=3, metric=Metric.L2))
    write = Write.upsert([vector("a", 1, 0, 0), Vector("b", [0, 1, 0], {"text": "x" * 20_000})])
    delta.apply_one(write)
    assert write.items == delta.estimate_size() == 4
