"""The manifest as the contended object: the cost of an append, and commits under contention."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crew import Crew
from penstock.buffer import Metadata, Producer, ProducerConfig, manifest
from penstock.buffer.side_objects import DEQUEUED_LOG_ENTRIES, DequeuedLog, encode_dequeued_log
from penstock.metrics import Registry
from penstock.objects.local import LocalStore
from rounds import Plan, interleave, scratch
from table import Row

__all__ = ["backlog", "contention", "ledger"]

_MANIFEST = "ingest/manifest"
_STAMP = (Metadata(start_index=0, ingestion_time_ms=1_760_000_000_000),)
_BACKLOG_NOTE = (
    "one entry per append, no other writer; CAS: manifest.append and the conditional write of the local "
    "store (it compares, stages, syncs and renames the whole object), in ms of wall clock and of this "
    "process's CPU"
)
_CONTENTION_NOTE = (
    "each producer has 8 callers, one 200 B record per call, next call after the last is durable, every "
    "call its own batch (flush_interval 0); 1: one task, 4: one per process, 16: four tasks in each of "
    "4 processes; commits: manifest writes that won, group: batches per commit"
)
_CALLERS = 8


def backlog(plan: Plan) -> list[Row]:
    """Measure appends after 1, 1,000 and 100,000 unconsumed entries."""
    rows: list[Row] = []
    for entries in (1, 1_000, 100_000):
        raw = manifest.append(manifest.EMPTY_MANIFEST, [_entry(n) for n in range(entries)])
        with scratch(plan) as root:
            wall_s, cpu_s = asyncio.run(_appends(root, raw, plan.pick(40, 15)))
        pure_s = _pure_append(raw)
        for what, value in (("CAS", wall_s), ("CAS, CPU", cpu_s), ("manifest.append alone", pure_s)):
            rows.append(
                Row(
                    section="4 append",
                    what=f"{what}, backlog {entries:,} ({len(raw) / 1e6:.1f} MB)",
                    ours=value * 1e3,
                    unit="ms",
                    note=_BACKLOG_NOTE,
                )
            )
    return rows


def _entry(number: int) -> manifest.NewEntry:
    return manifest.NewEntry(location=f"ingest/{number:026d}.batch", metadata=_STAMP)


async def _appends(root: Path, raw: bytes, times: int) -> tuple[float, float]:
    store = LocalStore(root)
    version = await store.put_if_absent(_MANIFEST, raw)
    walls, cpus = [], []
    for number in range(times):
        began, cpu = time.perf_counter(), time.process_time()
        raw = manifest.append(raw, [_entry(number)])
        version = await store.put_if_match(_MANIFEST, raw, version)
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
    await store.close()
    return statistics.median(walls), statistics.median(cpus)


def _pure_append(raw: bytes) -> float:
    taken = []
    for number in range(50):
        began = time.perf_counter()
        manifest.append(raw, [_entry(number)])
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def ledger(plan: Plan) -> list[Row]:
    """Measure encoding a full ledger when 1 and 100 entries leave the queue."""
    pairs = [(n, f"ingest/{n:026d}.batch") for n in range(DEQUEUED_LOG_ENTRIES + 100)]
    full = DequeuedLog().after(pairs[:DEQUEUED_LOG_ENTRIES], epoch=1)
    known = full.known
    rows: list[Row] = []
    for count in (1, 100):
        leaving = pairs[DEQUEUED_LOG_ENTRIES : DEQUEUED_LOG_ENTRIES + count]
        contenders = {
            "edited": lambda leaving=leaving: _cpu(lambda: full.after(leaving, epoch=1)),
            "encoded": lambda leaving=leaving: _cpu(lambda: encode_dequeued_log(known, leaving, epoch=1)),
        }
        rates = interleave(contenders, work=1, rounds=plan.pick(9, 5))
        rows.append(
            Row(
                section="4 append",
                what=f"ledger of {len(full.raw) / 1e3:.0f} kB, {count} leave",
                ours=1e3 / rates.median("edited"),
                ceiling=1e3 / rates.median("encoded"),
                ratio=rates.ratio("encoded", "edited"),
                against="encoding all of it",
                unit="ms CPU",
                bar=0.2,
                at_most=True,
                note="CPU of making the next ledger of a full one, edited against encoded again",
            )
        )
    return rows


def _cpu(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
    return best


@dataclass(frozen=True, slots=True)
class Tally:
    """Results of the producers of one process."""

    batches: float
    writes: float
    conflicts: float

    @classmethod
    def sum(cls, parts: Sequence[Tally]) -> Tally:
        return cls(
            sum(part.batches for part in parts),
            sum(part.writes for part in parts),
            sum(part.conflicts for part in parts),
        )


def contention(plan: Plan) -> list[Row]:
    """Measure 1, 4 and 16 producers on one manifest."""
    rows: list[Row] = []
    seconds = float(plan.pick(4, 2))
    with Crew(1) as alone, Crew(4) as crowd:
        for producers, crew, tasks, how in (
            (1, alone, 1, "1 task"),
            (4, crowd, 1, "4 processes"),
            (16, crowd, 4, "4 processes x 4 tasks"),
        ):
            processes = producers // tasks
            with scratch(plan) as root:
                start_at = time.monotonic() + 0.5
                order = (str(root), tasks, seconds, start_at)
                tally = Tally.sum(crew.order(_contend_here, *([order] * processes)))
            rows += _contention_rows(tally, seconds, producers, how)
    return rows


def _contention_rows(tally: Tally, seconds: float, producers: int, how: str) -> list[Row]:
    commits = max(1.0, tally.writes - tally.conflicts)
    figures = (
        ("commits", commits / seconds, "commits/s"),
        ("batches", tally.batches / seconds, "batches/s"),
        ("group size", tally.batches / commits, "batches"),
        ("conflicts", 100 * tally.conflicts / max(1.0, tally.writes), "% of writes"),
    )
    who = "1 producer" if producers == 1 else f"{producers} producers"
    return [
        Row(
            section="6 contention",
            what=f"{what}, {who} ({how})",
            ours=value,
            unit=unit,
            note=_CONTENTION_NOTE,
        )
        for what, value, unit in figures
    ]


def _contend_here(root: str, tasks: int, seconds: float, start_at: float) -> Tally:
    time.sleep(max(0.0, start_at - time.monotonic()))
    return Tally.sum(asyncio.run(_contend(root, tasks, seconds)))


async def _contend(root: str, tasks: int, seconds: float) -> list[Tally]:
    until = time.monotonic() + seconds
    return await asyncio.gather(*(_producer(root, until) for _ in range(tasks)))


async def _producer(root: str, until: float) -> Tally:
    store, registry = LocalStore(root), Registry()
    config = ProducerConfig(store=store, flush_interval="0s", max_parallel_uploads=_CALLERS)
    async with Producer(config, registry=registry) as producer:

        async def call() -> None:
            while time.monotonic() < until:
                handle = await producer.produce([b"x" * 200])
                await handle.watcher.await_durable()

        await asyncio.gather(*(call() for _ in range(_CALLERS)))
    await store.close()
    return Tally(
        registry.value("buffer.batches_flushed"),
        registry.value("buffer.manifest_writes", role="producer"),
        registry.value("buffer.manifest_conflicts", role="producer"),
    )
