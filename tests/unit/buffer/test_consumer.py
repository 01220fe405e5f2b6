from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Awaitable, Callable

import pytest
from tests.unit.buffer.doubles import MANIFEST, Queue, golden, once, turns

from penstock import errors
from penstock.buffer import (
    BatchMissing,
    Consumer,
    ConsumerConfig,
    FencedError,
    InvalidInputError,
    OutOfOrderAck,
    RetriesExhausted,
    SerializationError,
    StorageError,
    StorageRejected,
)
from penstock.buffer import manifest as m
from penstock.buffer.manifest import NewEntry
from penstock.buffer.side_objects import read_dequeued_log
from penstock.objects import BucketNotFound


async def taken(consumer: Consumer, count: int) -> list[int]:
    batches = [await consumer.next_batch() for _ in range(count)]
    return [batch.sequence for batch in batches if batch is not None]


Call = Callable[[Consumer], Awaitable[object]]
CALLS: dict[str, Call] = {
    "next_batch": lambda c: c.next_batch(),
    "next_descriptors": lambda c: c.next_descriptors(5),
    "ack": lambda c: c.ack(0),
    "ack_through": lambda c: c.ack_through(0),
    "flush": lambda c: c.flush(),
}


# Owning the queue


@pytest.mark.parametrize("name", CALLS)
async def test_every_call_on_an_uninitialised_consumer_is_fenced(q: Queue, name: str) -> None:
    await q.fill(1)
    with pytest.raises(FencedError, match="initialize"):
        await CALLS[name](q.unopened())
    assert await q.sequences() == [0]


@pytest.mark.parametrize("name", ["next_batch", "next_descriptors", "ack_through", "flush"])
async def test_a_superseded_consumer_is_fenced_and_removes_nothing(q: Queue, name: str) -> None:
    await q.fill(3)
    old = await q.consumer()
    await taken(old, 2)
    await old.ack(0)
    new = await q.consumer()
    call = (lambda c: c.ack_through(1)) if name == "ack_through" else CALLS[name]

    async def try_it() -> None:
        work = asyncio.ensure_future(call(old))
        await q.clock.advance(1)
        await work

    with pytest.raises(FencedError, match="superseded"):
        await try_it()
    for again in CALLS.values():
        with pytest.raises((FencedError, OutOfOrderAck)):
            await again(old)
    assert await q.sequences() == [0, 1, 2]
    assert await taken(new, 3) == [0, 1, 2]


async def test_the_hundredth_ack_of_a_superseded_consumer_is_fenced(q: Queue) -> None:
    await q.fill(101)
    old = await q.consumer()
    await old.next_descriptors(101)
    for sequence in range(99):
        await old.ack(sequence)
    await q.consumer()
    acking = asyncio.create_task(old.ack(99))
    await q.clock.advance(1)
    with pytest.raises(FencedError):
        await acking
    assert old.acked == 98
    assert len(await q.sequences()) == 101


async def test_starting_creates_the_manifest_and_each_start_raises_the_epoch(q: Queue) -> None:
    first = await q.consumer()
    assert await q.raw() == m.set_epoch(m.EMPTY_MANIFEST, 1)
    assert (first.epoch, len(first), first.acked) == (1, 0, None)
    assert (await q.consumer()).epoch == 2


async def test_the_epoch_skips_the_value_of_an_uninitialised_consumer(q: Queue) -> None:
    await q.store_raw(MANIFEST, m.set_epoch(m.EMPTY_MANIFEST, 2**64 - 2))
    assert (await q.consumer()).epoch == 0


async def test_a_consumer_may_take_the_queue_back(q: Queue) -> None:
    await q.fill(4)
    first = await q.consumer()
    assert await taken(first, 1) == [0]
    second = await q.consumer()
    assert await taken(second, 2) == [0, 1]
    await second.ack_through(1)
    initialising = asyncio.create_task(first.initialize(1))
    await q.clock.advance(1)
    await initialising
    assert first.epoch == 3
    assert await taken(first, 2) == [2, 3]
    await first.ack_through(3)
    assert sorted(read_dequeued_log(await q.raw(f"{MANIFEST}.ledger"))) == [0, 1, 2, 3]


