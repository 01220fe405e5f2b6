"""Consumption into memory, compared with raw GETs of the same objects, and draining small batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.buffer import CompressionType, ConsumedBatch, Consumer, ConsumerConfig, manifest
from penstock.buffer.batch import encode_batch
from penstock.objects.local import LocalStore
from produce import IN_FLIGHT, prepare, put_objects
from records import MIB, array_of, calls_of
from rounds import Plan, Rates, interleave, scratch
from table import Row

__all__ = ["drain", "run"]

_MANIFEST = "ingest/manifest"
_NOTE = (
    f"objects of 64 MiB, uncompressed, in the page cache; next_batch with {IN_FLIGHT} fetches in flight, "
    "each batch converted and dropped; ceiling: store.get of the same objects in order, as many in "
    "flight; MB/s of record bytes"
)
_DRAIN_NOTE = (
    "batches of 10 records of 200 B, every batch acknowledged, a dequeue per 100 acks; fetches of "
    f"descriptors run {4 * IN_FLIGHT} at a time"
)


def run(plan: Plan) -> list[Row]:
    """Measure Arrow, Arrow view and lists, with records of 200 B and 1 KiB."""
    rows: list[Row] = []
    for size in (200, 1024):
        with scratch(plan) as root:
            rows += _rows(_consume(plan, root, size), size)
    return rows


def _consume(plan: Plan, root: Path, size: int) -> Rates:
    load = prepare(plan.pick(512, 256) * MIB, size, False, 0)
    keys = [f"ingest/{place:06d}" for place in range(len(load.objects))]
    asyncio.run(_fill(root, load.objects, keys))
    converts: dict[str, Callable[[ConsumedBatch], object]] = {
        "Arrow": ConsumedBatch.to_arrow,
        "Arrow view": ConsumedBatch.to_arrow_view,
        "list": lambda batch: batch.entries,
    }
    contenders: dict[str, Callable[[], float]] = {"raw": lambda: asyncio.run(_get_all(root, keys))}
    for name, convert in converts.items():
        contenders[name] = _bound(root, convert)
    return interleave(contenders, work=load.record_bytes / 1e6, rounds=plan.pick(5, 3))


def _bound(root: Path, convert: Callable[[ConsumedBatch], object]) -> Callable[[], float]:
    return lambda: asyncio.run(_read_all(root, convert))


async def _fill(root: Path, objects: list[bytes], keys: list[str]) -> None:
    store = LocalStore(root)
    await put_objects(store, objects, "ingest")
    await store.put(_MANIFEST, _queue_of(keys))
    await store.close()


def _queue_of(keys: list[str]) -> bytes:
    stamp = (manifest.Metadata(start_index=0, ingestion_time_ms=0),)
    return manifest.append(
        manifest.EMPTY_MANIFEST, [manifest.NewEntry(location=key, metadata=stamp) for key in keys]
    )


async def _get_all(root: Path, keys: list[str]) -> float:
    store = LocalStore(root)
    await store.get(_MANIFEST)  # the threads exist, as after a consumer has opened
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def fetch(key: str) -> None:
        async with slots:
            await store.get(key)

    began = time.perf_counter()
    await asyncio.gather(*(fetch(key) for key in keys))
    taken = time.perf_counter() - began
    await store.close()
    return taken


async def _read_all(root: Path, convert: Callable[[ConsumedBatch], object]) -> float:
    store = LocalStore(root)
    config = ConsumerConfig(store=store, gc_enabled=False, prefetch=IN_FLIGHT - 1)
    consumer = await Consumer.open(config)
    began = time.perf_counter()
    while (batch := await consumer.next_batch()) is not None:
        convert(batch)
    taken = time.perf_counter() - began
    await consumer.close()
    await store.close()
    return taken


def _rows(rates: Rates, size: int) -> list[Row]:
    name = "1 KiB" if size == 1024 else f"{size} B"
    bars = {"Arrow": 0.7, "Arrow view": 0.7}
    return [
        Row(
            section="3 consume",
            what=f"{kind}, {name}",
            ours=rates.median(kind),
            ceiling=rates.median("raw"),
            ratio=rates.ratio(kind, "raw"),
            against="store.get, same objects",
            unit="MB/s",
            bar=bars.get(kind),
            note=_NOTE,
        )
        for kind in ("Arrow", "Arrow view", "list")
    ]


def drain(plan: Plan) -> list[Row]:
    """Measure draining a backlog of many small batches."""
    count = plan.pick(10_000, 2_000)
    with scratch(plan) as root:
        queue = _small_batches(root, count)
        ways: dict[str, Callable[[Consumer], Awaitable[int]]] = {
            "next_batch + ack": _by_batch,
            "next_descriptors(100) + fetch + ack_through": _by_descriptors,
        }
        contenders = {name: _drained(root, queue, count, way) for name, way in ways.items()}
        rates = interleave(contenders, work=count, rounds=plan.pick(3, 1), warmups=0)
    return [
        Row(
            section="5 drain",
            what=f"{count:,} batches, {name}",
            ours=rates.median(name),
            unit="batches/s",
            note=_DRAIN_NOTE,
        )
        for name in ways
    ]


def _small_batches(root: Path, count: int) -> bytes:
    """Write plain files at their keys without a sync, because only reads are measured."""
    (root / "ingest").mkdir()
    calls = calls_of(array_of(2 * MIB, 200), 200, call_bytes=2000)
    bodies = [encode_batch([call], CompressionType.NONE).to_bytes() for call in calls]
    keys = [f"ingest/{place:06d}.batch" for place in range(count)]
    for place, key in enumerate(keys):
        (root / key).write_bytes(bodies[place % len(bodies)])
    return _queue_of(keys)


def _drained(
    root: Path, queue: bytes, count: int, way: Callable[[Consumer], Awaitable[int]]
) -> Callable[[], float]:
    async def measure() -> float:
        store = LocalStore(root)
        await store.delete_many([f"{_MANIFEST}.ledger"])
        await store.put(_MANIFEST, queue)
        consumer = await Consumer.open(ConsumerConfig(store=store, gc_enabled=False))
        began = time.perf_counter()
        drained = await way(consumer)
        taken = time.perf_counter() - began
        await consumer.close()
        await store.close()
        if drained != count:
            raise RuntimeError(f"drained {drained} of {count} batches")
        return taken

    return lambda: asyncio.run(measure())


async def _by_batch(consumer: Consumer) -> int:
    drained = 0
    while (batch := await consumer.next_batch()) is not None:
        await consumer.ack(batch.sequence)
        drained += 1
    return drained


async def _by_descriptors(consumer: Consumer) -> int:
    drained = 0
    slots = asyncio.Semaphore(4 * IN_FLIGHT)

    async def fetch(work: Awaitable[ConsumedBatch]) -> None:
        async with slots:
            await work

    while handed := await consumer.next_descriptors(100):
        await asyncio.gather(*(fetch(consumer.fetch_descriptor(one)) for one in handed))
        await consumer.ack_through(handed[-1].sequence)
        drained += len(handed)
    return drained
