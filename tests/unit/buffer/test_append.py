from __future__ import annotations

import asyncio
import logging
import pickle

import pyarrow as pa
import pytest
from tests.unit.buffer.doubles import MANIFEST, Queue, ScriptedStore, once

from penstock import errors
from penstock.buffer import (
    Appended,
    CompressionType,
    InvalidInputError,
    ManifestFull,
    Metadata,
    ProducerConfig,
    SerializationError,
    StaleTransaction,
    StorageUnavailable,
    StoredBatch,
    Transaction,
    append_batches,
    last_version,
    store_batch,
)
from penstock.buffer import manifest as m
from penstock.buffer.batch import decode_batch
from penstock.buffer.transactions import NO_VERSION, find_tag, read_transaction_log
from penstock.clock import SYSTEM_CLOCK
from penstock.codec import RecordChunk
from penstock.objects import MemoryStore

BOOK = f"{MANIFEST}.txn"


async def stored(q: Queue, *records: bytes) -> StoredBatch:
    return await store_batch(q.store, "ingest", [*records], clock=q.clock, rng=q.rng)


async def append(
    q: Queue, *batches: StoredBatch, version: int | None = None, app: str = "query", **settings: object
) -> Appended:
    config = ProducerConfig(store=q.store, **settings)  # type: ignore[arg-type]
    transaction = None if version is None else Transaction(app=app, version=version)
    return await append_batches(config, batches, transaction, clock=q.clock, rng=q.rng, registry=q.registry)


async def delivered(q: Queue) -> list[bytes]:
    consumer = await q.consumer()
    records: list[bytes] = []
    while (batch := await consumer.next_batch()) is not None:
        records += batch.entries
        await consumer.ack(batch.sequence)
    await consumer.close()
    return records


@pytest.mark.parametrize("compression", list(CompressionType), ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "records",
    [
        pytest.param([b"a", b"", b"ccc"], id="list"),
        pytest.param(pa.array([b"a", b"", b"ccc"], pa.binary()), id="array"),
        pytest.param(pa.array([b"a", b"", b"ccc"], pa.large_binary()), id="large"),
        pytest.param(RecordChunk.of_list([b"a", b"", b"ccc"]), id="chunk"),
        pytest.param([RecordChunk.of_list([b"a"]), RecordChunk.of_list([b"", b"ccc"])], id="chunks"),
    ],
)
async def test_records_are_stored_as_one_object(
    q: Queue, records: object, compression: CompressionType
) -> None:
    batch = await store_batch(
        q.store, "ingest", records, compression=compression, metadata=b"m", clock=q.clock, rng=q.rng
    )
    raw = (await q.store.get(batch.location)).data
    assert decode_batch(raw).to_list() == [b"a", b"", b"ccc"]
    assert (batch.record_count, batch.record_bytes, batch.size) == (3, 4, len(raw))
    assert batch.metadata == (Metadata(start_index=0, ingestion_time_ms=q.clock.now_ms(), payload=b"m"),)
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert await q.keys("ingest") == [batch.location], "nothing is in the queue yet"


@pytest.mark.parametrize(
    ("records", "metadata"),
    [
        pytest.param([], b"", id="none"),
        pytest.param(["text"], b"", id="text"),
        pytest.param(pa.array([b"a", None]), b"", id="null"),
        pytest.param([b"a"], [Metadata(start_index=1, ingestion_time_ms=0)], id="metadata-behind"),
        pytest.param(
            [b"a", b"b"],
            [Metadata(start_index=1, ingestion_time_ms=0), Metadata(start_index=0, ingestion_time_ms=0)],
            id="metadata-falls",
        ),
    ],
)
async def test_invalid_batches_are_refused(q: Queue, records: object, metadata: object) -> None:
    with pytest.raises(InvalidInputError):
        await store_batch(q.store, "ingest", records, metadata=metadata, clock=q.clock, rng=q.rng)
    assert q.store.calls == []


async def test_stored_batches_are_appended_together_and_in_order(q: Queue) -> None:
    first, second = await stored(q, b"a"), await stored(q, b"b", b"c")
    q.store.calls.clear()
    assert await append(q, first, second) == Appended(first=0, count=2, repeated=False)
    assert q.store.count("cas") == 1
    assert await append(q, await stored(q, b"d")) == Appended(first=2, count=1, repeated=False)
    assert await delivered(q) == [b"a", b"b", b"c", b"d"]
    assert q.value("batches_flushed") == 3
    assert q.value("entries_flushed") == 4


async def test_appending_nothing_sends_no_request(q: Queue) -> None:
    assert await append(q, version=3) == Appended(first=None, count=0, repeated=False)
    assert q.store.calls == []