async def test_open_leaves_nothing_running_when_it_fails(q: Queue) -> None:
    await q.store_raw(MANIFEST, b"not a manifest at all, really")
    with pytest.raises(SerializationError):
        await Consumer.open(ConsumerConfig(store=q.store), clock=q.clock, rng=q.rng, registry=q.registry)
    assert q.clock.sleeping == 0
    assert await q.raw() == b"not a manifest at all, really"


@pytest.mark.parametrize("position", [-1, True])
async def test_an_invalid_position_is_refused(q: Queue, position: int) -> None:
    with pytest.raises(InvalidInputError):
        await q.consumer(position)


# Delivery


async def test_batches_are_delivered_in_order_with_their_metadata(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    for number in range(3):
        batch = await consumer.next_batch()
        assert batch is not None
        assert (batch.sequence, batch.entries, len(batch)) == (number, [b"%d" % number], 1)
        assert batch.to_arrow().to_pylist() == batch.to_arrow_view().to_pylist() == batch.entries
        assert batch.metadata[0].payload == b"meta-%d" % number
        assert (batch.gap_from, batch.duplicate_of, batch.shard) == (None, None, None)
    assert await consumer.next_batch() is None
    assert len(consumer) == 3


@pytest.mark.parametrize("prefetch", [0, 4])
async def test_a_cancelled_next_batch_delivers_the_same_again(q: Queue, prefetch: int) -> None:
    await q.fill(3)
    consumer = await q.consumer(prefetch=prefetch)
    for stop in ("get_if_changed", "get"):
        gate = asyncio.Event()
        q.store.gate = lambda op, key, stop=stop, gate=gate: gate if op == stop else None  # type: ignore[misc]
        waiting = asyncio.create_task(consumer.next_batch())
        await turns()
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        await turns()
    q.store.gate = lambda op, key: None
    assert await taken(consumer, 3) == [0, 1, 2]


@pytest.mark.parametrize("prefetch", [0, 4])
async def test_a_failed_next_batch_delivers_the_same_again(q: Queue, prefetch: int) -> None:
    await q.fill(3)
    consumer = await q.consumer(prefetch=prefetch)
    assert await taken(consumer, 1) == [0]
    q.store.before = once(errors.PermissionDenied("no"), "get_if_changed")
    with pytest.raises(StorageError):
        await consumer.next_batch()
    assert await taken(consumer, 2) == [1, 2]


async def test_a_read_that_fails_raises_and_the_next_call_tries_again(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer()
    q.store.before = once(errors.PermissionDenied("no"), "get", ".batch")
    with pytest.raises(StorageError, match="fetching batch 0"):
        await consumer.next_batch()
    assert await taken(consumer, 1) == [0]


async def test_a_missing_batch_raises_every_time_until_it_exists(q: Queue) -> None:
    await q.fill(2)
    location = (await q.manifest()).entries[0].location
    kept = await q.raw(location)
    await q.store.delete_many([location])
    consumer = await q.consumer()
    for _ in range(3):
        with pytest.raises(BatchMissing, match=location):
            await consumer.next_batch()
    await q.store_raw(location, kept)
    assert await taken(consumer, 2) == [0, 1]


async def test_a_damaged_batch_raises_every_time_and_nothing_overtakes_it(q: Queue) -> None:
    await q.fill(2)
    await q.store_raw((await q.manifest()).entries[0].location, b"damaged beyond repair")
    consumer = await q.consumer()
    for _ in range(3):
        with pytest.raises(SerializationError, match="batch 0"):
            await consumer.next_batch()
    assert consumer.dead_letters == []


async def test_a_read_cut_short_once_is_read_again(q: Queue) -> None:
    await q.fill(1)
    location = (await q.manifest()).entries[0].location
    whole = await q.raw(location)
    await q.store_raw(location, whole[:5])
    consumer = await q.consumer()
    reads = 0

    def heal(op: str, key: str) -> None:
        nonlocal reads
        if op == "get" and key == location:
            reads += 1
            if reads == 2:
                q.store._write(key, whole)

    q.store.before = heal
    assert await taken(consumer, 1) == [0]


async def test_fetching_ahead_stays_within_its_number(q: Queue) -> None:
    await q.fill(10)
    consumer = await q.consumer(prefetch=3)
    q.store.calls.clear()
    assert await taken(consumer, 1) == [0]
    await turns()
    assert sum(key.endswith(".batch") for _, key in q.store.calls) == 1, "how large they are is not known yet"
    assert await taken(consumer, 1) == [1]
    await turns()
    assert sum(key.endswith(".batch") for _, key in q.store.calls) == 5
    assert await taken(consumer, 8) == list(range(2, 10))
    assert sum(key.endswith(".batch") for _, key in q.store.calls) == 10, "each is fetched once"


async def test_fetching_ahead_stops_at_its_bytes(q: Queue) -> None:
    await q.fill(10)
    consumer = await q.consumer(prefetch=9, prefetch_bytes_max=1)
    await taken(consumer, 1)
    await turns()
    q.store.calls.clear()
    await taken(consumer, 1)
    await turns()
    assert sum(key.endswith(".batch") for _, key in q.store.calls) == 1, "nothing more fits"


@pytest.mark.parametrize("wrong", ["5", 1.5, -1, 2**64, True])
async def test_an_invalid_sequence_is_refused_before_anything_is_removed(q: Queue, wrong: int) -> None:
    await q.fill(2)
    with pytest.raises(InvalidInputError, match="sequence number"):
        await q.consumer(wrong)
    consumer = await q.consumer()
    with pytest.raises(InvalidInputError, match="sequence number"):
        await consumer.ack_through(wrong)
    assert len((await q.manifest()).entries) == 2


async def test_an_object_larger_than_the_cap_is_not_read_whole(q: Queue) -> None:
    await q.fill(1)
    entry = (await q.manifest()).entries[0]
    await q.store.put(entry.location, bytes(3 << 20))
    consumer = await q.consumer(max_batch_bytes="1MiB")
    with pytest.raises(SerializationError, match="max_batch_bytes"):
        await consumer.next_batch()


async def test_a_deleted_manifest_is_not_reported_as_a_takeover(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer()
    raw = bytes((await q.store.get(MANIFEST)).data)
    await q.store.delete_many([MANIFEST])
    with pytest.raises(FencedError, match="no longer exists"):
        await consumer.next_batch()
    await q.store.put(MANIFEST, raw)
    assert (await consumer.next_batch()) is not None


async def test_a_closed_consumer_fails_immediately(q: Queue) -> None:
    consumer = await q.consumer()
    await consumer.close()
    with pytest.raises(FencedError, match="closed"):
        await consumer.next_batch()


async def test_without_prefetch_each_batch_is_fetched_on_demand(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer(prefetch=0)
    q.store.calls.clear()
    assert await taken(consumer, 1) == [0]
    await turns()
    assert sum(key.endswith(".batch") for _, key in q.store.calls) == 1


async def test_an_idle_poll_costs_one_conditional_read(q: Queue) -> None:
    consumer = await q.consumer()
    q.store.calls.clear()
    assert await consumer.next_batch() is None
    assert q.store.calls == [("get_if_changed", MANIFEST)]


async def test_a_batch_larger_than_the_consumer_allows_is_a_bad_batch(q: Queue) -> None:
    await q.fill(1)
    with pytest.raises(SerializationError, match="cap"):
        await (await q.consumer(max_batch_bytes=4)).next_batch()


async def test_a_large_batch_is_decoded_in_a_thread_the_same_way(q: Queue) -> None:
    producer = q.producer()
    await producer.produce([bytes(300_000), b"end"])
    await producer.flush()
    batch = await (await q.consumer()).next_batch()
    assert batch is not None
    assert batch.entries == [bytes(300_000), b"end"]


async def test_batches_waits_at_the_end_of_the_queue_and_continues(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer()
    stream = consumer.batches("1s")
    assert (await anext(stream)).sequence == 0
    following = asyncio.ensure_future(anext(stream))
    await q.clock.advance(3)
    assert not following.done()
    await q.fill(1)
    await q.clock.advance(1)
    assert (await following).sequence == 1


# Descriptors


async def test_descriptors_cost_one_read_and_move_the_position(q: Queue) -> None:
    await q.fill(5)
    consumer = await q.consumer()
    q.store.calls.clear()
    handed = await consumer.next_descriptors(3)
    assert [d.sequence for d in handed] == [0, 1, 2]
    assert q.store.calls == [("get_if_changed", MANIFEST)]
    assert [d.sequence for d in await consumer.next_descriptors(10)] == [3, 4]
    assert await consumer.next_descriptors(10) == []
    batches = await asyncio.gather(*map(consumer.fetch_handle().fetch, handed))
    assert [batch.entries for batch in batches] == [[b"0"], [b"1"], [b"2"]]
    assert (await consumer.fetch_descriptor(handed[0])).entries == [b"0"]
    assert q.value("descriptors_handed_out") == 5


@pytest.mark.parametrize("limit", [0, -1])
async def test_no_descriptors_need_no_request(q: Queue, limit: int) -> None:
    consumer = await q.consumer()
    q.store.calls.clear()
    assert await consumer.next_descriptors(limit) == []
    assert q.store.calls == []


async def test_a_lost_descriptor_is_delivered_again_to_a_new_consumer(q: Queue) -> None:
    await q.fill(3)
    await (await q.consumer()).next_descriptors(3)
    assert [d.sequence for d in await (await q.consumer()).next_descriptors(3)] == [0, 1, 2]


# Acks


async def test_a_hundred_and_one_acks_leave_one_entry(q: Queue) -> None:
    await q.fill(101)
    consumer = await q.consumer()
    await consumer.next_descriptors(101)
    q.store.calls.clear()
    for sequence in range(99):
        await consumer.ack(sequence)
    assert q.store.calls == []
    await consumer.ack(99)
    await consumer.ack(100)
    assert q.store.count("cas", MANIFEST) == 1
    assert await q.sequences() == [100]
    assert len(consumer) == 1
    assert q.value("acks") == 101


async def test_acks_out_of_order_are_refused(q: Queue) -> None:
    await q.fill(4)
    consumer = await q.consumer()
    with pytest.raises(OutOfOrderAck):
        await consumer.ack(0)
    await taken(consumer, 3)
    for wrong in (1, 2, 3, 99):
        with pytest.raises(OutOfOrderAck):
            await consumer.ack(wrong)
    await consumer.ack(0)
    for wrong in (0, 2):
        with pytest.raises(OutOfOrderAck):
            await consumer.ack(wrong)
    await consumer.ack(1)
    assert consumer.acked == 1


async def test_the_first_ack_is_the_first_delivered_whatever_its_number(q: Queue) -> None:
    await q.fill(5)
    consumer = await q.consumer(last_acked=2)
    await taken(consumer, 2)
    with pytest.raises(OutOfOrderAck):
        await consumer.ack(4)
    await consumer.ack(3)
    await consumer.ack(4)


async def test_ack_through_removes_everything_in_one_write(q: Queue) -> None:
    await q.fill(5)
    consumer = await q.consumer()
    await consumer.next_descriptors(4)
    q.store.calls.clear()
    await consumer.ack_through(2)
    assert q.store.count("cas", MANIFEST) == 1
    assert await q.sequences() == [3, 4]
    assert q.value("acks") == 3
    for wrong in (2, 1, 0):
        with pytest.raises(OutOfOrderAck):
            await consumer.ack_through(wrong)
    with pytest.raises(InvalidInputError, match="does not exist yet"):
        await consumer.ack_through(5)
    assert consumer.acked == 2
    await consumer.ack(3)
    assert consumer.acked == 3


async def test_ack_through_removes_entries_appended_after_the_last_read(q: Queue) -> None:
    consumer = await q.consumer()
    await q.fill(2)
    await consumer.ack_through(1)
    assert await q.sequences() == []
    assert await consumer.next_batch() is None


async def test_a_dequeue_that_fails_leaves_the_ack_repeatable(q: Queue) -> None:
    await q.fill(101)
    consumer = await q.consumer()
    await consumer.next_descriptors(101)
    for sequence in range(99):
        await consumer.ack(sequence)
    q.store.before = once(errors.PermissionDenied("no"), "cas", MANIFEST, times=2)
    with pytest.raises(StorageError):
        await consumer.ack(99)
    with pytest.raises(StorageError):
        await consumer.ack_through(99)
    assert consumer.acked == 98
    assert len(await q.sequences()) == 101
    await consumer.ack(99)
    assert await q.sequences() == [100]


async def test_a_dequeue_that_landed_without_a_reply_counts_once(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    await consumer.next_descriptors(3)
    q.store.after = once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST)
    acking = asyncio.create_task(consumer.ack_through(1))
    await q.clock.advance(1)
    await acking
    assert await q.sequences() == [2]
    assert consumer.acked == 1


async def test_a_store_that_stays_unavailable_fails_the_dequeue_after_the_deadline(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer(retry_deadline="1s")
    await consumer.next_descriptors(1)
    q.store.before = once(errors.Unavailable("away"), "cas", times=10_000)
    acking = asyncio.create_task(consumer.ack_through(0))
    await q.clock.advance(3)
    with pytest.raises(RetriesExhausted):
        await acking
    q.store.before = lambda op, key: None
    await consumer.ack_through(0)


async def test_a_dequeue_keeps_concurrent_appends(q: Queue) -> None:
    await q.fill(2)
    consumer = await q.consumer()
    await consumer.next_descriptors(2)
    await q.fill(2)
    acking = asyncio.create_task(consumer.ack_through(1))
    await q.clock.advance(1)
    await acking
    assert await q.sequences() == [2, 3]
    assert q.value("manifest_conflicts", role="consumer") == 1


async def test_flush_removes_acknowledged_entries_and_writes_nothing_twice(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    await taken(consumer, 3)
    await consumer.ack(0)
    await consumer.ack(1)
    await consumer.flush()
    assert await q.sequences() == [2]
    q.store.calls.clear()
    await consumer.flush()
    assert q.store.calls == []


async def test_close_flushes_and_release_does_not(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    await taken(consumer, 1)
    await consumer.ack(0)
    await consumer.release()
    assert await q.sequences() == [0, 1, 2]
    async with await q.consumer() as consumer:
        await taken(consumer, 2)
        await consumer.ack(0)
    assert await q.sequences() == [1, 2]
    await q.unopened().close()


async def test_leaving_a_fenced_consumer_writes_nothing_and_keeps_the_reason(q: Queue) -> None:
    await q.fill(2)

    async def lose_the_queue() -> None:
        async with await q.consumer() as old:
            await taken(old, 1)
            await old.ack(0)
            await q.consumer()
            await old.next_batch()

    with pytest.raises(FencedError, match="superseded"):
        await lose_the_queue()
    assert await q.sequences() == [0, 1]


async def test_the_ledger_is_written_before_the_entries_leave(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    await consumer.next_descriptors(3)
    q.store.calls.clear()
    await consumer.ack_through(1)
    writes = [key for op, key in q.store.calls if op in ("put", "cas")]
    assert writes == [f"{MANIFEST}.ledger", MANIFEST]
    assert sorted(read_dequeued_log(await q.raw(f"{MANIFEST}.ledger"))) == [0, 1]


async def test_a_damaged_ledger_does_not_stop_the_consumer(q: Queue) -> None:
    await q.fill(2)
    await q.store_raw(f"{MANIFEST}.ledger", b"damaged")
    consumer = await q.consumer()
    await taken(consumer, 2)
    await consumer.ack_through(1)
    assert sorted(read_dequeued_log(await q.raw(f"{MANIFEST}.ledger"))) == [0, 1]


# Resuming


async def test_entries_up_to_the_position_are_removed_at_the_start(q: Queue) -> None:
    await q.fill(5)
    consumer = await q.consumer(last_acked=2)
    assert await q.sequences() == [3, 4]
    assert await taken(consumer, 3) == [3, 4]
    assert q.value("gap_total") == 0


async def test_a_gap_after_the_position_is_reported_and_acks_follow_delivery(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    await q.fill(6)
    await q.consumer(last_acked=3)
    consumer = await q.consumer(last_acked=1)
    batch = await consumer.next_batch()
    assert batch is not None
    assert (batch.sequence, batch.gap_from) == (4, 2)
    assert "jumps from 2 to 4" in caplog.text
    assert q.value("gap_total") == 1
    await consumer.ack(4)
    assert await taken(consumer, 1) == [5]
    assert q.value("gap_total") == 1


async def test_a_gap_is_reported_on_descriptors_too(q: Queue) -> None:
    await q.fill(6)
    await q.consumer(last_acked=3)
    handed = await (await q.consumer(last_acked=1)).next_descriptors(5)
    assert [(d.sequence, d.gap_from) for d in handed] == [(4, 2), (5, None)]


async def test_a_queue_that_ends_before_the_position_is_skipped_with_a_warning(
    q: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    await q.fill(2)
    with caplog.at_level(logging.WARNING):
        consumer = await q.consumer(last_acked=3)
    assert "was the manifest deleted" in caplog.text
    assert await consumer.next_batch() is None
    await q.fill(3)
    assert await taken(consumer, 1) == [4]
    await consumer.ack(4)
    await consumer.flush()
    assert await q.sequences() == []


async def test_a_strict_consumer_refuses_a_queue_that_ends_before_its_position(q: Queue) -> None:
    await q.fill(2)
    with pytest.raises(InvalidInputError, match="was the manifest deleted"):
        await q.consumer(last_acked=2, strict_resume=True)
    assert await q.sequences() == [0, 1]
    assert (await q.consumer(last_acked=1, strict_resume=True)).acked == 1


async def test_an_absent_manifest_is_created_whatever_the_position(q: Queue) -> None:
    consumer = await q.consumer(last_acked=5)
    assert await q.raw() == m.set_epoch(m.EMPTY_MANIFEST, 1)
    assert await consumer.next_batch() is None
    await consumer.close()


# Odd queues


async def test_a_location_appended_twice_is_flagged(q: Queue) -> None:
    await q.fill(2)
    twice = (await q.manifest()).entries[0]
    again = NewEntry(location=twice.location, metadata=twice.metadata)
    await q.store_raw(MANIFEST, m.append(await q.raw(), [again]))
    consumer = await q.consumer()
    flags = [batch.duplicate_of for _ in range(3) if (batch := await consumer.next_batch())]
    assert flags == [None, None, 0]
    assert q.value("duplicate_total") == 1


async def test_a_duplicate_of_a_dequeued_entry_is_flagged_by_the_next_consumer(q: Queue) -> None:
    await q.fill(1)
    twice = (await q.manifest()).entries[0]
    first = await q.consumer()
    await taken(first, 1)
    await first.ack_through(0)
    again = NewEntry(location=twice.location, metadata=[])
    await q.store_raw(MANIFEST, m.append(await q.raw(), [again]))
    (handed,) = await (await q.consumer()).next_descriptors(5)
    assert (handed.sequence, handed.duplicate_of) == (1, 0)


async def test_a_foreign_location_is_fetched_unchanged(q: Queue) -> None:
    await q.store_raw(MANIFEST, golden("foreign.manifest"))
    await q.store_raw("other/01HF7YATS00000000000000002/00000000000000ff", golden("zstd.batch"))
    batch = await (await q.consumer()).next_batch()
    assert batch is not None
    assert (batch.sequence, batch.entries) == (7, [b"hello", b"", b"foo"])


async def test_a_manifest_with_a_gap_in_its_numbers_is_corrupt(q: Queue) -> None:
    raw = golden("M1.manifest")
    await q.store_raw(MANIFEST, raw[:-22] + struct.pack("<IQQH", 1, 5, 0, 1))
    with pytest.raises(SerializationError):
        await (await q.consumer()).next_batch()


# Bad batches


async def spoil(q: Queue, *, damaged: int, missing: int | None = None) -> None:
    entries = (await q.manifest()).entries
    await q.store_raw(entries[damaged].location, b"damaged beyond repair")
    if missing is not None:
        await q.store.delete_many([entries[missing].location])


async def test_bad_batches_are_set_aside_durably_with_their_evidence(q: Queue) -> None:
    await q.fill(5)
    await spoil(q, damaged=1, missing=3)
    consumer = await q.consumer(on_bad_batch="skip")
    assert await taken(consumer, 3) == [0, 2, 4]
    damaged, missing = consumer.dead_letters
    assert (damaged.sequence, missing.sequence) == (1, 3)
    assert damaged.bytes_key is not None
    assert await q.raw(damaged.bytes_key) == b"damaged beyond repair"
    record = json.loads(await q.raw(damaged.record_key))
    assert (record["sequence"], record["location"]) == (1, damaged.location)
    assert "damaged" in record["reason"]
    assert missing.bytes_key is None
    assert json.loads(await q.raw(missing.record_key))["bytes_key"] is None
    assert q.value("bad_batch_total") == 2
    for sequence in (0, 2, 4):
        await consumer.ack(sequence)
    await consumer.flush()
    assert await q.sequences() == []


async def test_a_bad_batch_is_not_passed_while_its_record_cannot_be_stored(q: Queue) -> None:
    await q.fill(2)
    await spoil(q, damaged=0)
    consumer = await q.consumer(on_bad_batch="skip")
    q.store.before = once(errors.PermissionDenied("no"), "put", ".dead/")
    with pytest.raises(errors.PenstockError):
        await consumer.next_batch()
    assert consumer.dead_letters == []
    assert await taken(consumer, 1) == [1]
    assert len(consumer.dead_letters) == 1


async def test_a_batch_set_aside_at_the_end_leaves_the_queue_with_the_next_flush(q: Queue) -> None:
    await q.fill(2)
    await spoil(q, damaged=1)
    consumer = await q.consumer(on_bad_batch="skip")
    assert await taken(consumer, 2) == [0]
    await consumer.ack_through(0)
    await consumer.flush()
    assert consumer.acked == 1
    assert await q.sequences() == []


async def test_a_batch_set_aside_after_the_hundredth_ack_leaves_with_the_next_flush(q: Queue) -> None:
    await q.fill(100)
    await spoil(q, damaged=99)
    consumer = await q.consumer(on_bad_batch="skip")
    assert await taken(consumer, 100) == list(range(99))
    for sequence in range(99):
        await consumer.ack(sequence)
    await consumer.flush()
    assert await q.sequences() == []


@pytest.mark.parametrize("location", ["", "a/../b", "100%", "x" * 2000])
async def test_a_name_that_no_store_accepts_is_a_missing_batch(q: Queue, location: str) -> None:
    await q.store_raw(MANIFEST, m.append(await q.raw(), [NewEntry(location=location, metadata=[])]))
    await q.fill(1)
    with pytest.raises(BatchMissing):
        await (await q.consumer()).next_batch()
    assert await taken(await q.consumer(on_bad_batch="skip"), 1) == [1]


# Metrics


async def test_a_consumer_counts_its_deliveries(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    await producer.produce([b"abc", b"de"])
    await q.clock.advance(2)
    await producer.produce([b"f"])
    await producer.flush()
    await q.clock.advance(3)
    consumer = await q.consumer()
    await taken(consumer, 1)
    assert q.value("batches_collected") == 1
    assert q.value("entries_collected") == 3
    assert q.value("bytes_collected") == 6
    assert q.value("consumer_lag_seconds") == 3
    assert q.value("fetch_duration_seconds") == 1
    assert q.value("manifest_writes", role="consumer") == 1
    q.clock.jump_wall(-60_000)
    await producer.produce([b"later"])
    q.clock.jump_wall(-60_000)
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    await taken(consumer, 1)
    assert q.value("consumer_lag_seconds") == 0, "never below zero"
    await consumer.ack_through(1)
    assert q.value("queue_length") == 0
    assert q.value("acks") == 2


# Concurrent calls


def hold_batches(q: Queue) -> asyncio.Event:
    """Return an event for which all fetches of batches wait."""
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "get" and key.endswith(".batch") else None
    return gate


async def test_an_ack_through_past_a_bad_batch_that_is_being_set_aside_never_goes_back(q: Queue) -> None:
    await q.fill(4)
    await q.store_raw((await q.manifest()).entries[0].location, b"bad")
    consumer = await q.consumer(on_bad_batch="skip", prefetch=0)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "put" and ".dead/" in key else None
    reading = asyncio.create_task(consumer.next_batch())
    await turns()
    await consumer.ack_through(2)
    gate.set()
    batch = await reading
    assert batch is not None
    assert (batch.sequence, batch.gap_from, consumer.acked) == (3, None, 2)


async def test_an_ack_during_a_flush_is_flushed_by_close(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    for _ in range(3):
        await consumer.next_batch()
    await consumer.ack(0)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "cas" else None
    flushing = asyncio.create_task(consumer.flush())
    await turns()
    await consumer.ack(1)
    gate.set()
    await flushing
    assert await q.sequences() == [1, 2]
    await consumer.close()
    assert await q.sequences() == [2]


async def test_a_caller_whose_consumer_is_released_gets_an_error_and_is_not_cancelled(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer(prefetch=0)
    hold_batches(q)
    reading = asyncio.create_task(consumer.next_batch())
    await turns()
    await consumer.release()
    with pytest.raises(StorageError, match="closed"):
        await reading


async def test_a_fetch_that_ends_as_the_consumer_is_released_is_still_delivered(q: Queue) -> None:
    await q.fill(1)
    consumer = await q.consumer(prefetch=0)
    gate = hold_batches(q)
    reading = asyncio.create_task(consumer.next_batch())
    await turns()
    (_, fetch), *_ = consumer._prefetcher._tasks
    fetch.add_done_callback(lambda _: consumer._prefetcher.cancel())
    gate.set()
    batch = await reading
    assert batch is not None
    assert batch.sequence == 0


async def test_a_missing_bucket_is_not_an_empty_queue(q: Queue) -> None:
    await q.fill(2)
    consumer = await q.consumer(prefetch=0)
    await consumer.next_batch()
    q.store.before = once(BucketNotFound("no bucket"), "get_if_changed")
    with pytest.raises(StorageRejected, match="no bucket"):
        await consumer.next_batch()
    batch = await consumer.next_batch()
    assert batch is not None
    assert batch.sequence == 1


async def test_an_ack_through_below_the_first_delivered_is_out_of_order(q: Queue) -> None:
    await q.fill(6)
    await (await q.consumer()).ack_through(4)
    consumer = await q.consumer()
    await consumer.next_batch()
    with pytest.raises(OutOfOrderAck, match="first that was delivered is 5"):
        await consumer.ack_through(2)
    assert consumer.acked is None
