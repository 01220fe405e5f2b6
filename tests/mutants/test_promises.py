"""One small test per promise that a known bug would break. `test_mutants.py` names them."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from penstock import errors
from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    FencedError,
    GarbageCollectorConfig,
    OutcomeUnknown,
    Producer,
    ProducerConfig,
    StaleTransaction,
    StorageError,
    Transaction,
    append_batches,
    consumer,
    manifest,
    store_batch,
)
from penstock.buffer.batch import decode_batch
from penstock.buffer.gc import GarbageCollector, batch_minted_ms, candidates
from penstock.buffer.side_objects import NO_FLOOR, Floor, read_dequeued_log, read_floor, write_floor
from penstock.buffer.transactions import merge_versions, read_transaction_log
from penstock.clock import SYSTEM_CLOCK
from penstock.codec import decompress, index_block, length_table
from penstock.ids import mint_ulid
from penstock.objects import Blob, MemoryStore, ObjectInfo, Version
from penstock.objects.directory import ObjectDirectory
from penstock.objects.errors import FailedRequest, Fault, translate
from penstock.objects.store import ByteRange, Data
from penstock.storage.fs import OsFileSystem
from penstock.testing.clock import ManualClock

MANIFEST = "ingest/manifest"
GRACE_S = 600.0
Hook = Callable[[str, str], Awaitable[None]]


async def _nothing(op: str, key: str) -> None:
    """The hook of a store that behaves."""


class HookedStore(MemoryStore):
    """A store in memory with something to do before and after each call."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.before: Hook = _nothing
        self.after: Hook = _nothing

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        await self.before("get", key)
        return await super().get(key, byte_range)

    async def put(self, key: str, data: Data) -> Version:
        await self.before("put", key)
        return await super().put(key, data)

    async def put_if_absent(self, key: str, data: Data) -> Version:
        await self.before("write", key)
        version = await super().put_if_absent(key, data)
        await self.after("write", key)
        return version

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        await self.before("write", key)
        version = await super().put_if_match(key, data, version)
        await self.after("write", key)
        return version

    async def entries(self) -> tuple[manifest.Entry, ...]:
        return manifest.decode_manifest(bytes((await MemoryStore.get(self, MANIFEST)).data)).entries


def once(action: Callable[[], Awaitable[None]], *, op: str = "write", key: str = MANIFEST) -> Hook:
    """A hook that acts at the first call it fits, and never again."""
    done = False

    async def hook(called: str, on: str) -> None:
        nonlocal done
        if not done and called == op and on == key:
            done = True
            await action()

    return hook


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> HookedStore:
    return HookedStore(clock)


def make_producer(store: HookedStore, clock: object, **settings: object) -> Producer:
    # Small batches and one after the other, unless a test says otherwise.
    config = ProducerConfig(store=store, **{"flush_size_bytes": 1, "append_deadline": "1h", **settings})
    return Producer(config, clock, rng=random.Random(1))


async def make_consumer(store: HookedStore, clock: ManualClock, last_acked: int | None = None) -> Consumer:
    config = ConsumerConfig(store=store, gc_enabled=False, gc_grace_period=GRACE_S, prefetch=0)
    return await Consumer.open(config, last_acked, clock=clock, rng=random.Random(2))


def collector_after_grace(store: HookedStore, clock: ManualClock, reader: Consumer) -> GarbageCollector:
    """The consumer's collector when the grace period has passed: one that ran through it, as it sees time."""
    clock.jump_wall(int(GRACE_S * 1000) + 1)
    config = GarbageCollectorConfig(store=store, gc_grace_period=GRACE_S)
    return GarbageCollector(config, queue=reader.gc._queue, store=store, clock=clock)