async def test_a_batch_of_another_queue_is_refused(q: Queue) -> None:
    batch = await store_batch(q.store, "elsewhere", [b"a"], clock=q.clock, rng=q.rng)
    with pytest.raises(InvalidInputError, match="not in ingest/ itself"):
        await append(q, batch)


async def test_a_transaction_is_appended_once_with_every_entry_tagged(q: Queue) -> None:
    await append(q, await stored(q, b"a"), await stored(q, b"b"), version=7)
    again = await append(q, await stored(q, b"a"), await stored(q, b"b"), version=7)
    assert again == Appended(first=None, count=0, repeated=True)
    entries = (await q.manifest()).entries
    assert [find_tag(entry.tail) for entry in entries] == [Transaction(app="query", version=7)] * 2
    assert read_transaction_log(await q.raw(BOOK)) == {"query": 7}


async def test_an_append_under_a_transaction_costs_one_more_read_and_two_calls_for_the_log(q: Queue) -> None:
    await append(q, await stored(q, b"before"))
    batch = await stored(q, b"a")
    q.store.calls.clear()
    await append(q, batch, version=0)
    assert q.store.calls == [
        ("get", MANIFEST),
        ("get", BOOK),
        ("get", f"{MANIFEST}.floor"),
        ("cas", MANIFEST),
        ("get", BOOK),
        ("cas", BOOK),
    ]


async def test_a_dequeue_of_entries_without_tags_does_not_read_the_transaction_log(q: Queue) -> None:
    await append(q, await stored(q, b"a"))
    assert await delivered(q) == [b"a"]
    assert not any(key == BOOK for _, key in q.store.calls)


async def test_the_transaction_log_is_not_written_again_without_a_change(q: Queue) -> None:
    await append(q, await stored(q, b"a"), version=1)
    q.store.calls.clear()
    assert await delivered(q) == [b"a"]
    assert (q.store.count("get", BOOK), q.store.count("cas", BOOK)) == (1, 0)


async def test_applications_are_independent_of_each_other(q: Queue) -> None:
    await append(q, await stored(q, b"a"), version=7, app="one")
    await append(q, await stored(q, b"b"), version=3, app="two")
    await append(q, await stored(q, b"c"), version=8, app="one")
    assert await delivered(q) == [b"a", b"b", b"c"]
    assert read_transaction_log(await q.raw(BOOK)) == {"two": 3, "one": 8}


async def test_versions_may_have_gaps_but_must_not_decrease(q: Queue) -> None:
    await append(q, await stored(q, b"a"), version=7)
    await append(q, await stored(q, b"b"), version=70)
    for version in (0, 7, 69):
        with pytest.raises(StaleTransaction, match="committed version 70") as caught:
            await append(q, await stored(q, b"x"), version=version)
        assert isinstance(caught.value, errors.Rejected)
        assert "checkpoint" in str(caught.value)
    assert await delivered(q) == [b"a", b"b"]
    with pytest.raises(StaleTransaction):
        await append(q, await stored(q, b"x"), version=7)


async def test_the_last_version_is_known_before_and_after_its_dequeue(q: Queue) -> None:
    config = ProducerConfig(store=q.store)
    assert await last_version(config, "query") is None
    await append(q, await stored(q, b"a"), version=7)
    await q.store.delete_many([BOOK])
    assert await last_version(config, "query") == 7
    assert await delivered(q) == [b"a"]
    assert await last_version(config, "query") == 7
    assert await last_version(config, "other") is None


