from __future__ import annotations

import asyncio
import random

import pytest
from tests.unit.buffer.doubles import MANIFEST, T0, Queue, once, turns

from penstock import errors
from penstock.buffer import (
    Consumer,
    FencedError,
    GarbageCollector,
    GarbageCollectorConfig,
    SerializationError,
)
from penstock.buffer import manifest as m
from penstock.buffer.gc import batch_minted_ms, candidates
from penstock.buffer.manifest import NewEntry
from penstock.buffer.side_objects import EPOCH_STRIDE, Floor, read_floor, write_floor
from penstock.ids import mint_ulid
from penstock.objects import ObjectInfo

GRACE_MS = 600_000
FLOOR = f"{MANIFEST}.floor"
RNG = random.Random(3)


def name(ms: int, folder: str = "ingest") -> str:
    return f"{folder}/{mint_ulid(ms, RNG)}.batch"


def found(listed: list[tuple[str, int]], referenced: list[str], now_ms: int = T0) -> list[str]:
    infos = [ObjectInfo(key=key, size=1, modified_ms=modified) for key, modified in listed]
    return [
        key for key, _ in candidates(infos, referenced, prefix="ingest", now_ms=now_ms, grace_ms=GRACE_MS)
    ]


OLD, OLDER, YOUNG = name(T0 - GRACE_MS), name(T0 - 2 * GRACE_MS), name(T0 - GRACE_MS + 1)


@pytest.mark.parametrize(
    ("listed", "referenced", "garbage"),
    [
        pytest.param([OLD], [OLD], [], id="referenced"),
        pytest.param([OLD], [], [OLD], id="empty manifest, exactly the grace period old"),
        pytest.param([YOUNG], [], [], id="young"),
        pytest.param([OLD, OLDER], [name(T0 - GRACE_MS - 1)], [OLDER], id="newer than the oldest entry"),
        pytest.param([OLD], [name(T0 - GRACE_MS)], [], id="as old as the oldest entry"),
        pytest.param([OLD], ["other/01/00000000000000ff"], [OLD], id="no entry tells its time"),
        pytest.param([OLDER], ["other/no-ulid", OLD], [OLDER], id="one entry tells its time"),
        pytest.param([name(T0 + 10**9)], [], [], id="from the future"),
        pytest.param([name(T0 - 2 * GRACE_MS, "ingest/eu")], [], [], id="of a queue in a folder below"),
        pytest.param([name(T0 - 2 * GRACE_MS, "ingest.shards/0001")], [], [], id="of a shard"),
    ],
)
def test_garbage_by_the_rules_of_the_format(
    listed: list[str], referenced: list[str], garbage: list[str]
) -> None:
    assert found([(key, 0) for key in listed], referenced) == garbage


def test_a_recently_stored_object_is_spared_regardless_of_its_name() -> None:
    assert found([(OLDER, T0 - GRACE_MS + 1)], []) == []
    assert found([(OLDER, T0 - GRACE_MS)], []) == [OLDER]


@pytest.mark.parametrize(
    "key",
    [
        "ingest/manifest",
        "ingest/manifest.floor",
        "ingest/01HF7YAT000000000000000001",
        "ingest/01HF7YAT000000000000000001.batch.tmp",
        "ingest/01HF7YAT00000000000000001.batch",
        "ingest/01HF7YAT00000000000000000U.batch",
        "ingest/81HF7YAT000000000000000001.batch",
        "ingest/.batch",
        "ingest/01HF7YAT000000000000000001/00000000000000ff",
    ],
)
def test_foreign_names_are_never_collected(key: str) -> None:
    assert batch_minted_ms(key) is None
    assert found([(key, 0)], [], now_ms=2**47) == []


def test_the_time_of_a_name_is_read_in_either_case() -> None:
    assert batch_minted_ms("a/b/01HF7YAT000000000000000001.batch") == T0
    assert batch_minted_ms("a/b/01hf7yat000000000000000001.batch") == T0


async def store_at(q: Queue, key: str, age_ms: int) -> str:
    """Return an object that was stored `age_ms` ago."""
    q.clock.jump_wall(-age_ms)
    await q.store_raw(key, b"data")
    q.clock.jump_wall(age_ms)
    return key


def standalone(q: Queue) -> GarbageCollector:
    return GarbageCollector(
        GarbageCollectorConfig(store=q.store), clock=q.clock, rng=q.rng, registry=q.registry
    )


async def orphan(q: Queue, age_ms: int = 2 * GRACE_MS) -> str:
    return await store_at(q, name(q.clock.now_ms() - age_ms), age_ms)