async def produce(producer: Producer, *bodies: bytes) -> None:
    for body in bodies:
        await (await producer.produce([body])).watcher.await_durable()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def advancing(clock: ManualClock, work: Awaitable[None]) -> None:
    """Let time pass until the work is done: it may back off and retry."""
    task = asyncio.ensure_future(work)
    for _ in range(2000):
        await clock.advance(0.05)
        if task.done():
            break
    assert task.done(), "the work did not finish"
    await task


# Publishing: data, then reference, then ack


async def test_an_ack_comes_after_the_manifest_write(store: HookedStore, clock: ManualClock) -> None:
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    store.before = once(wait)
    producer = make_producer(store, clock)
    handle = await producer.produce([b"x"])
    await turns()
    assert handle.watcher.result() is None
    gate.set()
    await handle.watcher.await_durable()
    assert len(await store.entries()) == 1
    await producer.close()


async def test_the_data_is_stored_before_it_is_referenced(store: HookedStore, clock: ManualClock) -> None:
    gate = asyncio.Event()
    seen: list[str] = []

    async def hold_data(op: str, key: str) -> None:
        seen.append(key)
        if op == "put" and key.endswith(".batch"):
            await gate.wait()

    store.before = hold_data
    producer = make_producer(store, clock)
    handle = await producer.produce([b"x"])
    await turns()
    assert MANIFEST not in seen
    gate.set()
    await handle.watcher.await_durable()
    await producer.close()


async def lose_the_answer() -> None:
    raise errors.OutcomeUnknown("the answer was lost")


async def test_a_lost_answer_does_not_append_twice(store: HookedStore, clock: ManualClock) -> None:
    producer = make_producer(store, clock)
    store.after = once(lose_the_answer)
    await advancing(clock, produce(producer, b"x"))
    assert len(await store.entries()) == 1
    await producer.close()


async def test_a_conflict_with_oneself_does_not_append_twice(store: HookedStore, clock: ManualClock) -> None:
    async def conflict() -> None:
        raise errors.Conflict("a hidden retry met its own first attempt")

    producer = make_producer(store, clock)
    store.after = once(conflict)
    await advancing(clock, produce(producer, b"x"))
    assert len(await store.entries()) == 1
    await producer.close()


async def _consume_all(store: HookedStore, clock: ManualClock) -> None:
    reader = await make_consumer(store, clock)
    while (batch := await reader.next_batch()) is not None:
        await reader.ack(batch.sequence)
    await reader.close()


async def test_an_append_that_was_dequeued_before_the_second_look_is_found_in_the_ledger(
    store: HookedStore, clock: ManualClock
) -> None:
    async def consume_then_lose() -> None:
        await _consume_all(store, clock)
        await lose_the_answer()

    producer = make_producer(store, clock)
    store.after = once(consume_then_lose)
    await advancing(clock, produce(producer, b"x"))
    footer = manifest.read_footer(bytes((await store.get(MANIFEST)).data))
    assert (footer.entry_count, footer.next_sequence) == (0, 1), "it was appended once, and consumed"
    await producer.close()


async def test_without_a_ledger_a_dequeued_append_is_unknown_and_not_repeated(
    store: HookedStore, clock: ManualClock
) -> None:
    async def consume_forget_lose() -> None:
        await _consume_all(store, clock)
        await store.delete_many([f"{MANIFEST}.ledger"])
        await lose_the_answer()

    producer = make_producer(store, clock)
    store.after = once(consume_forget_lose)
    with pytest.raises(OutcomeUnknown):
        await advancing(clock, produce(producer, b"x"))
    assert await store.entries() == ()
    await producer.close()


