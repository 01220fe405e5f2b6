"""The detection of a lost or restored manifest by its side objects and batches."""

from __future__ import annotations

import logging

import pytest
from tests.unit.buffer.doubles import MANIFEST, Queue

from penstock.buffer import SerializationError, ShardedConsumer, ShardedProducer
from penstock.buffer.config import ConsumerConfig, ProducerConfig


@pytest.fixture
def q() -> Queue:
    return Queue()


async def append(q: Queue, count: int) -> list[int]:
    producer = q.producer(flush_interval="1h")
    handles = []
    for _ in range(count):
        await q.clock.advance(0.01)
        handles.append(await producer.produce([b"x"]))
        await producer.flush()
    await producer.close()
    return [(await handle.watcher.await_durable()).sequence for handle in handles]


async def raw(q: Queue, key: str = MANIFEST) -> bytes:
    return bytes((await q.store.get(key)).data)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


async def consume(q: Queue, through: int) -> None:
    consumer = await q.consumer()
    await consumer.next_descriptors(through + 1)
    await consumer.ack_through(through)
    await consumer.close()


async def test_after_a_lost_manifest_no_number_and_no_epoch_is_used_again(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    assert await append(q, 5) == [0, 1, 2, 3, 4]
    await consume(q, 1)
    epoch = (await q.manifest()).footer.epoch
    await q.store.delete_many([MANIFEST])
    await q.clock.advance(1)
    assert min(await append(q, 2)) > 4
    await q.consumer()
    assert (await q.manifest()).footer.epoch > epoch
    [text] = warnings(caplog)
    assert "3 earlier batches" in text
    assert "up to 1 are known" in text


async def test_batches_without_a_manifest_and_a_ledger_are_reported(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    await append(q, 3)
    await q.store.delete_many([MANIFEST])
    await q.clock.advance(1)
    await q.consumer()
    [text] = warnings(caplog)
    assert "3 earlier batches" in text


async def test_a_new_queue_is_not_reported(q: Queue, caplog: pytest.LogCaptureFixture) -> None:
    await append(q, 2)
    await consume(q, 1)
    assert not warnings(caplog)


async def test_a_manifest_older_than_its_ledger_is_refused_by_both_sides(q: Queue) -> None:
    await append(q, 2)
    older = await raw(q)
    await append(q, 2)
    await consume(q, 2)
    await q.store.put(MANIFEST, older)
    with pytest.raises(SerializationError, match="batch 2 was consumed, but its next number is 2"):
        await q.consumer()
    with pytest.raises(SerializationError, match="older than its ledger"):
        await append(q, 1)
    assert await raw(q) == older


async def test_an_older_epoch_is_refused(q: Queue) -> None:
    await append(q, 4)
    older = await raw(q)
    await consume(q, 2)
    await q.store.put(MANIFEST, older)
    with pytest.raises(SerializationError, match="a consumer of epoch 1 has written, but its epoch is 0"):
        await q.consumer()


async def test_a_collection_reports_batches_that_an_older_manifest_lacks(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    await append(q, 2)
    await consume(q, 0)
    older = await raw(q)
    await append(q, 3)
    await q.store.put(MANIFEST, older)
    consumer = await q.consumer(gc_grace_period="1s")
    await consumer.gc.collect()
    assert not warnings(caplog), "they may still be appended"
    await q.clock.advance(10)
    await consumer.gc.collect()
    await consumer.gc.collect()
    [text] = warnings(caplog)
    assert "3 batches are not in ingest/manifest" in text


async def test_shards_without_a_layout_are_refused(q: Queue) -> None:
    producing = ProducerConfig(store=q.store, flush_interval="1h")
    async with await ShardedProducer.open(producing, 3, clock=q.clock) as producer:
        for key in (b"a", b"b", b"c", b"d", b"e"):
            await producer.produce([b"x"], key=key)
        await producer.flush()
    await q.store.delete_many([f"{MANIFEST}.shards/layout.json"])
    with pytest.raises(SerializationError, match=r"layout\.json is missing, but there are shards up to 0002"):
        await ShardedProducer.open(producing, 2, clock=q.clock)
    with pytest.raises(SerializationError, match="shards up to"):
        await ShardedConsumer.open(ConsumerConfig(store=q.store), clock=q.clock)