async def test_a_consumer_collects_orphans_and_spares_the_rest(q: Queue) -> None:
    garbage = await orphan(q)
    young = await orphan(q, GRACE_MS - 1)
    foreign = await store_at(q, "ingest/somebody-elses.batch", 10 * GRACE_MS)
    await q.fill(2)
    consumer = await q.consumer()
    report = await consumer.gc.collect()
    assert report.deleted == report.candidates == (garbage,)
    assert report.failed == report.withheld == ()
    keys = await q.keys("ingest")
    assert garbage not in keys
    assert {young, foreign} <= set(keys)
    assert q.value("gc_files_deleted") == 1
    assert q.value("gc_duration_seconds") == 1
    batches = [await consumer.next_batch() for _ in range(2)]
    assert [batch.entries for batch in batches if batch] == [[b"0"], [b"1"]]


async def test_dequeued_batches_become_garbage_after_the_grace_period(q: Queue) -> None:
    await q.fill(3)
    locations = [entry.location for entry in (await q.manifest()).entries]
    consumer = await q.consumer()
    await consumer.next_descriptors(3)
    await consumer.ack_through(1)
    assert (await consumer.gc.collect()).deleted == ()
    await q.clock.advance(601)
    assert (await consumer.gc.collect()).deleted == (), "not strictly older than what is still queued"
    await consumer.ack_through(2)
    assert sorted((await consumer.gc.collect()).deleted) == sorted(locations)