async def test_the_ledger_knows_an_entry_before_it_leaves_the_queue(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x")
    reader = await make_consumer(store, clock)
    batch = await reader.next_batch()
    assert batch is not None
    await reader.ack(batch.sequence)
    known: list[dict[int, str]] = []

    async def look() -> None:
        known.append(read_dequeued_log(bytes((await store.get(f"{MANIFEST}.ledger")).data)))

    store.before = once(look)
    await reader.flush()
    assert known == [{0: batch.location}]
    await producer.close()
    await reader.close()


async def test_batches_are_queued_in_the_order_of_their_calls(store: HookedStore, clock: ManualClock) -> None:
    gate = asyncio.Event()
    uploads = itertools.count()

    async def hold_the_first(op: str, key: str) -> None:
        if op == "put" and key.endswith(".batch") and next(uploads) == 0:
            await gate.wait()

    store.before = hold_the_first
    producer = make_producer(store, clock)
    handles = [await producer.produce([body]) for body in (b"first", b"second")]
    await turns()
    with pytest.raises(errors.NotFound):
        await store.get(MANIFEST)
    gate.set()
    outcomes = [await handle.watcher.await_durable() for handle in handles]
    assert [outcome.sequence for outcome in outcomes] == [0, 1]
    await producer.close()


async def test_a_queue_that_never_runs_empty_does_not_starve_the_flush_interval(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock, flush_size_bytes="1MiB", flush_interval="100ms")
    for n in range(100):
        await producer.produce([b"%d" % n])
        await clock.advance(0.01)
    await turns()
    assert len(await store.entries()) > 5
    await producer.close()


async def test_calls_that_waited_longer_than_the_flush_interval_share_a_batch(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock, flush_size_bytes="1MiB", flush_interval="100ms")
    for n in range(500):
        await producer.produce([b"%d" % n])
    await clock.advance(0.15)
    await clock.advance(0.1)
    await turns()
    assert len(await store.entries()) == 1
    await producer.close()


async def test_calls_that_waited_for_an_upload_share_a_batch(store: HookedStore, clock: ManualClock) -> None:
    gate = asyncio.Event()

    async def stall(op: str, key: str) -> None:
        if op == "put" and key.endswith(".batch"):
            await gate.wait()

    store.before = stall
    producer = make_producer(
        store, clock, flush_size_bytes="1MiB", flush_interval="100ms", max_parallel_uploads=1
    )
    for n in range(300):
        await producer.produce([b"%d" % n])
        await clock.advance(0.01)
    gate.set()
    await producer.flush()
    counts = [len(entry.metadata) for entry in await store.entries()]
    assert sum(counts) == 300
    assert len(counts) <= 3
    await producer.close()


async def _foreign_consumer(store: HookedStore) -> list[str]:
    """Dequeue everything as another implementation does: the format alone, no ledger, no floor, no book."""
    blob = await MemoryStore.get(store, MANIFEST)
    raw = bytes(blob.data)
    taken = [entry.location for entry in manifest.decode_manifest(raw).entries]
    last = manifest.read_footer(raw).next_sequence - 1
    await MemoryStore.put_if_match(store, MANIFEST, manifest.dequeue(raw, last), blob.version)
    return taken


async def test_a_definite_conflict_is_no_unknown_outcome_under_a_foreign_consumer(
    store: HookedStore, clock: ManualClock
) -> None:
    consumed: list[str] = []
    config = ProducerConfig(store=store, flush_interval="1h")
    first, second = (Producer(config, clock, rng=random.Random(seed)) for seed in (1, 2))

    async def work(producer: Producer, name: str) -> None:
        for n in range(40):
            handle = await producer.produce([f"{name}{n}".encode()])
            await producer.flush()
            await handle.watcher.await_durable()

    async def dequeue_after_every_batch(op: str, key: str) -> None:
        if key == MANIFEST:
            consumed.extend(await _foreign_consumer(store))

    store.after = dequeue_after_every_batch
    both = asyncio.gather(work(first, "a"), work(second, "b"))
    while not both.done():
        await clock.advance(0.05)
    await both
    assert first.conflict_rate() + second.conflict_rate() > 0
    blobs = [await MemoryStore.get(store, location) for location in consumed]
    records = sorted(record for blob in blobs for record in decode_batch(blob.data).to_list())
    assert records == sorted(f"{name}{n}".encode() for name in "ab" for n in range(40))
    await asyncio.gather(first.close(), second.close())


async def test_a_full_producer_holds_back_its_callers(store: HookedStore, clock: ManualClock) -> None:
    gate = asyncio.Event()

    async def hold(op: str, key: str) -> None:
        if op == "put":
            await gate.wait()

    store.before = hold
    producer = make_producer(store, clock, max_inflight_bytes=4000)
    calls = [asyncio.ensure_future(producer.produce([b"x" * 500])) for _ in range(20)]
    await turns()
    assert sum(call.done() for call in calls) <= 4
    gate.set()
    await asyncio.gather(*calls)
    await producer.close()


# Consuming: deliver, then dequeue; one owner


async def test_what_was_delivered_and_not_acknowledged_comes_again(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x", b"y")
    for _ in range(2):
        reader = await make_consumer(store, clock)
        first, second = await reader.next_batch(), await reader.next_batch()
        assert first is not None
        assert second is not None
        assert (first.entries, second.entries) == ([b"x"], [b"y"])
        await reader.close()
    await producer.close()


async def test_a_failed_fetch_delivers_the_same_batch_again(store: HookedStore, clock: ManualClock) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x", b"y")
    reader = await make_consumer(store, clock)

    async def deny() -> None:
        raise errors.PermissionDenied("not now")

    store.before = once(deny, op="get", key=(await store.entries())[0].location)
    with pytest.raises(StorageError):
        await reader.next_batch()
    batch = await reader.next_batch()
    assert batch is not None
    assert batch.sequence == 0
    await reader.ack(0)
    await producer.close()
    await reader.close()


async def test_a_superseded_consumer_cannot_dequeue(store: HookedStore, clock: ManualClock) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x")
    old = await make_consumer(store, clock)
    batch = await old.next_batch()
    assert batch is not None
    await old.ack(batch.sequence)
    new = await make_consumer(store, clock)
    with pytest.raises(FencedError):
        await advancing(clock, old.flush())
    assert len(await store.entries()) == 1
    await old.release()
    await producer.close()
    await new.close()


async def test_a_superseded_consumer_cannot_make_the_ledger_forget(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x", b"y")
    old = await make_consumer(store, clock)
    batch = await old.next_batch()
    assert batch is not None
    await old.ack(batch.sequence)
    await _consume_all(store, clock)
    with pytest.raises(FencedError):
        await advancing(clock, old.flush())
    known = read_dequeued_log(bytes((await store.get(f"{MANIFEST}.ledger")).data))
    assert sorted(known) == [0, 1], "what the successor dequeued is still known"
    await old.release()
    await producer.close()


async def test_a_superseded_consumer_is_given_nothing(store: HookedStore, clock: ManualClock) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x")
    old = await make_consumer(store, clock)
    new = await make_consumer(store, clock)
    with pytest.raises(FencedError):
        await old.next_batch()
    await old.release()
    await producer.close()
    await new.close()


async def test_an_ack_whose_dequeue_failed_can_be_repeated(
    store: HookedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "ACKS_PER_DEQUEUE", 1)
    producer = make_producer(store, clock)
    await produce(producer, b"x")
    reader = await make_consumer(store, clock)
    batch = await reader.next_batch()
    assert batch is not None

    async def deny() -> None:
        raise errors.PermissionDenied("not now")

    store.before = once(deny)
    with pytest.raises(StorageError):
        await reader.ack(batch.sequence)
    await reader.ack(batch.sequence)
    assert await store.entries() == ()
    await producer.close()
    await reader.close()


async def test_a_resumed_consumer_starts_behind_what_was_acknowledged(
    store: HookedStore, clock: ManualClock
) -> None:
    producer = make_producer(store, clock)
    await produce(producer, b"x", b"y")
    reader = await make_consumer(store, clock, last_acked=0)
    batch = await reader.next_batch()
    assert batch is not None
    assert batch.entries == [b"y"]
    assert len(await store.entries()) == 1
    await producer.close()
    await reader.close()


# Collecting garbage


async def _everything_referenced_exists(store: HookedStore) -> None:
    for entry in await store.entries():
        await store.get(entry.location)


async def test_a_batch_that_could_not_be_stored_anew_is_never_referenced(store: HookedStore) -> None:
    """Its first name is below the floor; storing it under another fails until the deadline."""
    far = SYSTEM_CLOCK.now_ms() + 3_600_000
    await store.put(f"{MANIFEST}.floor", write_floor(Floor(floor_ms=far, sealed_ms=far)))
    stored: list[str] = []

    async def only_the_first(op: str, key: str) -> None:
        if op == "put" and key.endswith(".batch"):
            stored.append(key)
            if len(stored) > 1:
                raise errors.Unavailable("the store is away")

    store.before = only_the_first
    producer = make_producer(store, SYSTEM_CLOCK, flush_interval="1ms", append_deadline="300ms")
    handle = await producer.produce([b"a"])
    with pytest.raises(StorageError):
        await handle.watcher.await_durable()
    with pytest.raises(errors.NotFound):
        await store.get(MANIFEST)  # nothing was appended
    await producer.close()


async def test_a_batch_whose_producer_stalled_past_the_grace_period_is_not_lost(
    store: HookedStore, clock: ManualClock
) -> None:
    reader = await make_consumer(store, clock)
    producer = make_producer(store, clock)

    async def stall() -> None:
        report = await collector_after_grace(store, clock, reader).collect()
        assert report.deleted

    store.before = once(stall)
    await advancing(clock, produce(producer, b"stalled"))
    assert len(await store.entries()) == 1
    await _everything_referenced_exists(store)
    await producer.close()
    await reader.close()


async def test_a_producer_whose_clock_is_behind_names_its_batches_above_the_floor(
    store: HookedStore, clock: ManualClock
) -> None:
    reader = await make_consumer(store, clock)
    late = ManualClock()
    late.jump_wall(-3_600_000)
    producer = make_producer(store, late)

    async def collect() -> None:
        ulid = mint_ulid(clock.now_ms(), random.Random(3))
        await store.put(f"ingest/{ulid}.batch", b"orphan")
        assert (await collector_after_grace(store, clock, reader).collect()).deleted

    store.before = once(collect)
    await advancing(late, produce(producer, b"x"))
    floor = read_floor(bytes((await store.get(f"{MANIFEST}.floor")).data))
    (entry,) = await store.entries()
    assert (batch_minted_ms(entry.location) or 0) > floor.floor_ms
    await _everything_referenced_exists(store)
    await producer.close()
    await reader.close()


async def test_a_batch_appended_just_before_the_seal_is_spared(
    store: HookedStore, clock: ManualClock
) -> None:
    reader = await make_consumer(store, clock)
    minted = mint_ulid(clock.now_ms(), random.Random(3))
    location = f"ingest/{minted}.batch"
    await store.put(location, b"\x00\x00\x00\x00\x00\x01\x00")
    await clock.advance(GRACE_S + 1)

    async def append() -> None:
        blob = await MemoryStore.get(store, MANIFEST)
        assert blob.version is not None
        raw = manifest.append(bytes(blob.data), [manifest.NewEntry(location=location, metadata=())])
        await MemoryStore.put_if_match(store, MANIFEST, raw, blob.version)

    store.before = once(append)
    collected = asyncio.ensure_future(reader.gc.collect())
    await advancing(clock, asyncio.wait([collected]))
    assert (await collected).deleted == ()
    await _everything_referenced_exists(store)
    await reader.close()


def _listed(*minted_ms: int) -> list[ObjectInfo]:
    rng = random.Random(4)
    return [ObjectInfo(key=f"ingest/{mint_ulid(ms, rng)}.batch", size=1, modified_ms=ms) for ms in minted_ms]


def test_a_young_batch_is_not_garbage() -> None:
    listed = _listed(1_000_000)
    assert candidates(listed, [], prefix="ingest", now_ms=1_599_999, grace_ms=600_000) == []
    assert len(candidates(listed, [], prefix="ingest", now_ms=1_600_000, grace_ms=600_000)) == 1


def test_a_batch_not_older_than_the_oldest_entry_is_not_garbage() -> None:
    older, oldest, newer = _listed(1_000, 2_000, 3_000)
    found = candidates([older, oldest, newer], [oldest.key], prefix="ingest", now_ms=10_000_000, grace_ms=1)
    assert found == [(older.key, 1_000)]


async def test_a_queue_below_the_prefix_keeps_its_unread_batches(
    store: HookedStore, clock: ManualClock
) -> None:
    paths = {"data_path_prefix": "ingest/eu", "manifest_path": "ingest/eu/manifest"}
    async with make_producer(store, clock, **paths) as inner:
        await produce(inner, b"inner")
    await clock.advance(3 * GRACE_S)
    outer = await make_consumer(store, clock)
    report = await outer.gc.collect()
    await outer.release()
    assert report.deleted == ()
    raw = bytes((await store.get("ingest/eu/manifest")).data)
    (entry,) = manifest.decode_manifest(raw).entries
    assert await store.head(entry.location)


def test_a_referenced_batch_is_not_garbage_whatever_its_age() -> None:
    only, foreign = _listed(1_000)[0], "ingest/01HF7YAT000000000000000001/00000000000000ff"
    assert candidates([only], [only.key, foreign], prefix="ingest", now_ms=10_000_000, grace_ms=1) == []


def test_the_floor_is_never_lowered() -> None:
    floor = NO_FLOOR.raised(10, 5).raised(3, 2)
    assert (floor.floor_ms, floor.sealed_ms) == (10, 5)


# Stores and codecs


def _directory(root: Path, fs: OsFileSystem | None = None) -> ObjectDirectory:
    return ObjectDirectory(str(root), fs=fs or OsFileSystem(), clock=SYSTEM_CLOCK)


def test_a_stale_version_does_not_replace_a_file(tmp_path: Path) -> None:
    directory = _directory(tmp_path)
    stale = directory.put("m", b"1")
    directory.put("m", b"2")
    with pytest.raises(errors.Conflict):
        directory.put_if_match("m", b"3", stale)
    assert bytes(directory.get("m").data) == b"2"


def test_two_writers_of_one_file_cannot_both_replace_the_same_version(tmp_path: Path) -> None:
    version = _directory(tmp_path).put("m", b"1")
    results: list[str] = []

    def write(directory: ObjectDirectory, data: bytes) -> None:
        try:
            directory.put_if_match("m", data, version)
        except errors.Conflict:
            results.append("lost")
        else:
            results.append("won")

    rival = threading.Thread(target=write, args=(_directory(tmp_path), b"rival"))

    class Interrupted(OsFileSystem):
        """Between reading the old bytes and replacing them, a rival tries the same."""

        def read(self, path: str, start: int | None = 0, length: int | None = None) -> bytes:
            data = super().read(path, start, length)
            rival.start()
            rival.join(0.3)
            return data

    write(_directory(tmp_path, Interrupted()), b"mine")
    rival.join()
    assert sorted(results) == ["lost", "won"]


@pytest.mark.parametrize("status", [500, 503, None])
def test_a_conditional_write_without_a_definite_answer_is_unknown(status: int | None) -> None:
    call = FailedRequest(doing="replace", url="s3://b", bucket="b", key="m", conditional=True)
    assert isinstance(translate(Fault(kind="GenericError", status=status), call), errors.OutcomeUnknown)


def _undeclared(data: bytes) -> memoryview:
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return memoryview(stream.compress(data) + stream.flush())


@pytest.mark.parametrize(
    "frame", [memoryview(zstandard.compress(b"0" * 100_000)), _undeclared(b"0" * 100_000)]
)
def test_a_frame_cannot_grow_beyond_the_cap(frame: memoryview) -> None:
    with pytest.raises(errors.LimitExceeded):
        decompress(frame, bytes_max=10_000)


def _block(records: Iterable[bytes]) -> bytes:
    return b"".join(len(record).to_bytes(4, "little") + record for record in records)


def test_a_wrong_length_table_does_not_move_the_records() -> None:
    records = [b"r" * (n % 7) for n in range(100)]
    lengths = np.array([len(record) for record in records], "<u4")
    lengths[[1, 2]] = lengths[[2, 1]]
    block = index_block(pa.py_buffer(_block(records) + length_table(lengths)), len(records))
    assert block.to_list() == records


def test_a_damaged_footer_is_not_a_manifest() -> None:
    raw = manifest.append(manifest.EMPTY_MANIFEST, [manifest.NewEntry(location="ingest/x", metadata=())])
    for cut in range(len(raw)):
        with pytest.raises(errors.Corrupt):
            manifest.decode_manifest(raw[:cut])


def test_a_hole_in_the_numbering_is_not_a_manifest() -> None:
    item = manifest.NewEntry(location="ingest/x", metadata=())
    raw = manifest.encode_entry(1, item) + manifest.encode_entry(3, item)
    with pytest.raises(errors.Corrupt):
        manifest.decode_manifest(raw + manifest.Footer(entry_count=2, next_sequence=3, epoch=0).pack())


# Transactions


BOOK = f"{MANIFEST}.txn"
RUNS = itertools.count()


class DiedError(Exception):
    """Stands for a process that is killed at this very call."""


async def die() -> None:
    raise DiedError


async def append_under(store: HookedStore, clock: ManualClock, version: int, *bodies: bytes) -> bool:
    """A run of one version, with an object of its own; True if it had been committed before."""
    rng = random.Random(next(RUNS))
    stored = await store_batch(store, "ingest", [*bodies], clock=clock, rng=rng)
    config = ProducerConfig(store=store, append_deadline="1h")
    transaction = Transaction(app="query", version=version)
    return (await append_batches(config, [stored], transaction, clock=clock, rng=rng)).repeated


async def test_a_transaction_is_known_when_its_entries_have_left_the_queue(
    store: HookedStore, clock: ManualClock
) -> None:
    store.before = once(die, key=BOOK)
    with pytest.raises(DiedError):
        await append_under(store, clock, 7, b"a")
    queue = await make_consumer(store, clock)
    await queue.ack_through(0)
    assert await append_under(store, clock, 7, b"a")
    assert await store.entries() == ()


async def test_the_book_knows_a_transaction_before_its_entries_leave_the_queue(
    store: HookedStore, clock: ManualClock
) -> None:
    store.before = once(die, key=BOOK)
    with pytest.raises(DiedError):
        await append_under(store, clock, 7, b"a")
    queue = await make_consumer(store, clock)
    store.before = once(die)
    with pytest.raises(DiedError):
        await queue.ack_through(0)
    assert read_transaction_log(bytes((await MemoryStore.get(store, BOOK)).data)) == {"query": 7}


async def test_two_runs_of_one_version_at_the_same_moment_append_once(
    store: HookedStore, clock: ManualClock
) -> None:
    async def overtake() -> None:
        assert not await append_under(store, clock, 7, b"a")

    store.before = once(overtake)
    running = asyncio.ensure_future(append_under(store, clock, 7, b"a"))
    await clock.advance(10)
    assert await running
    assert len(await store.entries()) == 1


async def test_a_version_below_the_last_is_refused(store: HookedStore, clock: ManualClock) -> None:
    await append_under(store, clock, 7, b"a")
    with pytest.raises(StaleTransaction, match="committed version 7"):
        await append_under(store, clock, 6, b"b")
    assert len(await store.entries()) == 1


async def test_a_stored_batch_at_the_floor_is_copied_before_it_is_referenced(
    store: HookedStore, clock: ManualClock
) -> None:
    stored = await store_batch(store, "ingest", [b"a"], clock=clock)
    floor = Floor(floor_ms=stored.minted_ms, sealed_ms=-1)
    await MemoryStore.put(store, f"{MANIFEST}.floor", write_floor(floor))
    await append_batches(ProducerConfig(store=store), [stored], clock=clock)
    (entry,) = await store.entries()
    minted_ms = batch_minted_ms(entry.location)
    assert minted_ms is not None
    assert minted_ms > stored.minted_ms
    copy = await MemoryStore.get(store, entry.location)
    assert copy.data == (await MemoryStore.get(store, stored.location)).data


def test_the_book_is_never_lowered() -> None:
    assert merge_versions({"a": 5}, {"a": 4}) is None
    assert merge_versions({"a": 5, "b": 1}, {"a": 6, "b": 0}) == {"b": 1, "a": 6}


async def test_looking_ahead_decodes_each_entry_once(
    store: HookedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make_producer(store, clock)
    for n in range(12):
        await producer.produce([b"%d" % n])
        await producer.flush()
    await producer.close()
    decoded: list[int] = []
    read_entry = manifest._read_entry

    def counting(raw: bytes, start: int, end: int) -> manifest.Entry:
        entry = read_entry(raw, start, end)
        decoded.append(entry.sequence)
        return entry

    monkeypatch.setattr(manifest, "_read_entry", counting)
    config = ConsumerConfig(store=store, gc_enabled=False, prefetch=4)
    async with await Consumer.open(config, clock=clock) as consumer:
        while (batch := await consumer.next_batch()) is not None:
            await consumer.ack(batch.sequence)
    assert decoded == list(range(12))


async def test_a_lost_reply_stays_unknown_next_to_definite_conflicts_and_is_not_repeated(
    store: HookedStore, clock: ManualClock
) -> None:
    consumed: list[str] = []
    producer = Producer(ProducerConfig(store=store, flush_interval="1h"), clock, rng=random.Random(1))
    await producer.produce([b"first"])
    await producer.flush()
    consumed.extend(await _foreign_consumer(store))
    writes = 0

    async def another_writer_wins_twice(op: str, key: str) -> None:
        nonlocal writes
        if key == MANIFEST and op == "write":
            writes += 1
            if writes <= 2:
                blob = await MemoryStore.get(store, MANIFEST)
                epoch = manifest.read_footer(bytes(blob.data)).epoch
                raw = manifest.set_epoch(bytes(blob.data), epoch + 1)
                await MemoryStore.put_if_match(store, MANIFEST, raw, blob.version)

    async def lose_the_reply(op: str, key: str) -> None:
        if key == MANIFEST and op == "write" and writes == 3:
            consumed.extend(await _foreign_consumer(store))
            raise errors.OutcomeUnknown("the connection was closed before the reply")

    store.before, store.after = another_writer_wins_twice, lose_the_reply
    await producer.produce([b"doubtful"])
    flushing = asyncio.ensure_future(producer.flush())
    while not flushing.done():
        await clock.advance(0.05)
    with pytest.raises(OutcomeUnknown):
        await flushing
    assert writes == 3
    await producer.produce([b"next"])
    flushing = asyncio.ensure_future(producer.flush())
    while not flushing.done():
        await clock.advance(0.05)
    await flushing
    consumed.extend(await _foreign_consumer(store))
    blobs = [await MemoryStore.get(store, location) for location in consumed]
    records = [record for blob in blobs for record in decode_batch(blob.data).to_list()]
    assert records == [b"first", b"doubtful", b"next"]
    await producer.close()
