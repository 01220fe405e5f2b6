"""Measure coordinated writes on this machine: `python benchmarks/coordinator.py`.

A database of 200-byte rows over SlateDB in a local directory. Beside each figure stands the same work without
a coordinator: batches built by hand, written and persisted one after the other. On a busy machine, read the
ratios.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

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
from rounds import Plan, interleave, scratch
from sections import option_parser, run_sections, workdir
from table import Row

ROW = b"x" * 200
BATCH_ROWS = 1000
THRESHOLD = BATCH_ROWS * len(ROW)
WRITERS = 64
LOG_TICK = "5ms"
"""How often SlateDB writes its log by itself; both sides also ask for it."""


class RowDelta(Delta[bytes, int]):
    """Rows by number."""

    def init(self, image: int) -> None:
        self.first = image
        self.rows: list[bytes] = []

    def apply(self, writes: Sequence[bytes]) -> Sequence[object]:
        self.rows += writes
        return [None] * len(writes)

    def estimate_size(self) -> int:
        return len(self.rows) * len(ROW)

    def fork_image(self) -> int:
        return self.first + len(self.rows)


def puts(first: int, rows: Sequence[bytes]) -> list[Put]:
    return [Put(b"%012d" % number, row) for number, row in enumerate(rows, first)]


def packed(first: int, rows: Sequence[bytes]) -> list[Put]:
    return [Put(b"%012d" % first, b"".join(rows))]


Layout: TypeAlias = Callable[[int, Sequence[bytes]], list[Put]]


class RowFlusher(Flusher[RowDelta, StorageRead]):
    def __init__(self, storage: Storage, layout: Layout) -> None:
        self._storage = storage
        self._layout = layout

    async def flush(self, delta: RowDelta) -> StorageRead:
        await self._storage.apply(self._layout(delta.first, delta.rows))
        return await self._storage.snapshot()

    async def sync(self) -> None:
        await self._storage.flush()


Rows: TypeAlias = WriteCoordinator[bytes, RowDelta, StorageRead]


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
    """What `work` measures over a new database."""

    async def run(url: str) -> float:
        storage = await SlateStorage.open(url, "rows", settings={"flush_interval": LOG_TICK})
        try:
            return await work(storage)
        finally:
            await storage.close()

    with scratch(plan) as root:
        return asyncio.run(run(root.as_uri()))


# Throughput


async def through_coordinator(storage: Storage, *, count: int, level: Durability, layout: Layout) -> float:
    mode = SyncMode.EVERY_FLUSH if level is Durability.DURABLE else SyncMode.EXPLICIT
    coordinator = await coordinated(storage, layout, sync_mode=mode, max_pending_size=4 * THRESHOLD)
    began = time.perf_counter()
    handle = None
    for _ in range(count):
        handle = await coordinator.write(ROW)
    await coordinator.flush()
    assert handle is not None
    await handle.wait(level)
    seconds = time.perf_counter() - began
    await coordinator.close()
    return seconds


async def by_hand(storage: Storage, *, count: int, level: Durability, layout: Layout) -> float:
    began = time.perf_counter()
    for first in range(0, count, BATCH_ROWS):
        await storage.apply(layout(first, [ROW] * BATCH_ROWS))
        if level is Durability.DURABLE:
            await storage.flush()
    return time.perf_counter() - began


def throughput(plan: Plan) -> list[Row]:
    """One writer that never waits, until the last write has reached the level."""
    rows = []
    count = plan.pick(40_000, 10_000)
    for name, layout in (("a value per row", puts), ("a value per flush", packed)):
        for level in (Durability.FLUSHED, Durability.DURABLE):
            arguments = {"count": count, "level": level, "layout": layout}
            contenders = {
                "ours": partial(over_slate, plan, partial(through_coordinator, **arguments)),
                "hand": partial(over_slate, plan, partial(by_hand, **arguments)),
            }
            rates = interleave(contenders, work=count, rounds=plan.pick(5, 2))
            rows.append(
                Row(
                    section="throughput",
                    what=f"{name}, {level.name.lower()}",
                    ours=rates.median("ours"),
                    ceiling=rates.median("hand"),
                    ratio=rates.ratio("ours", "hand"),
                    unit="writes/s",
                    against="batches of 1000 built by hand",
                    bar=0.5 if layout is puts else None,
                    note="200-byte rows in a local directory; deltas of 1000 rows, a snapshot after each",
                )
            )
    return rows


# Waits


async def waits(storage: Storage, *, level: Durability, rounds: int) -> list[float]:
    """Seconds from `write` to the level, of writers that wait before they go on."""
    coordinator = await coordinated(storage, packed, sync_mode=SyncMode.EVERY_FLUSH, flush_interval="5ms")
    taken: list[float] = []

    async def writer() -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            await (await coordinator.write(ROW)).wait(level)
            taken.append(time.perf_counter() - began)

    await asyncio.gather(*(writer() for _ in range(WRITERS)))
    await coordinator.close()
    return taken


async def direct_waits(storage: Storage, *, rounds: int) -> list[float]:
    """The same writers, each with a batch of its own that it waits for."""
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
    """Median and 99th percentile of the wait at each level, against a direct durable write."""
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
            note=f"{WRITERS} writers, each waits; flush interval 5 ms, every flush synced",
        )
        for level in Durability
        for what, pick in (("p50", statistics.median), ("p99", percentile_99))
    ]


def percentile_99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


# The cost of coordination itself


class NoFlusher(Flusher[RowDelta, None]):
    async def flush(self, delta: RowDelta) -> None:
        return None

    async def sync(self) -> None:
        return None


async def applied(count: int) -> float:
    coordinator: WriteCoordinator[bytes, RowDelta, None] = WriteCoordinator(
        RowDelta, NoFlusher(), image=0, snapshot=None, registry=Registry()
    )
    coordinator.start()
    began = time.process_time()
    handle = None
    for _ in range(count):
        handle = await coordinator.write(ROW)
    assert handle is not None
    await handle.wait(Durability.APPLIED)
    seconds = time.process_time() - began
    await coordinator.abort()
    return seconds


def cost(plan: Plan) -> list[Row]:
    """CPU per write from `write` to APPLIED, with a delta that does next to nothing."""
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


async def applied_beside_a_flush(storage: Storage, *, rows: int) -> tuple[list[float], list[float]]:
    """Waits for APPLIED while nothing is flushed, and while a delta of `rows` rows is."""
    coordinator = await coordinated(storage, flush_size_threshold=10 * rows * len(ROW))
    idle = [await one_wait(coordinator) for _ in range(2000)]
    for _ in range(rows):
        await coordinator.write(ROW)
    flush = await coordinator.flush()
    epoch = await flush.epoch()
    busy = []
    while coordinator.watermark(Durability.FLUSHED) < epoch:
        busy.append(await one_wait(coordinator))
    await coordinator.close()
    return idle, busy


async def one_wait(coordinator: Rows) -> float:
    began = time.perf_counter()
    await (await coordinator.write(ROW)).wait(Durability.APPLIED)
    taken = time.perf_counter() - began
    await asyncio.sleep(0)
    return taken


def beside_a_flush(plan: Plan) -> list[Row]:
    """The 99th percentile of APPLIED during a flush: writes are not to wait for it."""
    rows = plan.pick(50_000, 20_000)
    found: list[tuple[list[float], list[float]]] = []

    async def run(storage: Storage) -> float:
        found.append(await applied_beside_a_flush(storage, rows=rows))
        return 0.0

    over_slate(plan, run)
    idle, busy = found[0]
    return [
        Row(
            section="during a flush",
            what=f"write to applied, p99, while {rows:,} rows are flushed",
            ours=percentile_99(busy) * 1e3,
            ceiling=percentile_99(idle) * 1e3,
            unit="ms",
            against="the same without a flush",
            note=f"{len(busy)} writes during the flush; the longest took {max(busy) * 1e3:.1f} ms",
        ),
        Row(
            section="during a flush",
            what="p99 below 10 ms",
            ours=percentile_99(busy) * 1e3,
            ceiling=10.0,
            unit="ms",
            bar=1.0,
            at_most=True,
            against="10 ms",
        ),
    ]


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "throughput": throughput,
    "latency": latency,
    "cost": cost,
    "flush": beside_a_flush,
}


def main() -> int:
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
    parser = option_parser("Measure coordinated writes against batches built by hand.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="about half a minute, with coarser figures")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