async def test_a_crash_between_storing_and_appending_leaves_a_collectable_orphan(q: Queue) -> None:
    producer = q.producer(flush_interval="1h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if key == MANIFEST else None
    await producer.produce([b"lost"])
    flushing = asyncio.create_task(producer.close())
    await turns()
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    gate.set()
    (left,) = await q.keys("ingest")
    consumer = await q.consumer()
    assert await consumer.next_batch() is None
    await q.clock.advance(601)
    assert (await consumer.gc.collect()).deleted == (left,)


async def test_a_dry_run_changes_nothing(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await q.consumer()
    before = {key: await q.raw(key) for key in await q.keys()}
    for collector in (consumer.gc, standalone(q)):
        report = await collector.collect(dry_run=True)
        assert (report.candidates, report.deleted) == ((garbage,), ())
    assert {key: await q.raw(key) for key in await q.keys()} == before
    assert consumer.epoch == 1


async def test_a_cycle_without_garbage_writes_nothing(q: Queue) -> None:
    consumer = await q.consumer()
    q.store.calls.clear()
    await consumer.gc.collect()
    assert [op for op, _ in q.store.calls] == ["get", "list"]


async def test_a_failed_delete_is_counted_and_tried_again(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await q.consumer()
    q.store.before = once(errors.PermissionDenied("no"), "delete")
    report = await consumer.gc.collect()
    assert (report.failed, report.deleted) == ((garbage,), ())
    assert q.value("gc_files_failed") == 1
    assert (await consumer.gc.collect()).deleted == (garbage,)


async def test_the_floor_is_published_before_the_epoch_and_the_delete_comes_last(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await q.consumer()
    q.store.calls.clear()
    await consumer.gc.collect()
    writes = [call for call in q.store.calls if call[0] in ("cas", "delete")]
    assert writes == [("cas", FLOOR), ("cas", MANIFEST), ("delete", garbage)]
    minted = batch_minted_ms(garbage)
    assert read_floor(await q.raw(FLOOR)).floor_ms == minted
    assert (await q.manifest()).footer.epoch == consumer.epoch == 1 + EPOCH_STRIDE


async def test_collecting_does_not_fence_the_consumer_itself(q: Queue) -> None:
    await q.fill(3)
    consumer = await q.consumer()
    assert (await consumer.next_batch()) is not None
    await orphan(q)
    await consumer.gc.collect()
    assert (await consumer.next_batch()) is not None
    await consumer.ack_through(1)
    assert await q.sequences() == [2]


async def test_a_fenced_consumer_collects_nothing(q: Queue) -> None:
    garbage = await orphan(q)
    old = await q.consumer()
    await q.consumer()
    collecting = asyncio.create_task(old.gc.collect())
    await q.clock.advance(1)
    with pytest.raises(FencedError):
        await collecting
    assert garbage in await q.keys()


async def test_batches_appended_while_the_floor_is_sealed_are_spared(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await q.consumer()
    appended = False

    def append_in_between(op: str, key: str) -> None:
        nonlocal appended
        if op == "cas" and key == MANIFEST and not appended:
            appended = True
            raw = q.store._entries[MANIFEST].data
            q.store._write(MANIFEST, m.append(raw, [NewEntry(location=garbage, metadata=[])]))

    q.store.before = append_in_between
    collecting = asyncio.create_task(consumer.gc.collect())
    await q.clock.advance(1)
    assert (await collecting).deleted == ()
    assert garbage in await q.keys()


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_seal_without_a_reply_keeps_the_ownership(q: Queue, lost: str) -> None:
    garbage = await orphan(q)
    await q.fill(1)
    consumer = await q.consumer(retry_deadline="1s")
    setattr(q.store, lost, once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST, skip=0))
    collecting = asyncio.create_task(consumer.gc.collect())
    await q.clock.advance(3)
    assert (await collecting).deleted == (garbage,)
    assert consumer.epoch == 1 + EPOCH_STRIDE
    assert (await consumer.next_batch()) is not None


async def test_a_seal_that_landed_after_the_deadline_is_recognised(q: Queue) -> None:
    garbage = await orphan(q)
    await q.fill(1)
    consumer = await q.consumer(retry_deadline="1s")
    q.store.after = once(errors.OutcomeUnknown("reply lost"), "cas", MANIFEST)
    gets = once(errors.Unavailable("away"), "get", MANIFEST, skip=1, times=10_000)
    q.store.before = gets
    collecting = asyncio.create_task(consumer.gc.collect())
    await q.clock.advance(3)
    with pytest.raises(errors.Unavailable):
        await collecting
    assert garbage in await q.keys(), "nothing is deleted on an unknown seal"
    q.store.before = lambda op, key: None
    assert (await consumer.next_batch()) is not None
    assert consumer.epoch == 1 + EPOCH_STRIDE
    assert (await consumer.gc.collect()).deleted == (garbage,)


async def test_a_standalone_collector_deletes_only_below_the_sealed_floor(q: Queue) -> None:
    below, above = await orphan(q, 4 * GRACE_MS), await orphan(q, 2 * GRACE_MS)
    minted = batch_minted_ms(below)
    assert minted is not None
    report = await standalone(q).collect()
    assert (report.deleted, set(report.withheld)) == ((), {below, above})
    await q.store_raw(FLOOR, write_floor(Floor(floor_ms=T0, sealed_ms=minted)))
    report = await standalone(q).collect()
    assert (report.deleted, report.withheld) == ((below,), (above,))
    assert await q.raw() == m.EMPTY_MANIFEST


async def test_a_standalone_collector_uses_the_floor_that_the_consumer_sealed(q: Queue) -> None:
    await orphan(q)
    consumer = await q.consumer()
    await consumer.gc.collect()
    late = await orphan(q, 3 * GRACE_MS)
    assert (await standalone(q).collect()).withheld == (late,)
    later = await orphan(q, GRACE_MS)
    await consumer.gc.collect()
    assert read_floor(await q.raw(FLOOR)).sealed_ms >= T0 - 2 * GRACE_MS
    assert later not in await q.keys()
    last = await orphan(q, 3 * GRACE_MS)
    assert (await standalone(q).collect()).deleted == (last,)


async def test_the_floor_is_never_lowered_by_a_collector(q: Queue) -> None:
    high = Floor(floor_ms=T0 + 5, sealed_ms=T0 + 3)
    await q.store_raw(FLOOR, write_floor(high))
    garbage = await orphan(q)
    consumer = await q.consumer()
    assert (await consumer.gc.collect()).deleted == (garbage,)
    assert read_floor(await q.raw(FLOOR)) == high


async def test_a_damaged_floor_or_manifest_stops_the_collector(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await q.consumer()
    await q.store_raw(FLOOR, b"{}")
    with pytest.raises(SerializationError):
        await consumer.gc.collect()
    await q.store_raw(MANIFEST, b"damaged")
    for collector in (consumer.gc, standalone(q)):
        with pytest.raises(SerializationError):
            await collector.collect()
    assert garbage in await q.keys()


async def started(q: Queue) -> Consumer:
    return await q.consumer(gc_enabled=True, gc_interval="5m")


async def test_the_first_cycle_runs_after_a_full_interval_and_errors_are_not_fatal(q: Queue) -> None:
    garbage = await orphan(q)
    await started(q)
    at_start = q.store.count("list")
    q.store.before = once(errors.PermissionDenied("no"), "list")
    await q.clock.advance(299)
    assert q.store.count("list") == at_start
    await q.clock.advance(1)
    assert q.store.count("list") == at_start + 1
    assert garbage in await q.keys()
    await q.clock.advance(300)
    assert garbage not in await q.keys()


async def test_a_fenced_collector_ends(q: Queue) -> None:
    await orphan(q)
    old = await started(q)
    await q.consumer()
    await q.clock.advance(301)
    assert old._gc_task is not None
    assert old._gc_task.done()
    assert old._gc_task.exception() is None


async def test_a_producer_stores_a_stalled_batch_again_after_the_collector_deleted_it(q: Queue) -> None:
    producer = q.producer(flush_interval="1h", append_deadline="10h")
    gate = asyncio.Event()
    q.store.gate = lambda op, key: gate if op == "get" and key == MANIFEST and not gate.is_set() else None
    handle = await producer.produce([b"slow"])
    flushing = asyncio.create_task(producer.flush())
    await turns()
    (stalled,) = await q.keys("ingest")
    q.store.gate = lambda op, key: None  # only the producer's own read hangs
    q.clock.jump_wall(2 * GRACE_MS)
    consumer = await q.consumer()
    assert (await consumer.gc.collect()).deleted == (stalled,)
    gate.set()
    await flushing
    assert (await handle.watcher.await_durable()).location != stalled
    batch = await consumer.next_batch()
    assert batch is not None
    assert batch.entries == [b"slow"]


async def test_an_unexpected_error_does_not_end_the_collector(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await started(q)

    def broken(op: str, key: str) -> None:
        if op == "list":
            raise OSError("a defect")

    q.store.before = broken
    await q.clock.advance(301)
    q.store.before = lambda op, key: None
    assert garbage in await q.keys()
    await q.clock.advance(300)
    assert garbage not in await q.keys()
    assert consumer._gc_task is not None


async def test_a_consumer_that_takes_the_queue_back_collects_again(q: Queue) -> None:
    garbage = await orphan(q)
    consumer = await started(q)
    await q.consumer()
    await q.clock.advance(301)
    taking_back = asyncio.create_task(consumer.initialize())
    await q.clock.advance(1)
    await taking_back
    assert garbage in await q.keys()
    await q.clock.advance(301)
    assert garbage not in await q.keys()


EU = {"data_path_prefix": "ingest/eu", "manifest_path": "ingest/eu/manifest"}


async def test_a_collector_spares_the_unread_batches_of_a_queue_below_its_prefix(q: Queue) -> None:
    await q.fill(3, **EU)
    own = await orphan(q)
    await q.clock.advance(3 * GRACE_MS / 1000)
    outer = await q.consumer()
    report = await outer.gc.collect()
    assert report.deleted == (own,)
    inner = await q.consumer(**EU)
    batches = [await inner.next_batch() for _ in range(3)]
    assert [batch.entries for batch in batches if batch] == [[b"0"], [b"1"], [b"2"]]


async def test_a_collector_beside_the_consumer_spares_a_queue_below_its_prefix_too(q: Queue) -> None:
    await q.fill(1, **EU)
    await orphan(q)
    await q.clock.advance(3 * GRACE_MS / 1000)
    await (await q.consumer()).gc.collect()
    assert (await standalone(q).collect()).candidates == ()
    assert len([key for key in await q.keys("ingest/eu") if key.endswith(".batch")]) == 1


async def test_the_inner_queue_still_collects_its_own_garbage(q: Queue) -> None:
    garbage = await store_at(q, name(q.clock.now_ms() - 2 * GRACE_MS, "ingest/eu"), 2 * GRACE_MS)
    outer = await orphan(q)
    report = await (await q.consumer(**EU)).gc.collect()
    assert report.deleted == (garbage,)
    assert outer in await q.keys("ingest")


@pytest.mark.parametrize("step_ms", [3_600_000, 86_400_000])
async def test_a_clock_set_forward_makes_no_batch_garbage_before_its_grace_period(step_ms: int) -> None:
    q = Queue()
    collector = standalone(q)
    key = name(q.clock.now_ms())
    await q.store_raw(key, b"data")
    q.clock.jump_wall(step_ms)
    assert (await collector.collect(dry_run=True)).candidates == ()
    await q.clock.advance(GRACE_MS / 1000)
    assert (await collector.collect(dry_run=True)).candidates == (key,)


async def test_a_clock_that_was_wrong_at_the_start_leaves_no_permanent_garbage() -> None:
    q = Queue()
    collector = standalone(q)
    q.clock.jump_wall(30 * 86_400_000)
    key = name(q.clock.now_ms())
    await q.store_raw(key, b"data")
    assert (await collector.collect(dry_run=True)).candidates == ()
    await q.clock.advance(GRACE_MS / 1000 + 1)
    assert (await collector.collect(dry_run=True)).candidates == (key,)


async def test_a_clock_set_back_delays_collection_by_at_most_the_step() -> None:
    q = Queue()
    collector = standalone(q)
    key = name(q.clock.now_ms())
    await q.store_raw(key, b"data")
    q.clock.jump_wall(-3_600_000)
    assert (await collector.collect(dry_run=True)).candidates == ()
    await q.clock.advance(3600 + GRACE_MS / 1000)
    assert (await collector.collect(dry_run=True)).candidates == (key,)
