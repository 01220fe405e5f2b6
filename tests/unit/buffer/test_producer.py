from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from tests.unit.buffer.doubles import MANIFEST, T0, Queue, once, turns

from penstock import errors
from penstock.buffer import (
    InvalidInputError,
    ManifestFull,
    Metadata,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    ProducerConfig,
    RetriesExhausted,
    StorageError,
    StorageRejected,
    WriteHandle,
)
from penstock.buffer import producer as producers
from penstock.buffer.append import CONTENDED_READS
from penstock.buffer.batch import decode_batch
from penstock.buffer.errors import StorageUnavailable
from penstock.buffer.side_objects import Floor, write_floor
from penstock.ids import ulid_ms
from penstock.metrics import Registry
from penstock.objects import Blob, MemoryStore, Version


async def records_of(q: Queue) -> list[list[bytes]]:
    entries = (await q.manifest()).entries
    return [decode_batch(memoryview(await q.raw(entry.location))).to_list() for entry in entries]


def is_pending(handle: WriteHandle) -> bool:
    return handle.watcher.result() is None


# When a batch is stored


async def test_a_batch_is_stored_one_interval_after_its_first_call(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    first = await producer.produce([b"a"])
    await q.clock.advance(0.06)
    second = await producer.produce([b"b"])
    await q.clock.advance(0.039)
    assert is_pending(first)
    await q.clock.advance(0.001)
    await turns()
    outcome = await first.watcher.await_durable()
    assert (outcome.sequence, outcome.start_index) == (0, 0)
    assert second.watcher.result() is not None
    assert await records_of(q) == [[b"a", b"b"]]


async def test_the_timer_restarts_with_each_batch_and_stops_while_the_producer_is_idle(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    await producer.produce([b"a"])
    await q.clock.advance(10)
    assert q.clock.sleeping == 0
    writes = len(q.store.calls)
    await q.clock.advance(10)
    assert len(q.store.calls) == writes
    late = await producer.produce([b"b"])
    await q.clock.advance(0.099)
    assert is_pending(late)
    await q.clock.advance(0.001)
    assert not is_pending(late)
    assert await records_of(q) == [[b"a"], [b"b"]]


async def test_a_batch_is_stored_once_records_and_metadata_reach_the_flush_size(q: Queue) -> None:
    producer = q.producer(flush_size_bytes=10, flush_interval="1h")
    below = await producer.produce([b"1234", b""], b"12345")
    await turns()
    assert is_pending(below)
    reached = await producer.produce([b""], b"1")
    await turns()
    assert not is_pending(below)
    assert not is_pending(reached)
    assert await records_of(q) == [[b"1234", b"", b""]]


async def test_flush_covers_every_call_before_it(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    handles = [await producer.produce([b"%d" % n]) for n in range(5)]
    await producer.flush()
    assert all(not is_pending(handle) for handle in handles)
    assert await records_of(q) == [[b"0", b"1", b"2", b"3", b"4"]]


async def test_flushing_nothing_sends_no_request(q: Queue) -> None:
    producer = q.producer()
    await producer.flush()
    assert q.store.calls == []
    await producer.produce([b"a"])
    await producer.flush()
    calls = len(q.store.calls)
    await producer.flush()
    assert len(q.store.calls) == calls


async def test_a_queue_that_never_runs_empty_does_not_starve_the_deadline(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    handles: list[WriteHandle] = []
    for _ in range(30):
        for _ in range(10):  # more calls always wait when the batcher checks
            handles.append(await producer.produce([b"x"]))
        await q.clock.advance(0.01)
    await turns()
    assert not is_pending(handles[0])
    assert q.value("batches_flushed") >= 2


async def test_a_deadline_passed_between_two_queued_calls_is_noticed(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    await producer.produce([b"a"])
    await q.clock.advance(0.1)
    await producer.produce([b"b"])
    await q.clock.advance(0.1)
    gate.set()
    await producer.flush()
    assert await records_of(q) == [[b"a"], [b"b"]]


# What is stored


async def test_every_call_has_its_start_index_time_and_metadata(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    await producer.produce([b"a", b"b"], b"first")
    await q.clock.advance(0.25)
    handle = await producer.produce([b"c"])
    third = await producer.produce(pa.array([b"d", b"e"]), b"third")
    await producer.flush()
    (entry,) = (await q.manifest()).entries
    assert entry.metadata == (
        Metadata(start_index=0, ingestion_time_ms=T0, payload=b"first"),
        Metadata(start_index=2, ingestion_time_ms=T0 + 250, payload=b""),
        Metadata(start_index=3, ingestion_time_ms=T0 + 250, payload=b"third"),
    )
    assert handle.ingestion_time_ms == T0 + 250
    outcome = await third.watcher.await_durable()
    assert (outcome.start_index, outcome.location, outcome.ok) == (3, entry.location, True)
    assert await records_of(q) == [[b"a", b"b", b"c", b"d", b"e"]]


async def test_neighbouring_calls_with_equal_metadata_are_merged_on_request(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", merge_metadata=True)
    for payload in (b"a", b"a", b"b", b"a"):
        await producer.produce([b"r"], payload)
    await q.clock.advance(0.001)
    last = await producer.produce([b"r"], b"a")
    await producer.flush()
    (entry,) = (await q.manifest()).entries
    assert [(meta.start_index, meta.payload) for meta in entry.metadata] == [
        (0, b"a"),
        (2, b"b"),
        (3, b"a"),
        (4, b"a"),
    ]
    assert (await last.watcher.await_durable()).start_index == 4


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_lists_and_arrays_of_any_length_mix_in_one_batch(q: Queue, compression: str) -> None:
    producer = q.producer(flush_interval="1h", batch_compression=compression)
    long = [b"%d" % n for n in range(300)]
    for records in ([b"a"], pa.array([b"b", b""]), long, [b"c"], (b"d",)):
        await producer.produce(records)
    await producer.flush()
    assert await records_of(q) == [[b"a", b"b", b"", *long, b"c", b"d"]]


async def test_a_payload_large_enough_for_a_thread_is_stored_the_same_way(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", batch_compression="zstd")
    big = [bytes([n]) * 100_000 for n in range(5)]
    await producer.produce(big)
    await producer.flush()
    assert await records_of(q) == [big]


async def test_the_caller_may_reuse_its_list_immediately(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    mine = [b"a"]
    await producer.produce(mine)
    mine[0] = b"changed"
    mine.append(b"added")
    await producer.flush()
    assert await records_of(q) == [[b"a"]]


async def test_batch_names_are_ulids_of_the_moment_they_were_stored(q: Queue) -> None:
    producer = q.producer(data_path_prefix="/deep//prefix/", manifest_path="elsewhere")
    handle = await producer.produce([b"a"])
    await producer.flush()
    location = (await handle.watcher.await_durable()).location
    assert location is not None
    folder, _, name = location.rpartition("/")
    assert folder == "deep/prefix"
    assert ulid_ms(name.removesuffix(".batch")) == T0
    assert name == name.removesuffix(".batch").upper() + ".batch"
    assert "elsewhere" in await q.keys()


# What is refused


@pytest.mark.parametrize(
    "entries",
    [[], (), pa.array([], pa.binary()), pa.chunked_array([], pa.binary())],
    ids=["list", "tuple", "array", "chunked"],
)
async def test_a_call_without_records_is_refused(q: Queue, entries: list[bytes]) -> None:
    with pytest.raises(InvalidInputError, match="at least one record"):
        await q.producer().produce(entries)


@pytest.mark.parametrize("entries", [["text"], [None], [b"a", 1], "text", b"bytes", pa.array([b"a", None])])
async def test_invalid_records_are_refused(q: Queue, entries: list[bytes]) -> None:
    producer = q.producer()
    with pytest.raises(InvalidInputError):
        await producer.produce(entries)
    await producer.flush()
    assert q.store.calls == []


async def test_metadata_must_be_bytes(q: Queue) -> None:
    with pytest.raises(InvalidInputError, match="metadata"):
        await q.producer().produce([b"a"], "text")  # type: ignore[arg-type]


async def test_a_call_larger_than_a_batch_is_refused_before_memory_is_reserved(
    q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.buffer.producer.BATCH_WEIGHT_MAX", 100)
    producer = q.producer()
    with pytest.raises(InvalidInputError, match="split it"):
        await producer.produce([b"x" * 93])
    with pytest.raises(InvalidInputError, match="split it"):
        await producer.produce([b""] * 13)
    await producer.produce([b"x" * 92])


async def test_metadata_longer_than_its_field_is_refused(q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.buffer.producer.METADATA_BYTES_MAX", 3)
    with pytest.raises(InvalidInputError, match="metadata of 4 bytes"):
        await q.producer().produce([b"a"], b"1234")


async def test_metadata_larger_than_a_manifest_is_refused_without_affecting_others(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", max_manifest_bytes="64KiB")
    innocent = await producer.produce([b"a"])
    with pytest.raises(InvalidInputError, match="manifest can take"):
        await producer.produce([b"b"], b"x" * 70_000)
    await producer.flush()
    assert (await innocent.watcher.await_durable()).sequence == 0


async def test_a_group_larger_than_the_manifest_is_committed_as_far_as_it_fits(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", flush_size_bytes=1, max_manifest_bytes=4096)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    handles = [await producer.produce([b"a"], b"m" * 1000) for _ in range(4)]
    await turns()
    gate.set()
    results = await asyncio.gather(*(h.watcher.await_durable() for h in handles), return_exceptions=True)
    kept = [result for result in results if not isinstance(result, BaseException)]
    assert 1 <= len(kept) < 4
    assert all(isinstance(result, ManifestFull) for result in results if isinstance(result, BaseException))
    assert len((await q.manifest()).entries) == len(kept)


async def test_empty_records_and_empty_metadata_are_accepted(q: Queue) -> None:
    producer = q.producer()
    await producer.produce([b""])
    await producer.flush()
    assert await records_of(q) == [[b""]]
    assert (await q.manifest()).entries[0].metadata[0].payload == b""


# Failures


async def test_a_failed_batch_fails_only_its_own_callers(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.before = once(errors.PermissionDenied("no"), "put", ".batch")
    lost = [await producer.produce([b"a"]), await producer.produce([b"b"])]
    with pytest.raises(StorageRejected, match="no"):
        await producer.flush()
    kept = await producer.produce([b"c"])
    await producer.flush()
    for handle in lost:
        with pytest.raises(StorageRejected):
            await handle.watcher.await_durable()
    outcomes = [handle.watcher.result() for handle in lost]
    assert outcomes[0] is not None
    assert outcomes[1] is not None
    assert outcomes[0].error is outcomes[1].error
    assert (await kept.watcher.await_durable()).sequence == 0
    assert await records_of(q) == [[b"c"]]
    assert q.value("batches_flushed") == 1


async def test_an_append_that_is_refused_fails_its_batch_only(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.before = once(errors.PermissionDenied("no"), "cas", MANIFEST)
    lost = await producer.produce([b"a"])
    with pytest.raises(StorageRejected):
        await producer.flush()
    await producer.produce([b"b"])
    await producer.flush()
    assert lost.watcher.result() is not None
    assert await records_of(q) == [[b"b"]]
    assert len(await q.keys("ingest")) == 3  # the first object is garbage for the collector


async def test_a_store_that_stays_unavailable_is_reported_as_retries_exhausted(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1s")
    q.store.before = once(errors.Unavailable("away"), "get", MANIFEST, times=10_000)
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(2)
    with pytest.raises(RetriesExhausted, match="away"):
        await flushing
    assert not is_pending(handle)


async def test_a_data_object_that_cannot_be_stored_fails_after_the_deadline(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1s")
    q.store.before = once(errors.Unavailable("away"), "put", ".batch", times=10_000)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(2)
    with pytest.raises(StorageUnavailable, match="away"):
        await flushing
    assert q.store.count("cas") == 0


async def test_a_transient_fault_is_retried_without_an_error(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.before = once(errors.Unavailable("busy"), "put", ".batch", times=2)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert await records_of(q) == [[b"a"]]


async def test_a_damaged_manifest_is_never_overwritten(q: Queue) -> None:
    await q.store_raw(MANIFEST, b"not a manifest, but thirty bytes")
    producer = q.producer()
    await producer.produce([b"a"])
    with pytest.raises(errors.Corrupt):
        await producer.flush()
    assert await q.raw() == b"not a manifest, but thirty bytes"


async def test_a_damaged_floor_stops_appends(q: Queue) -> None:
    await q.store_raw(f"{MANIFEST}.floor", b"{}")
    producer = q.producer()
    await producer.produce([b"a"])
    with pytest.raises(errors.Corrupt):
        await producer.flush()
    assert await q.sequences() == []


# Order


async def test_a_slow_upload_holds_back_later_batches(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", flush_size_bytes=1, max_parallel_uploads=3)
    gates: dict[str, asyncio.Event] = {}

    def gate(op: str, key: str) -> asyncio.Event | None:
        return gates.setdefault(key, asyncio.Event()) if key.endswith(".batch") else None

    q.store.gate = gate
    handles = [await producer.produce([b"%d" % n]) for n in range(3)]
    await turns()
    slow, *fast = gates.values()
    for event in fast:
        event.set()
    await turns()
    assert all(is_pending(handle) for handle in handles)
    assert q.store.count("cas") == 0
    slow.set()
    await turns()
    assert [(await handle.watcher.await_durable()).sequence for handle in handles] == [0, 1, 2]
    assert await records_of(q) == [[b"0"], [b"1"], [b"2"]]
    assert q.store.count("cas") == 1, "what is ready goes into the manifest in one write"
    assert q.value("append_group_size") == 1


async def test_a_failed_batch_in_the_middle_leaves_no_gap(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", flush_size_bytes=1)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    q.store.before = once(errors.PermissionDenied("no"), "put", ".batch", skip=1)
    handles = [await producer.produce([b"%d" % n]) for n in range(3)]
    await turns()
    gate.set()
    await turns()
    results = [handle.watcher.result() for handle in handles]
    assert [result.sequence for result in results if result is not None] == [0, None, 1]
    assert await records_of(q) == [[b"0"], [b"2"]]


# Backpressure


async def test_produce_waits_while_too_many_calls_are_queued(q: Queue) -> None:
    producer = q.producer(
        max_buffered_inputs=2, max_parallel_uploads=1, flush_size_bytes=1, flush_interval="1h"
    )
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    waiting = [asyncio.create_task(producer.produce([b"%d" % n])) for n in range(10)]
    await turns()
    admitted = [task for task in waiting if task.done()]
    assert 2 <= len(admitted) < 10
    gate.set()
    await asyncio.gather(*waiting)
    await producer.flush()
    assert [record for batch in await records_of(q) for record in batch] == [b"%d" % n for n in range(10)]


async def test_produce_waits_while_too_many_bytes_are_held(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 300, flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    held = [await producer.produce([b"x" * 92]) for _ in range(3)]
    waiting = asyncio.create_task(producer.produce([b"y"]))
    flushing = asyncio.create_task(producer.flush())
    await turns()
    assert not waiting.done()
    assert q.value("inflight_bytes") == 300
    gate.set()
    await flushing
    await waiting
    assert all(not is_pending(handle) for handle in held)
    await producer.flush()
    assert q.value("inflight_bytes") == 0


async def test_a_call_larger_than_the_limit_is_admitted_alone(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=10, flush_interval="1h")
    await producer.produce([b"x" * 1000])
    second = asyncio.create_task(producer.produce([b"y"]))
    await turns()
    assert not second.done()
    await producer.flush()
    await second
    await producer.flush()
    assert await records_of(q) == [[b"x" * 1000], [b"y"]]


async def test_waiting_calls_are_admitted_in_order_of_arrival(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 9, flush_interval="10ms")
    tasks = [asyncio.create_task(producer.produce([b"%d" % n])) for n in range(6)]
    for _ in range(8):
        await q.clock.advance(0.02)
    await asyncio.gather(*tasks)
    await producer.flush()
    assert [record for batch in await records_of(q) for record in batch] == [b"%d" % n for n in range(6)]


async def test_a_cancelled_waiting_call_has_no_effect_and_the_next_is_admitted(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 22, flush_interval="1h")
    await producer.produce([b"first"])
    big = asyncio.create_task(producer.produce([b"x" * 12]))
    small = asyncio.create_task(producer.produce([b"s"]))
    await turns()
    assert not small.done(), "first come, first served"
    big.cancel()
    await turns()
    assert big.cancelled()
    await small
    await producer.flush()
    assert await records_of(q) == [[b"first", b"s"]]
    assert q.value("inflight_bytes") == 0


async def test_a_call_cancelled_while_space_is_freed_has_no_effect(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 9, flush_interval="1h")
    await producer.produce([b"1"])
    waiting = asyncio.create_task(producer.produce([b"2"]))
    await turns()
    waiting.cancel()
    producer._admission.release(0)  # another call frees space before the cancelled task runs
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await producer.flush()
    assert await records_of(q) == [[b"1"]]


async def test_a_call_cancelled_after_its_admission_frees_its_space(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 9, flush_interval="1h")
    await producer.produce([b"1"])
    waiting = asyncio.create_task(producer.produce([b"2"]))
    await turns()
    producer._admission.release(9)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert producer._admission.bytes_held == 0
    assert producer._admission.calls_waiting == 0


# Handles


async def test_cancelling_a_waiter_does_not_cancel_the_write(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    handle = await producer.produce([b"a"])
    waiters = [asyncio.create_task(handle.watcher.await_durable()) for _ in range(20)]
    await turns()
    waiters[3].cancel()
    await q.clock.advance(0.1)
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(outcomes[3], asyncio.CancelledError)
    del outcomes[3]
    again = await handle.watcher.await_durable()
    assert outcomes == [again] * 19
    assert handle.watcher.result() == again


async def test_an_error_is_raised_to_every_waiter_every_time(q: Queue) -> None:
    producer = q.producer(flush_interval="100ms")
    q.store.before = once(errors.PermissionDenied("no"), "put", ".batch")
    handle = await producer.produce([b"a"])
    waiters = [asyncio.create_task(handle.watcher.await_durable()) for _ in range(3)]
    await q.clock.advance(0.1)
    for waiter in waiters:
        with pytest.raises(StorageRejected):
            await waiter
    for _ in range(2):
        with pytest.raises(StorageRejected):
            await handle.watcher.await_durable()
    outcome = handle.watcher.result()
    assert outcome is not None
    assert not outcome.ok


# Closing


async def test_close_stores_what_is_pending(q: Queue) -> None:
    async with q.producer(flush_interval="1h") as producer:
        handle = await producer.produce([b"a"])
    assert (await handle.watcher.await_durable()).sequence == 0
    await producer.close()
    with pytest.raises(ProducerClosed):
        await producer.produce([b"b"])
    await producer.flush()


async def test_close_raises_the_error_of_the_last_flush_after_everything_stopped(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.before = once(errors.PermissionDenied("no"), "put", ".batch")
    await producer.produce([b"a"])
    with pytest.raises(StorageRejected):
        await producer.close()
    assert producer._tasks == []


async def test_a_call_that_waits_for_space_is_refused_by_close(q: Queue) -> None:
    producer = q.producer(max_inflight_bytes=2 * 9, flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    await producer.produce([b"1"])
    waiting = asyncio.create_task(producer.produce([b"2"]))
    closing = asyncio.create_task(producer.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ProducerClosed):
        await waiting


async def test_a_producer_that_is_shut_down_settles_all_waiting_calls(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", flush_size_bytes=5)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key.endswith(".batch") else None
    uploading = await producer.produce([b"12345"])
    collecting = await producer.produce([b"1"])
    waiter = asyncio.create_task(uploading.watcher.await_durable())
    closing = asyncio.create_task(producer.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(StorageError, match="shut down"):
        await waiter
    with pytest.raises(StorageError, match="shut down"):
        await collecting.watcher.await_durable()


async def test_a_defect_in_a_task_leaves_no_caller_waiting(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")

    def broken(op: str, key: str) -> None:
        if op == "cas":
            raise RuntimeError("a defect")

    q.store.before = broken
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    with pytest.raises(StorageError):
        await handle.watcher.await_durable()
    with pytest.raises(StorageError):
        await flushing
    with pytest.raises(ProducerClosed):
        await producer.produce([b"b"])
    with pytest.raises(StorageError, match="internal error"):
        await producer.flush()
    with pytest.raises(StorageError, match="internal error"):
        await producer.close()


@pytest.mark.timeout(10)
def test_a_program_whose_other_task_fails_ends_with_its_producer() -> None:
    handles = []

    async def producing(ready: asyncio.Event) -> None:
        async with Producer(ProducerConfig(store=MemoryStore(), flush_interval="1h")) as producer:
            handles.append(await producer.produce([b"a"]))
            ready.set()
            await asyncio.Event().wait()

    async def failing(ready: asyncio.Event) -> None:
        await ready.wait()
        raise ValueError("the other task")

    async def both() -> None:
        ready = asyncio.Event()
        await asyncio.gather(producing(ready), failing(ready))

    with pytest.raises(ValueError, match="the other task"):
        asyncio.run(both())
    outcome = handles[0].watcher.result()
    assert outcome is not None
    assert isinstance(outcome.error, StorageError)


async def test_a_loop_that_cancels_every_task_leaves_no_caller_waiting(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", flush_size_bytes=5)
    q.store.gate = lambda op, key: asyncio.Event() if key.endswith(".batch") else None
    uploading = await producer.produce([b"12345"])
    collecting = await producer.produce([b"1"])
    flushing = asyncio.create_task(producer.flush())
    await turns()
    for task in asyncio.all_tasks() - {asyncio.current_task(), flushing}:
        task.cancel()
    closing = asyncio.create_task(producer.close())
    for waiter in (flushing, closing):
        with pytest.raises(StorageError, match="were cancelled"):
            await asyncio.wait_for(waiter, 5)
    for handle in (uploading, collecting):
        with pytest.raises(StorageError, match="were cancelled"):
            await handle.watcher.await_durable()
    with pytest.raises(ProducerClosed):
        await producer.produce([b"b"])
    assert producer._tasks == []


async def test_an_unexpected_error_of_the_store_is_not_a_success(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")

    def broken(op: str, key: str) -> None:
        if key.endswith(".batch"):
            raise RuntimeError("cannot start a new thread")

    q.store.before = broken
    handle = await producer.produce([b"a"])
    with pytest.raises(StorageError, match="cannot start a new thread"):
        await producer.flush()
    with pytest.raises(StorageError):
        await handle.watcher.await_durable()
    assert (await q.manifest()).entries == ()
    q.store.before = lambda op, key: None
    kept = await producer.produce([b"b"])
    await producer.flush()
    assert (await kept.watcher.await_durable()).sequence == 0


async def test_an_abandoned_flush_raises_an_error(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", max_parallel_uploads=1, flush_size_bytes=1)
    closed_gate = asyncio.Event()
    q.store.gate = lambda op, key: closed_gate
    handles = [await producer.produce([b"a"]) for _ in range(3)]
    flushing = asyncio.create_task(producer.flush())
    await turns()
    closing = asyncio.create_task(producer.close())
    await turns()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    with pytest.raises(StorageError, match="shut down"):
        await flushing
    assert all(handle.watcher.result() is not None for handle in handles), "nobody is left waiting"


def test_a_producer_does_not_move_to_another_event_loop() -> None:
    store = MemoryStore()
    made: list[Producer] = []

    async def first() -> None:
        made.append(Producer(ProducerConfig(store=store), registry=Registry()))
        await made[0].produce([b"a"])
        await made[0].flush()

    async def second() -> None:
        with pytest.raises(ProducerClosed, match="another event loop"):
            await made[0].produce([b"b"])
        with pytest.raises(ProducerClosed, match="another event loop"):
            await made[0].flush()
        with pytest.raises(ProducerClosed, match="another event loop"):
            await made[0].close()

    asyncio.run(first())
    asyncio.run(second())


# The manifest


async def test_an_append_without_contention_reads_nothing(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    await producer.produce([b"a"])
    await producer.flush()
    q.store.calls.clear()
    for _ in range(5):
        await producer.produce([b"b"])
        await producer.flush()
    assert q.store.count("get") == 0
    assert q.store.count("put") == q.store.count("cas") == 5
    assert len(q.store.calls) == 10
    assert producer.conflict_rate() == 0.0


async def test_conflicts_are_counted_and_resolved(q: Queue) -> None:
    first, second = q.producer(flush_interval="1h"), q.producer(flush_interval="1h")
    assert first.conflict_rate() == 0.0
    for producer in (first, second, first):
        await producer.produce([b"x"])
        flushing = asyncio.create_task(producer.flush())
        await q.clock.advance(1)
        await flushing
    assert await q.sequences() == [0, 1, 2]
    assert first.conflict_rate() == pytest.approx(100 / 3)
    assert second.conflict_rate() == 0
    assert q.value("manifest_writes", role="producer") == 4
    assert q.value("manifest_conflicts", role="producer") == 1


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("skip", [0, 1])
async def test_an_append_that_commits_and_then_raises_is_not_repeated(
    q: Queue, skip: int, repeats: int
) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.after = once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST, skip=skip, times=repeats)
    for number in range(5):
        handle = await producer.produce([b"%d" % number])
        flushing = asyncio.create_task(producer.flush())
        await q.clock.advance(1)
        await flushing
        assert (await handle.watcher.await_durable()).sequence == number
    assert await records_of(q) == [[b"%d" % number] for number in range(5)]
    assert q.store.count("delete") == 0


async def test_an_append_whose_own_write_conflicts_with_itself_is_not_repeated(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.after = once(errors.Conflict("a hidden retry met our own write"), "cas", MANIFEST)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert await records_of(q) == [[b"a"]]


async def test_an_append_that_was_lost_is_repeated_on_the_same_base(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    q.store.before = once(errors.OutcomeUnknown("timed out"), "cas", MANIFEST)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert await records_of(q) == [[b"a"]]
    assert q.store.count("put") == 1, "the object is stored once"


async def lost_then_dequeued(q: Queue, producer: Producer) -> asyncio.Task[None]:
    """Let an append land, lose its reply, and let a consumer dequeue the entry before the producer looks."""
    q.store.after = once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await turns()  # the producer now waits before it looks again
    consumer = await q.consumer()
    batch = await consumer.next_batch()
    assert batch is not None
    await consumer.ack_through(batch.sequence)
    assert await q.sequences() == []
    return flushing


async def test_the_dequeued_log_shows_a_producer_that_its_append_landed(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    flushing = await lost_then_dequeued(q, producer)
    await q.clock.advance(5)
    await flushing
    assert await q.sequences() == []
    assert q.value("append_unknown_total", resolved="true") == 1


async def test_without_a_ledger_the_outcome_is_unknown_and_never_guessed(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    flushing = await lost_then_dequeued(q, producer)
    await q.store.delete_many([f"{MANIFEST}.ledger"])
    q.store.calls.clear()
    await q.clock.advance(5)
    with pytest.raises(OutcomeUnknown, match="may have landed"):
        await flushing
    assert await q.sequences() == []
    assert q.store.count("delete") == 0
    assert q.value("append_unknown_total", resolved="false") == 1
    await producer.produce([b"b"])
    await producer.flush()
    assert await records_of(q) == [[b"b"]]


async def test_an_append_that_may_still_land_at_the_deadline_is_an_unknown_outcome(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1s")
    q.store.before = once(errors.OutcomeUnknown("timed out"), "cas", MANIFEST, times=10_000)
    await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(3)
    with pytest.raises(OutcomeUnknown):
        await flushing
    assert [key for key in await q.keys() if key.endswith(".batch")] != []
    assert q.store.count("delete") == 0


async def test_an_append_that_landed_is_found_at_the_deadline(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1s")
    q.store.after = once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST)
    q.store.before = once(errors.Unavailable("away"), "get", MANIFEST, skip=1, times=8)
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(3)
    await asyncio.gather(flushing, return_exceptions=True)
    outcome = handle.watcher.result()
    assert outcome is not None
    assert outcome.ok or isinstance(outcome.error, OutcomeUnknown)
    assert await records_of(q) == [[b"a"]]


async def test_a_manifest_deleted_under_a_producer_starts_a_queue_that_assigns_no_number_again(
    q: Queue,
) -> None:
    producer = q.producer(flush_interval="1h")
    for _ in range(3):
        await producer.produce([b"a"])
        await producer.flush()
    await q.store.delete_many([MANIFEST])
    handle = await producer.produce([b"b"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert (await handle.watcher.await_durable()).sequence >= 3


async def test_a_full_manifest_refuses_more_until_the_consumer_dequeues(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", max_manifest_bytes=22 + 73 + 73)
    for _ in range(2):
        await producer.produce([b"a"])
        await producer.flush()
    await producer.produce([b"too much"])
    with pytest.raises(ManifestFull, match="consumer"):
        await producer.flush()
    assert await q.sequences() == [0, 1]
    consumer = await q.consumer()
    await consumer.next_descriptors(2)
    await consumer.ack_through(1)
    await producer.produce([b"b"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert await records_of(q) == [[b"b"]]


# The floor


async def test_a_batch_at_or_below_the_floor_is_stored_again_before_it_is_referenced(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "get" and key == MANIFEST else None
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await turns()
    (orphan,) = await q.keys("ingest")
    await q.store_raw(f"{MANIFEST}.floor", write_floor(Floor(floor_ms=T0, sealed_ms=-1)))
    gate.set()
    await flushing
    location = (await handle.watcher.await_durable()).location
    assert location is not None
    assert location != orphan
    assert ulid_ms(location.rpartition("/")[2].removesuffix(".batch")) == T0 + 1
    assert await records_of(q) == [[b"a"]]
    assert q.value("reupload_total") == 1


async def test_later_batches_are_minted_above_the_floor_even_if_the_clock_is_slow(q: Queue) -> None:
    await q.store_raw(f"{MANIFEST}.floor", write_floor(Floor(floor_ms=T0 + 10_000, sealed_ms=-1)))
    producer = q.producer(flush_interval="1h")
    for _ in range(3):
        await producer.produce([b"a"])
        await producer.flush()
    names = [e.location.rpartition("/")[2] for e in (await q.manifest()).entries]
    assert all(ulid_ms(name.removesuffix(".batch")) > T0 + 10_000 for name in names)
    assert q.value("reupload_total") == 1


async def test_the_floor_is_read_again_when_the_epoch_changed(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    for _ in range(2):
        await producer.produce([b"a"])
        await producer.flush()
    assert q.store.count("get", f"{MANIFEST}.floor") == 1
    await q.consumer()
    await producer.produce([b"b"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(1)
    await flushing
    assert q.store.count("get", f"{MANIFEST}.floor") == 2


async def test_a_batch_that_waited_half_a_grace_period_is_stored_again(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "get" and key == MANIFEST else None
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await q.clock.advance(301)
    (orphan,) = await q.keys("ingest")
    gate.set()
    await flushing
    assert (await handle.watcher.await_durable()).location != orphan
    assert await records_of(q) == [[b"a"]]


# Many producers


async def test_eight_producers_with_two_hundred_appends_each_lose_nothing(q: Queue) -> None:
    producers = [q.producer(flush_interval="1h") for _ in range(8)]

    async def work(number: int, producer: Producer) -> list[tuple[int, int]]:
        done: list[tuple[int, int]] = []
        for turn in range(200):
            handle = await producer.produce([b"%d:%d" % (number, turn)])
            await producer.flush()
            sequence = (await handle.watcher.await_durable()).sequence
            assert sequence is not None
            done.append((sequence, turn))
        return done

    tasks = [asyncio.create_task(work(number, producer)) for number, producer in enumerate(producers)]
    while not all(task.done() for task in tasks):
        await q.clock.advance(0.5)
    told = {sequence: (n, turn) for n, task in enumerate(tasks) for sequence, turn in task.result()}
    assert sorted(told) == list(range(1600))
    stored = [batch[0] for batch in await records_of(q)]
    assert stored == [b"%d:%d" % told[sequence] for sequence in range(1600)]
    for number in range(8):
        assert [turn for n, turn in (told[s] for s in range(1600)) if n == number] == list(range(200))


# Metrics


async def test_a_flush_counts_its_records(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    await producer.produce([b"abc", b""], b"meta")
    await producer.produce([b"de"])
    await q.clock.advance(2)
    await producer.flush()
    (entry,) = (await q.manifest()).entries
    assert q.value("batches_flushed") == 1
    assert q.value("entries_flushed") == 3
    assert q.value("bytes_flushed") == 5
    assert q.value("bytes_written") == len(await q.raw(entry.location)) == 5 + 3 * 4 + 7
    assert q.value("queue_length") == 1
    assert q.value("manifest_bytes") == len(await q.raw())
    assert q.value("flush_duration_seconds") == 1
    assert q.value("append_group_size") == 1
    assert q.value("manifest_writes", role="producer") == 1
    assert q.value("manifest_conflicts", role="producer") == 0
    assert q.value("inflight_bytes") == 0
    assert q.value("oldest_unflushed_seconds") == 0
    text = q.registry.prometheus_text()
    assert "buffer_batches_flushed 1" in text
    assert 'buffer_manifest_writes{role="producer"} 1' in text


NAMES = [
    "batches_flushed",
    "entries_flushed",
    "bytes_flushed",
    "bytes_written",
    "batches_collected",
    "entries_collected",
    "bytes_collected",
    "acks",
    "descriptors_handed_out",
    "gc_files_deleted",
    "gc_files_failed",
    "manifest_writes",
    "manifest_conflicts",
    "queue_length",
    "consumer_lag_seconds",
    "flush_duration_seconds",
    "fetch_duration_seconds",
    "gc_duration_seconds",
    "manifest_bytes",
    "append_unknown_total",
    "inflight_bytes",
    "oldest_unflushed_seconds",
    "append_group_size",
    "gap_total",
    "duplicate_total",
]


@pytest.mark.parametrize("name", NAMES)
async def test_every_metric_exists_from_the_start(q: Queue, name: str) -> None:
    q.producer()
    assert f"buffer.{name}" in q.registry.snapshot()


# After a shutdown


def held_bytes(producer: Producer) -> int:
    return producer._admission.bytes_held


async def test_a_producer_that_is_shut_down_holds_nothing(q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "BATCH_WEIGHT_MAX", 30)
    producer = q.producer(flush_interval="1h", max_parallel_uploads=1)
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "put" else None
    handles = [await producer.produce([b"0123456789"]) for _ in range(4)]
    await turns()
    closing = asyncio.create_task(producer.close())
    await turns()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert not any(map(is_pending, handles))
    assert held_bytes(producer) == 0
    assert q.value("inflight_bytes") == 0


async def test_a_shutdown_that_is_cancelled_twice_still_settles_all_calls(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "put" else None
    handle = await producer.produce([b"a"])
    closing = asyncio.create_task(producer.close())
    await turns()
    closing.cancel()
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert not is_pending(handle)
    assert held_bytes(producer) == 0


async def test_after_a_defect_no_batch_reported_as_failed_is_appended(
    q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = q.producer(flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "put" else None
    handle = await producer.produce([b"a"])
    flushing = asyncio.create_task(producer.flush())
    await turns()

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(producer, "_take_waiting", broken)
    await producer.produce([b"b"])
    await turns()
    with pytest.raises(StorageError, match="internal error"):
        await flushing
    gate.set()
    await turns()
    with pytest.raises(StorageError, match="internal error"):
        await handle.watcher.await_durable()
    assert await q.sequences() == []
    assert held_bytes(producer) == 0


# Contention


class CountingStore(MemoryStore):
    """Counts the conditional reads of the manifest."""

    looks = 0

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        self.looks += 1
        return await super().get_if_changed(key, version)


async def append(producer: Producer) -> None:
    handle = await producer.produce([b"x"])
    await handle.watcher.await_durable()


async def test_after_a_conflict_appends_start_from_a_fresh_manifest_while_others_write() -> None:
    config = ProducerConfig(store=CountingStore(), flush_interval="0s")
    async with Producer(config) as one, Producer(config) as other:
        for _ in range(6):
            await append(one)
            await append(other)
        conflicts = [producer._appender.conflicts for producer in (one, other)]
    assert conflicts == [1, 1], "the first outdated manifest of each, and none after it"


async def test_a_producer_that_is_alone_again_appends_without_a_read() -> None:
    store = CountingStore()
    config = ProducerConfig(store=store, flush_interval="0s")
    async with Producer(config) as one, Producer(config) as other:
        for producer in (one, other, one):
            await append(producer)
        assert store.looks == 0
        for _ in range(10):
            await append(one)
    assert store.looks == CONTENDED_READS
