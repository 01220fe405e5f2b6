"""Production from memory to durable and queued, compared with plain objects of the same bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from crew import Crew
from penstock.buffer import CompressionType, Producer, ProducerConfig
from penstock.buffer.batch import encode_batch
from penstock.codec import record_bytes
from penstock.objects.local import LocalStore
from records import MIB, array_of, calls_of
from rounds import Plan, Rates, interleave, scratch
from table import Row

__all__ = ["FLUSH_BYTES", "IN_FLIGHT", "run"]

FLUSH_BYTES = 64 * MIB  # the default of a producer
IN_FLIGHT = 4  # also the default: parallel uploads
BARS = {"Arrow": 0.7, "list": 0.4}

_NOTE = (
    f"local directory, durable on return; calls of 1 MiB, flush size {FLUSH_BYTES // MIB} MiB, "
    f"{IN_FLIGHT} uploads in flight per producer, from the first call until flush() returns; ceiling: "
    "store.put of the very objects a producer would store (for zstd: compressed beforehand), as many in "
    "flight; MB/s of record bytes; data prepared beforehand"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The data of one producer, in each form."""

    arrays: list[pa.BinaryArray]
    lists: list[list[bytes]]
    objects: list[bytes]
    record_bytes: int


def run(plan: Plan) -> list[Row]:
    """Measure record size x producers (tasks of one process, then processes) x input x compression."""
    rows: list[Row] = []
    for size in (200, 1024):
        for zstd in (False, True):
            for producers in (1, 4):
                if plan.quick and zstd and producers == 4:
                    continue
                total = (plan.pick(128, 64) if zstd else plan.pick(1024, 256)) * MIB
                loads = [prepare(total // producers, size, zstd, seed) for seed in range(producers)]
                rates = _tasks(plan, loads, zstd)
                rows += _rows(rates, size, zstd, "1 producer" if producers == 1 else "4 producers (tasks)")
        if not plan.quick:
            rows += _rows(_processes(plan, 128 * MIB, size), size, False, "4 producers (processes)")
    return rows


def prepare(total: int, size: int, zstd: bool, seed: int) -> Load:
    """Return `total` bytes of records as calls, and as the objects that a producer creates from them."""
    records = array_of(total, size, seed + 1)
    arrays = calls_of(records, size)
    kind = CompressionType.ZSTD if zstd else CompressionType.NONE
    per_object = FLUSH_BYTES // size
    objects = [
        encode_batch([records[start : start + per_object]], kind).to_bytes()
        for start in range(0, len(records), per_object)
    ]
    return Load(arrays, [array.to_pylist() for array in arrays], objects, record_bytes(records))


def _tasks(plan: Plan, loads: Sequence[Load], zstd: bool) -> Rates:
    def measure(kind: str) -> Callable[[], float]:
        def once() -> float:
            with scratch(plan) as root:
                began, ended = asyncio.run(_all(kind, loads, root, zstd))
                return ended - began

        return once

    contenders = {kind: measure(kind) for kind in ("raw", "Arrow", "list")}
    work = sum(load.record_bytes for load in loads) / 1e6
    return interleave(contenders, work=work, rounds=plan.pick(5, 2))


async def _all(kind: str, loads: Sequence[Load], root: Path, zstd: bool) -> tuple[float, float]:
    began = time.monotonic()
    await asyncio.gather(*(_one(kind, load, root, zstd, place) for place, load in enumerate(loads)))
    return began, time.monotonic()


async def _one(kind: str, load: Load, root: Path, zstd: bool, place: int) -> None:
    store = LocalStore(root)
    try:
        if kind == "raw":
            await put_objects(store, load.objects, f"raw/{place}")
        else:
            await _produce(store, load.arrays if kind == "Arrow" else load.lists, zstd)
    finally:
        await store.close()


async def _produce(store: LocalStore, calls: Sequence[pa.Array | list[bytes]], zstd: bool) -> None:
    config = ProducerConfig(
        store=store,
        flush_size_bytes=FLUSH_BYTES,
        flush_interval="10s",
        max_parallel_uploads=IN_FLIGHT,
        batch_compression="zstd" if zstd else "none",
    )
    async with Producer(config) as producer:
        for call in calls:
            await producer.produce(call)
        await producer.flush()


async def put_objects(store: LocalStore, objects: Sequence[bytes], prefix: str) -> None:
    """Store every object, `IN_FLIGHT` at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def put(place: int, data: bytes) -> None:
        async with slots:
            await store.put(f"{prefix}/{place:06d}", data)

    await asyncio.gather(*(put(place, data) for place, data in enumerate(objects)))


_kept: list[Load] = []


def _prepare_here(total: int, size: int, seed: int) -> int:
    _kept[:] = [prepare(total, size, False, seed)]
    return _kept[0].record_bytes


def _run_here(kind: str, root: str, place: int, start_at: float) -> tuple[float, float]:
    time.sleep(max(0.0, start_at - time.monotonic()))
    began = time.monotonic()
    asyncio.run(_one(kind, _kept[0], Path(root), False, place))
    return began, time.monotonic()


def _processes(plan: Plan, share: int, size: int) -> Rates:
    with Crew(4) as crew:
        work = sum(crew.order(_prepare_here, *((share, size, seed) for seed in range(4))))

        def measure(kind: str) -> Callable[[], float]:
            def once() -> float:
                with scratch(plan) as root:
                    start_at = time.monotonic() + 0.05
                    spans = crew.order(_run_here, *((kind, str(root), place, start_at) for place in range(4)))
                return float(max(end for _, end in spans) - min(begin for begin, _ in spans))

            return once

        contenders = {kind: measure(kind) for kind in ("raw", "Arrow", "list")}
        return interleave(contenders, work=work / 1e6, rounds=5)


def _rows(rates: Rates, size: int, zstd: bool, producers: str) -> list[Row]:
    name = "1 KiB" if size == 1024 else f"{size} B"
    return [
        Row(
            section="2 produce to durable",
            what=f"{kind}, {name}, {'zstd' if zstd else 'none'}, {producers}",
            ours=rates.median(kind),
            ceiling=rates.median("raw"),
            ratio=rates.ratio(kind, "raw"),
            against="store.put, same compressed bytes" if zstd else "store.put, same bytes",
            unit="MB/s",
            bar=None if zstd else BARS[kind],
            note=_NOTE,
        )
        for kind in ("Arrow", "list")
    ]
