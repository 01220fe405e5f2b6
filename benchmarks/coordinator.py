"""Measure coordinated writes on this machine: `python benchmarks/coordinator.py`.

A database of 200-byte rows over SlateDB in a local directory. Each figure is compared with the same work
without a coordinator: batches built by hand, written and persisted one after the other. On a busy machine,
read the ratios.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from penstock import http
from penstock.coordinator import (
    CoordinatorConfig,
    Delta,
    Durability,
    Flusher,
    Put,
    Storage,
    StorageRead,
    SyncMode,
    WriteCoordinator,
)
from penstock.coordinator.slate import SlateStorage
from penstock.metrics import Registry
from penstock.servers.scheduling import shorten_slice
from rounds import Plan, interleave, scratch
from sections import run_planned
from table import Row

ROW = b"x" * 200
BATCH_ROWS = 1000
THRESHOLD = BATCH_ROWS * len(ROW)
WRITERS = 64
RATE = 1000
"""Writes per second that arrive during a flush."""
CROWD_PAUSE_S = 0.01
"""Average pause between the writes of each of many writers during a flush."""
PAUSE_S = 0.25
SETTLE_S = 0.1
"""Pause after a flush. The next rows arrive together and block the loop, which must not delay its last
writes."""
PARTS = 5
LOG_TICK = "5ms"
"""Interval at which SlateDB writes its log automatically. Both sides also request it."""


Write: TypeAlias = tuple[bytes, ...]
ONE: Write = (ROW,)


class RowDelta(Delta[Write, int]):
    """Rows by number."""

    def init(self, image: int) -> None:
        self.first = image
        self.rows: list[bytes] = []

    def apply(self, writes: Sequence[Write]) -> Sequence[object]:
        for write in writes:
            self.rows += write
        return [None] * len(writes)

    def estimate_size(self) -> int:
        return len(self.rows) * len(ROW)

    def fork_image(self) -> int:
        return self.first + len(self.rows)


def puts(first: int, rows: Sequence[bytes]) -> Iterator[Put]:
    return (Put(b"%012d" % number, row) for number, row in enumerate(rows, first))


def packed(first: int, rows: Sequence[bytes]) -> Iterator[Put]:
    return iter((Put(b"%012d" % first, b"".join(rows)),))


Layout: TypeAlias = Callable[[int, Sequence[bytes]], Iterator[Put]]


class RowFlusher(Flusher[RowDelta, StorageRead]):
    def __init__(self, storage: Storage, layout: Layout) -> None:
        self._storage = storage
        self._layout = layout

    async def flush(self, delta: RowDelta) -> StorageRead:
        await self._storage.apply(self._layout(delta.first, delta.rows))
        return await self._storage.snapshot()

    async def sync(self) -> None:
        await self._storage.flush()


Rows: TypeAlias = WriteCoordinator[Write, RowDelta, StorageRead]


async def coordinated(storage: Storage, layout: Layout = puts, **config: object) -> Rows:
    coordinator: Rows = WriteCoordinator(
        RowDelta,
        RowFlusher(storage, layout),
        image=0,
        snapshot=await storage.snapshot(),
        config=CoordinatorConfig.from_mapping({"flush_size_threshold": THRESHOLD, **config}),
        registry=Registry(),
    )
    coordinator.start()
    return coordinator


def over_slate(plan: Plan, work: Callable[[Storage], Awaitable[float]]) -> float:
    """Return the result of `work` over a new database."""

    found: list[float] = []

    async def run(url: str) -> None:
        storage = await SlateStorage.open(
            url, "rows", settings={"flush_interval": LOG_TICK}, persist_at_once=True
        )
        try:
            found.append(await work(storage))
        finally:
            await storage.close()

    shorten_slice()
    with scratch(plan) as root:
        http.run(lambda stop: run(root.as_uri()))  # both sides run on the loop with a server's settings
    return found[0]


# Throughput


async def waiting_writers(
    storage: Storage, *, rounds: int, level: Durability, layout: Layout, size: int
) -> float:
    """Return the seconds until all 64 writers have repeatedly written `size` rows and waited."""
    mode = SyncMode.EVERY_FLUSH if level is Durability.DURABLE else SyncMode.EXPLICIT
    coordinator = await coordinated(
        storage, layout, sync_mode=mode, flush_interval="0s", flush_size_threshold="64MiB"
    )
    write = (ROW,) * size

    async def writer() -> None:
        for _ in range(rounds):
            await (await coordinator.write(write)).wait(level)

    began = time.perf_counter()
    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    seconds = time.perf_counter() - began
    await coordinator.close()
    return seconds


async def by_hand(storage: Storage, *, rounds: int, level: Durability, layout: Layout, size: int) -> float:
    """Return the seconds for the same rows, with those of all writers in one batch, batch after batch."""
    rows = [ROW] * (WRITERS * size)
    began = time.perf_counter()
    for turn in range(rounds):
        await storage.apply(layout(turn * len(rows), rows))
        if level is Durability.DURABLE:
            await storage.flush()
    return time.perf_counter() - began


class HandBatch:
    """Minimal batching: rows in a list, and one future for all waiters."""

    def __init__(self, storage: Storage, layout: Layout, level: Durability) -> None:
        self._storage = storage
        self._layout = layout
        self._level = level
        self._rows: list[bytes] = []
        self._first = 0
        self._done = asyncio.get_running_loop().create_future()
        self._running: asyncio.Task[None] | None = None

    def write(self, rows: Write) -> asyncio.Future[None]:
        self._rows += rows
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._store())
        return self._done

    async def _store(self) -> None:
        while self._rows:
            rows, self._rows = self._rows, []
            done, self._done = self._done, asyncio.get_running_loop().create_future()
            await self._storage.apply(self._layout(self._first, rows))
            if self._level is Durability.DURABLE:
                await self._storage.flush()
            self._first += len(rows)
            done.set_result(None)
            await asyncio.sleep(0)  # the waiters write again
        self._running = None


async def writers_by_hand(
    storage: Storage, *, rounds: int, level: Durability, layout: Layout, size: int
) -> float:
    """Return the seconds of the same 64 writers with hand-built shared batches."""
    batch = HandBatch(storage, layout, level)
    write = (ROW,) * size

    async def writer() -> None:
        for _ in range(rounds):
            await batch.write(write)

    began = time.perf_counter()
    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    return time.perf_counter() - began


CASES: tuple[tuple[str, Layout, int, Durability, float | None], ...] = (
    ("1 row a write, a value per row", puts, 1, Durability.DURABLE, 0.8),
    ("10 rows a write, a value per row", puts, 10, Durability.DURABLE, 0.8),
    ("1 row a write, a value per flush", packed, 1, Durability.DURABLE, None),
    ("10 rows a write, a value per flush", packed, 10, Durability.DURABLE, None),
    ("1 row a write, a value per row", puts, 1, Durability.FLUSHED, None),
    ("1 row a write, a value per row", puts, 1, Durability.APPLIED, None),
)


def throughput(plan: Plan) -> list[Row]:
    """Measure 64 writers that wait for the level before they write again."""
    rows = []
    for name, layout, size, level, bar in CASES:
        rounds = plan.pick(600, 100) // (1 if size == 1 else 4)
        arguments = {"rounds": rounds, "level": level, "layout": layout, "size": size}
        contenders = {
            "ours": partial(over_slate, plan, partial(waiting_writers, **arguments)),
            "writers": partial(over_slate, plan, partial(writers_by_hand, **arguments)),
            "bulk": partial(over_slate, plan, partial(by_hand, **arguments)),
        }
        rates = interleave(contenders, work=rounds * WRITERS * size, rounds=plan.pick(7, 3))
        against = {
            "writers": ("the same writers, rows in shared batches by hand", bar),
            "bulk": ("no writers: all rows at hand, a batch after the other", None),
        }
        rows += [
            Row(
                section="throughput",
                what=f"{WRITERS} writers wait for {level.name.lower()}, {name}",
                ours=rates.median("ours"),
                ceiling=rates.median(contender),
                ratio=rates.ratio("ours", contender),
                unit="rows/s",
                against=what,
                bar=limit,
                note="200-byte rows in a local directory; flushes as soon as the last is stored",
            )
            for contender, (what, limit) in against.items()
        ]
    return rows


async def open_loop(storage: Storage, *, count: int, level: Durability) -> float:
    """Return the seconds of one writer that never waits, until the last write has reached the level."""
    mode = SyncMode.EVERY_FLUSH if level is Durability.DURABLE else SyncMode.EXPLICIT
    coordinator = await coordinated(storage, puts, sync_mode=mode, max_pending_size=4 * THRESHOLD)
    began = time.perf_counter()
    handle = None
    for _ in range(count):
        handle = await coordinator.write(ONE)
    await coordinator.flush()
    assert handle is not None
    await handle.wait(level)
    seconds = time.perf_counter() - began
    await coordinator.close()
    return seconds


async def large_batches(storage: Storage, *, count: int, level: Durability) -> float:
    began = time.perf_counter()
    for first in range(0, count, BATCH_ROWS):
        await storage.apply(puts(first, [ROW] * BATCH_ROWS))
        if level is Durability.DURABLE:
            await storage.flush()
    return time.perf_counter() - began


def stream(plan: Plan) -> list[Row]:
    """Measure one writer that does not wait, in deltas of 1000 rows."""
    count = plan.pick(100_000, 10_000)
    rows = []
    for level in (Durability.FLUSHED, Durability.DURABLE):
        contenders = {
            "ours": partial(over_slate, plan, partial(open_loop, count=count, level=level)),
            "hand": partial(over_slate, plan, partial(large_batches, count=count, level=level)),
        }
        rates = interleave(contenders, work=count, rounds=plan.pick(7, 3))
        rows.append(
            Row(
                section="throughput",
                what=f"one writer that does not wait, {level.name.lower()}",
                ours=rates.median("ours"),
                ceiling=rates.median("hand"),
                ratio=rates.ratio("ours", "hand"),
                unit="writes/s",
                against="batches of 1000 rows by hand",
                bar=0.8 if level is Durability.DURABLE else None,
                note="a value per row; a snapshot after each flush",
            )
        )
    return rows


# Waits


async def waits(storage: Storage, *, level: Durability, rounds: int) -> list[float]:
    """Return the seconds from `write` to the level, for writers that wait before they continue."""
    coordinator = await coordinated(storage, packed, sync_mode=SyncMode.EVERY_FLUSH, flush_interval="0s")
    taken: list[float] = []

    async def writer() -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            await (await coordinator.write(ONE)).wait(level)
            taken.append(time.perf_counter() - began)

    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    await coordinator.close()
    return taken


async def direct_waits(storage: Storage, *, rounds: int) -> list[float]:
    """Return the waits of the same writers, each with its own batch."""
    taken: list[float] = []

    async def writer(number: int) -> None:
        for turn in range(rounds):
            began = time.perf_counter()
            await storage.apply(puts(number * rounds + turn, [ROW]))
            await storage.flush()
            taken.append(time.perf_counter() - began)

    await asyncio.gather(*(writer(number) for number in range(WRITERS)))
    return taken


def latency(plan: Plan) -> list[Row]:
    """Measure the median and 99th percentile of the wait at each level, against a direct durable write."""
    rounds = plan.pick(60, 20)
    samples: dict[str, list[float]] = {}

    def keep(name: str, work: Callable[[Storage], Awaitable[list[float]]]) -> None:
        async def run(storage: Storage) -> float:
            samples[name] = await work(storage)
            return 0.0

        over_slate(plan, run)

    keep("direct", partial(direct_waits, rounds=rounds))
    for level in Durability:
        keep(level.name, partial(waits, level=level, rounds=rounds))
    return [
        Row(
            section="latency",
            what=f"write to {level.name.lower()}, {what}",
            ours=pick(samples[level.name]) * 1e3,
            ceiling=pick(samples["direct"]) * 1e3,
            unit="ms",
            against="a batch per write, persisted",
            bar=2.0 if level is Durability.DURABLE and what == "p99" else None,
            at_most=True,
            note=f"{WRITERS} writers, each waits; flushes as soon as the last is stored, each synced",
        )
        for level in Durability
        for what, pick in (("p50", statistics.median), ("p99", percentile_99))
    ]


def percentile_99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


# The cost of coordination


class NoFlusher(Flusher[RowDelta, None]):
    async def flush(self, delta: RowDelta) -> None:
        return None

    async def sync(self) -> None:
        return None


async def applied(count: int) -> float:
    coordinator: WriteCoordinator[Write, RowDelta, None] = WriteCoordinator(
        RowDelta, NoFlusher(), image=0, snapshot=None, registry=Registry()
    )
    coordinator.start()
    began = time.process_time()
    handle = None
    for _ in range(count):
        handle = await coordinator.write(ONE)
    assert handle is not None
    await handle.wait(Durability.APPLIED)
    seconds = time.process_time() - began
    await coordinator.abort()
    return seconds


def cost(plan: Plan) -> list[Row]:
    """Measure the CPU per write from `write` to APPLIED, with a trivial delta."""
    count = plan.pick(200_000, 50_000)
    micros = min(asyncio.run(applied(count)) for _ in range(3)) / count * 1e6
    return [
        Row(
            section="cost",
            what="one write, applied",
            ours=micros,
            ceiling=10.0,
            unit="us CPU",
            against="10 us: 100,000 writes/s of one core",
            bar=1.0,
            at_most=True,
        )
    ]


SENDER = """
import os, struct, sys, time
due = time.perf_counter()
while True:
    due += 1 / float(sys.argv[1])
    time.sleep(max(0.0, due - time.perf_counter()))
    try:
        os.write(1, struct.pack("d", time.perf_counter()))
    except BrokenPipeError:
        break