async def test_a_transaction_log_that_cannot_be_written_is_a_warning(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    q.store.before = once(errors.PermissionDenied("no"), "cas", BOOK, times=99)
    with caplog.at_level(logging.WARNING):
        assert not (await append(q, await stored(q, b"a"), version=7)).repeated
    assert BOOK in caplog.text
    q.store.before = lambda op, key: None
    assert (await append(q, await stored(q, b"a"), version=7)).repeated
    assert read_transaction_log(await q.raw(BOOK)) == {"query": 7}, "a repetition makes up for it"


async def test_with_a_damaged_transaction_log_nothing_is_appended_or_dequeued_under_a_transaction(
    q: Queue,
) -> None:
    await append(q, await stored(q, b"a"), version=7)
    consumer = await q.consumer()
    await consumer.next_batch()
    await q.store_raw(BOOK, b"{")
    with pytest.raises(SerializationError, match="restore an older version"):
        await append(q, await stored(q, b"b"), version=8)
    with pytest.raises(SerializationError, match="restore an older version"):
        await consumer.ack_through(0)
    assert await q.sequences() == [0]
    await append(q, await stored(q, b"c"))
    assert await q.sequences() == [0, 1], "without a transaction the book is not needed"


async def test_a_truncated_read_of_the_transaction_log_is_repeated(q: Queue) -> None:
    await append(q, await stored(q, b"a"), version=7)
    whole = MemoryStore.get
    cut = 0

    async def get(key: str, byte_range: object = None) -> object:
        nonlocal cut
        blob = await whole(q.store, key)
        if key == BOOK and not cut:
            cut += 1
            return type(blob)(data=blob.data[:-3], version=blob.version)
        return blob

    q.store.get = get  # type: ignore[method-assign, assignment]
    assert (await append(q, await stored(q, b"a"), version=7)).repeated
    assert cut == 1


async def test_a_stale_batch_is_copied_and_keeps_its_metadata(q: Queue) -> None:
    batch = await store_batch(q.store, "ingest", [b"a"], metadata=b"m", clock=q.clock, rng=q.rng)
    await q.clock.advance(301)
    await append(q, batch, version=0)
    (entry,) = (await q.manifest()).entries
    assert entry.location != batch.location
    assert entry.metadata == batch.metadata
    assert await delivered(q) == [b"a"]
    assert q.value("reupload_total") == 1


async def test_a_batch_that_was_collected_before_its_append_is_not_referenced(q: Queue) -> None:
    batch = await stored(q, b"a")
    await q.clock.advance(301)
    await q.store.delete_many([batch.location])
    with pytest.raises(StorageUnavailable, match="store its records again"):
        await append(q, batch, version=0)
    assert await q.sequences() == []


async def test_a_full_manifest_takes_no_transaction(q: Queue) -> None:
    batch = await stored(q, b"a")
    with pytest.raises(ManifestFull):
        await append(q, batch, version=0, max_manifest_bytes=64)
    assert await q.sequences() == []


async def test_a_consumer_without_the_transaction_log_is_harmless_after_the_append_has_returned(
    q: Queue,
) -> None:
    from penstock.buffer import manifest

    await append(q, await stored(q, b"a"), version=7)
    await q.store_raw(MANIFEST, manifest.dequeue(await q.raw(), 0))
    assert (await append(q, await stored(q, b"a"), version=7)).repeated


async def test_a_step_that_names_its_predecessor_is_appended_only_after_it(q: Queue) -> None:
    config = ProducerConfig(store=q.store)

    async def step(version: int, follows: int, record: bytes) -> Appended:
        transaction = Transaction(app="relay", version=version)
        batch = await stored(q, record)
        return await append_batches(config, [batch], transaction, follows=follows, clock=q.clock, rng=q.rng)

    with pytest.raises(StaleTransaction, match="is at version none"):
        await step(10, 5, b"x")
    assert not (await step(10, NO_VERSION, b"a")).repeated
    assert (await step(10, NO_VERSION, b"a")).repeated, "it is committed, whatever it followed"
    assert not (await step(25, 10, b"b")).repeated
    with pytest.raises(StaleTransaction, match="continues from 10: another process"):
        await step(30, 10, b"x")
    assert await delivered(q) == [b"a", b"b"]
    with pytest.raises(StaleTransaction, match="is at version 25"):
        await step(30, 10, b"x")


async def test_a_competing_write_that_wins_the_swap_is_detected() -> None:
    store = ScriptedStore(clock=SYSTEM_CLOCK)
    config = ProducerConfig(store=store)

    async def step(version: int, *records: bytes) -> Appended:
        batch = await store_batch(store, "ingest", [*records])
        transaction = Transaction(app="relay", version=version)
        return await append_batches(config, [batch], transaction, follows=NO_VERSION)

    await step(0, b"z")
    held, swapping = asyncio.Event(), asyncio.Event()

    def gate(op: str, key: str) -> asyncio.Event | None:
        if (op, key) != ("cas", MANIFEST) or swapping.is_set():
            return None
        swapping.set()
        return held

    store.gate = gate
    transactions = [Transaction(app="relay", version=version) for version in (2, 1)]
    batches = [await store_batch(store, "ingest", records) for records in ([b"a", b"b"], [b"a"])]
    mine = asyncio.create_task(append_batches(config, batches[:1], transactions[0], follows=0))
    await swapping.wait()
    assert not (await append_batches(config, batches[1:], transactions[1], follows=0)).repeated
    held.set()
    with pytest.raises(StaleTransaction, match="is at version 1"):
        await mine
    assert m.index((await store.get(MANIFEST)).data).footer.next_sequence == 2
