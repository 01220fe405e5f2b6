"""Measure the time-series database on this machine: `python benchmarks/timeseries.py`.

A thousand series, an hour of samples every 15 seconds, in SlateDB over a local directory. Ingest goes from
series, or from the bytes of remote writes, to durable; queries go from text to result, with an hour that is
still in blocks and with a compacted one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import cramjam
import numpy as np

from penstock.coordinator import Durability
from penstock.coordinator.slate import SlateStorage
from penstock.coordinator.storage import Put
from penstock.timeseries import Labels, Samples, Series, TimeSeries, TimeSeriesConfig
from penstock.timeseries.ingest import decode_remote_write
from rounds import Plan
from sections import run_planned
from table import Row

START_MS = 1_700_000_000_000 // 3_600_000 * 3_600_000
STEP_MS = 15_000
STEPS = 240
SERIES = 1000
LABELS = [
    Labels.of({"__name__": "requests_total", "job": f"job-{one % 10}", "instance": f"i-{one}"})
    for one in range(SERIES)
]
RATE = "rate(requests_total[5m])"


def scrape(step: int) -> list[Series]:
    """Return one sample of every series."""
    times = np.full(1, START_MS + STEP_MS * step)
    return [
        Series(labels=labels, samples=Samples(times, np.array([float(step * 7 + place % 13)])))
        for place, labels in enumerate(LABELS)
    ]


def body(step: int) -> bytes:
    """Return the same as a remote write: fields 1 of a message that hold labels (1) and one sample (2)."""
    parts = []
    for one in scrape(step):
        pairs = [part(1, part(1, name.encode()) + part(2, value.encode())) for name, value in one.labels]
        at = varint(int(one.samples.timestamps[0]))
        sample = b"\x09" + one.samples.values.tobytes() + b"\x10" + at
        parts.append(part(1, b"".join(pairs) + part(2, sample)))
    return bytes(cramjam.snappy.compress_raw(b"".join(parts)))


def part(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes((value,))


async def fill(directory: Path, write: Callable[[TimeSeries, int], Awaitable[None]]) -> tuple[float, float]:
    """Return the seconds of CPU and of the clock until an hour is durable."""
    async with await TimeSeries.open(directory) as database:
        began, cpu = time.perf_counter(), time.process_time()
        for step in range(STEPS):
            await write(database, step)
            await asyncio.sleep(0)
        await database.sync()
        return time.process_time() - cpu, time.perf_counter() - began


async def put_by_hand(directory: Path) -> float:
    """Return the CPU seconds until the same samples, as plain arrays without labels or an index, are
    durable."""
    storage = await SlateStorage.open(directory.as_uri(), "samples")
    arrays = [(one.samples.timestamps.tobytes(), one.samples.values.tobytes()) for one in scrape(0)]
    cpu = time.process_time()
    for step in range(STEPS):
        await storage.apply([Put(b"%06d" % step, b"".join(part for pair in arrays for part in pair))])
    await storage.flush()
    seconds = time.process_time() - cpu
    await storage.close()
    return seconds


def ingest(plan: Plan) -> list[Row]:
    """Measure ingest from series or remote writes to durable."""
    scrapes, bodies = [scrape(step) for step in range(STEPS)], [body(step) for step in range(STEPS)]

    async def by_series(database: TimeSeries, step: int) -> None:
        await database.write(scrapes[step])

    async def by_remote_write(database: TimeSeries, step: int) -> None:
        await database.write(decode_remote_write(bodies[step]).series)

    rows = []
    rounds = range(plan.pick(5, 2))
    bare = statistics.median(asyncio.run(put_by_hand(plan.workdir / f"bare-{place}")) for place in rounds)
    for what, write in (("series", by_series), ("remote writes", by_remote_write)):
        runs = [
            asyncio.run(fill(plan.workdir / f"{what}-{place}".replace(" ", "-"), write)) for place in rounds
        ]
        cpu, clock = (statistics.median(column) for column in zip(*runs, strict=True))
        note = f"{SERIES * STEPS / clock / 1e3:,.0f}k/s by the clock; one sample of {SERIES:,} series a write"
        rows.append(
            Row(
                section="ingest",
                what=f"{what} until durable",
                ours=SERIES * STEPS / cpu / 1e3,
                ceiling=SERIES * STEPS / bare / 1e3,
                ratio=bare / cpu,
                unit="k samples/s of CPU",
                against="bare arrays put into SlateDB",
                note=note,
            )
        )
    return rows


async def ask(directory: Path, rounds: int, config: TimeSeriesConfig) -> float:
    """Return the median CPU seconds of a range query, on all threads, after a warm-up."""
    async with await TimeSeries.open(directory, config) as database:
        await (await database.write([])).wait(Durability.APPLIED)
        await database.sync()  # compacts, if it is due
        seconds = []
        for _ in range(rounds + 1):
            began = time.process_time()
            await database.query_range(RATE, START_MS, START_MS + STEP_MS * (STEPS - 1), STEP_MS)
            seconds.append(time.process_time() - began)
        return statistics.median(seconds[1:])


def queries(plan: Plan) -> list[Row]:
    """Measure `rate` over an hour of all series, read from storage."""

    async def one_flush_each(database: TimeSeries, step: int) -> None:
        await database.write(scrape(step))
        await (await database.flush()).wait()

    directory = plan.workdir / "hour"
    asyncio.run(fill(directory, one_flush_each))
    rounds = plan.pick(7, 3)
    never = TimeSeriesConfig(fold_after="3650d", fold_blocks=10**6)
    rows = []
    for what, config in ((f"{STEPS} blocks", never), ("folded streams", TimeSeriesConfig())):
        seconds = asyncio.run(ask(directory, rounds, config))
        note = f"{SERIES:,} series x 1 h, {STEPS} steps"
        rows.append(
            Row(section="queries", what=f"{RATE} from {what}", ours=seconds * 1e3, unit="ms CPU", note=note)
        )
    return rows


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"ingest": ingest, "queries": queries}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure the database of time series.", SECTIONS, quick="a few seconds, with coarser figures"
        )
    )
