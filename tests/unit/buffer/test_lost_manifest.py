"""The detection of a lost or restored manifest by its side objects and batches."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.unit.buffer.doubles import MANIFEST, Queue

from penstock.buffer import (
    Appended,
    SerializationError,
    ShardedConsumer,
    ShardedProducer,
    StoredBatch,
    Transaction,
    append_batches,
    last_version,
    store_batch,
)
from penstock.buffer.config import ConsumerConfig, ProducerConfig
from penstock.objects import MemoryStore

BOOK = f"{MANIFEST}.txn"


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


# ---- what the transaction log tells of it --------------------------------------------------------------


async def stored(q: Queue, record: bytes) -> StoredBatch:
    return await store_batch(q.store, "ingest", [record], clock=q.clock, rng=q.rng)


async def commit(q: Queue, batch: StoredBatch, *, version: int, app: str = "query") -> Appended:
    config, transaction = ProducerConfig(store=q.store), Transaction(app=app, version=version)
    return await append_batches(config, [batch], transaction, clock=q.clock, rng=q.rng)


async def test_an_older_manifest_beside_a_current_book_is_refused(q: Queue) -> None:
    await commit(q, await stored(q, b"a"), version=7)
    older = await raw(q)
    await commit(q, await stored(q, b"b"), version=8)
    await q.store_raw(MANIFEST, older)
    for version in (8, 9):
        with pytest.raises(SerializationError, match=r"'query' has committed version 8, .* 7\."):
            await commit(q, await stored(q, b"c"), version=version)
    with pytest.raises(SerializationError, match="older than its transaction log"):
        await last_version(ProducerConfig(store=q.store), "query")
    assert await raw(q) == older
    assert not (await commit(q, await stored(q, b"d"), version=1, app="other")).repeated


@pytest.mark.parametrize("times", [1, 3])
async def test_an_append_between_manifest_and_book_is_not_an_older_manifest(q: Queue, times: int) -> None:
    """1. a writer reads the manifest; 2. others append and enter their versions; 3. it reads the book."""
    await commit(q, await stored(q, b"a"), version=7)
    batches = [await stored(q, b"%d" % n) for n in range(times)]
    whole = MemoryStore.get

    async def get(key: str, byte_range: object = None) -> object:
        if key == BOOK and batches:
            del q.store.get
            await commit(q, batches.pop(), version=8 + times - len(batches) - 1)
            if batches:
                q.store.get = get  # type: ignore[method-assign, assignment]
        return await whole(q.store, key)

    q.store.get = get  # type: ignore[method-assign, assignment]
    appending = asyncio.create_task(commit(q, await stored(q, b"last"), version=100))
    for _ in range(200):
        if appending.done():
            break
        await q.clock.advance(1)
    assert (await asyncio.wait_for(appending, 10)).first == times + 1