"""
MOMENT = struct.Struct("d")


class Arrivals:
    """Writes that arrive at a steady rate from another process, like requests, and their durations.

    A write is timed from when it was sent and attributed to that phase, so that blocking of the loop is
    included.
    """

    def __init__(self, coordinator: Rows) -> None:
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.writes: list[tuple[float, float]] = []
        """Send time and duration of each write."""
        command = (sys.executable, "-c", SENDER, str(RATE))
        self._sender = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def __aenter__(self) -> Arrivals:
        assert self._sender.stdout is not None
        self._pipe = self._sender.stdout.fileno()
        self._loop.add_reader(self._pipe, self._arrive)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._loop.remove_reader(self._pipe)
        self._sender.kill()
        self._sender.communicate()
        await asyncio.gather(*self._tasks)

    def _arrive(self) -> None:
        for (sent,) in MOMENT.iter_unpack(os.read(self._pipe, 1024 * MOMENT.size)):
            task = asyncio.ensure_future(self._write(sent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(self, sent: float) -> None:
        await (await self._coordinator.write(ONE)).wait(Durability.APPLIED)
        self.writes.append((sent, time.perf_counter() - sent))

    def waits(self, began: float, ended: float) -> list[float]:
        """Return the durations of the writes sent in an interval."""
        return [taken for sent, taken in self.writes if began <= sent < ended]


class Crowd:
    """Writers that wait for each write and pause before the next, and the durations of the writes.

    A write is timed from its creation, because the coordinator is not responsible for a late creation.
    """

    def __init__(self, coordinator: Rows) -> None:
        self._coordinator = coordinator
        self._writers: list[asyncio.Task[None]] = []
        self.writes: list[tuple[float, float]] = []
        """Creation time and duration of each write."""

    async def __aenter__(self) -> Crowd:
        self._writers = [asyncio.ensure_future(self._write()) for _ in range(WRITERS)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(CROWD_PAUSE_S * random.uniform(0.5, 1.5))
            made = time.perf_counter()
            await (await self._coordinator.write(ONE)).wait(Durability.APPLIED)
            self.writes.append((made, time.perf_counter() - made))

    def waits(self, began: float, ended: float) -> list[float]:
        """Return the durations of the writes created in an interval."""
        return [taken for made, taken in self.writes if began <= made < ended]


Waits: TypeAlias = tuple[list[float], list[float]]
Writing: TypeAlias = Callable[[Rows], Arrivals | Crowd]


async def applied_beside_flushes(
    storage: Storage, *, writing: Writing, rows: int, parts: int, rounds: int
) -> list[Waits]:
    """Return the waits for APPLIED without a flush and during flushes of `rows` rows, alternating, by
    part."""
    coordinator = await coordinated(storage, flush_size_threshold=10 * rows * len(ROW), flush_interval="1h")
    found: list[Waits] = []
    async with writing(coordinator) as arrivals:
        for _ in range(parts):
            idle: list[float] = []
            busy: list[float] = []
            for _ in range(rounds):
                for _ in range(rows):
                    await coordinator.write(ONE)
                await asyncio.sleep(PAUSE_S)  # until all writes that arrived in the meantime are applied
                quiet = time.perf_counter()
                await asyncio.sleep(PAUSE_S)
                began = time.perf_counter()
                await (await coordinator.flush()).wait(Durability.FLUSHED)
                ended = time.perf_counter()
                await asyncio.sleep(SETTLE_S)
                idle += arrivals.waits(quiet, began)
                busy += arrivals.waits(began, ended)
                arrivals.writes.clear()
            found.append((idle, busy))
    await coordinator.close()
    return found


BESIDE: dict[str, tuple[Writing, str]] = {
    f"{WRITERS} writers": (
        Crowd,
        f"some {WRITERS / CROWD_PAUSE_S:,.0f} writes/s, counted from when they are made",
    ),
    f"{RATE:,} writes/s": (Arrivals, "from another process, counted from when they were sent"),
}


def beside_a_flush(plan: Plan) -> list[Row]:
    """Measure the 99th percentile of APPLIED during a flush, for which writes must not wait.

    Use the median of several parts: a single stall of the machine delays more than one in a hundred of a
    thousand writes in one of the two phases, and would dominate the overall figure.
    """
    rows = plan.pick(50_000, 10_000)
    told: list[Row] = []
    for who, (writing, how) in BESIDE.items():
        found: list[Waits] = []

        async def run(storage: Storage, writing: Writing = writing, found: list[Waits] = found) -> float:
            found += await applied_beside_flushes(storage, writing=writing, rows=rows, parts=PARTS, rounds=4)
            return 0.0

        over_slate(plan, run)
        told.append(_beside_a_flush(rows, found, who, how, "p50", statistics.median, None))
        told.append(_beside_a_flush(rows, found, who, how, "p99", percentile_99, 2.0))
    return told


def _beside_a_flush(
    rows: int,
    found: Sequence[Waits],
    who: str,
    how: str,
    what: str,
    pick: Callable[[Sequence[float]], float],
    bar: float | None,
) -> Row:
    without = [pick(idle) * 1e3 for idle, _ in found]
    during = [pick(busy) * 1e3 for _, busy in found]
    ratios = [ours / theirs for ours, theirs in zip(during, without, strict=True)]
    return Row(
        section="during a flush",
        what=f"{who}, to applied, {what}, while {rows:,} rows are flushed",
        ours=statistics.median(during),
        ceiling=statistics.median(without),
        ratio=statistics.median(ratios),
        unit="ms",
        against="the same writes while nothing is flushed",
        bar=bar,
        at_most=True,
        note=f"{what} of each of {len(found)} parts, ms: {_listed(during)} during flushes "
        f"({sum(len(busy) for _, busy in found):,} writes, the longest "
        f"{max(max(busy) for _, busy in found) * 1e3:.1f}), {_listed(without)} without "
        f"({sum(len(idle) for idle, _ in found):,}, {max(max(idle) for idle, _ in found) * 1e3:.1f}); "
        f"medians of the parts; {who}, {how}",
    )


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "throughput": throughput,
    "stream": stream,
    "latency": latency,
    "cost": cost,
    "flush": beside_a_flush,
}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure coordinated writes against batches built by hand.",
            SECTIONS,
            quick="about half a minute, with coarser figures",
        )
    )
