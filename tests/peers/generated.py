"""Series with everything that queries have to cope with, the same ones on every run.

No sample stands on a whole second: a range is open at the left here, as in Prometheus 3, and closed in
Prometheus 2, which only a sample on the very edge can tell.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.unit.timeseries.remote_write_wire import request

from penstock.timeseries.model import STALE_MARKER

__all__ = ["AT_S", "END_S", "START_S", "One", "bodies", "series"]

START_S = 1_700_000_400
END_S = START_S + 5400
AT_S = START_S + 3607
"""In the middle; on no multiple of any subquery's step, as those have the same edges as ranges."""
STEP_MS = 15_000
SLICE_MS = 600_000
INF = math.inf
STALE = float(STALE_MARKER)
LIMITS = ("0.1", "0.5", "1", "2.5", "+Inf")


@dataclass(frozen=True, slots=True)
class One:
    """A series: its labels and its samples in milliseconds."""

    labels: dict[str, str]
    samples: list[tuple[int, float]]


def bodies() -> Iterator[bytes]:
    """Remote writes, ten minutes of all series in each: Prometheus takes no sample that is an hour late."""
    everything = series()
    for start_ms in range(START_S * 1000, END_S * 1000, SLICE_MS):
        end_ms = start_ms + SLICE_MS
        parts = [
            (one.labels, [pair for pair in one.samples if start_ms <= pair[0] < end_ms]) for one in everything
        ]
        yield request(*(part for part in parts if part[1]))


def series() -> list[One]:
    """All of them, sorted by nothing in particular."""
    rng = random.Random(2042)
    made = [_counters(rng), _gauges(rng), _special(), _histograms(rng), _capacities(), _ending(), _young()]
    return [one for group in made for one in group]


def _times(rng: random.Random, *, gaps: bool) -> list[int]:
    """Every 15 s with a shift of its own; a gap is longer than the lookback now and then."""
    shift_ms = rng.randrange(1, 15) * 1000 + rng.randrange(101, 900)
    times = list(range(START_S * 1000 + shift_ms, END_S * 1000, STEP_MS))
    if gaps:
        for _ in range(6):
            first = rng.randrange(len(times))
            del times[first : first + rng.choice([1, 2, 5, 25])]
    return times


def _counters(rng: random.Random) -> Iterator[One]:
    for job in ("api", "web"):
        for instance in ("a", "b", "c"):
            for code in ("200", "500"):
                value, samples = float(rng.randrange(1000)), []
                for at in _times(rng, gaps=instance == "c"):
                    value = 0.0 if rng.random() < 0.02 else value + rng.randrange(50)
                    samples.append((at, value))
                labels = {"__name__": "requests_total", "job": job, "instance": instance, "code": code}
                yield One(labels, samples)


def _gauges(rng: random.Random) -> Iterator[One]:
    for job in ("api", "web"):
        for instance in ("a", "b", "c"):
            value, samples = 20.0, []
            for at in _times(rng, gaps=instance == "b"):
                value += rng.gauss(0, 3)
                samples.append((at, round(value, 3)))
            yield One({"__name__": "temperature", "job": job, "instance": instance}, samples)


def _special() -> Iterator[One]:
    """Values that are no ordinary numbers, one after the other."""
    cycles = {
        "nan": [1.0, math.nan, 2.0, math.nan, math.nan],
        "inf": [1.5, INF, 2.0, 3.0, INF],
        "minus": [-1.0, -INF, -2.5, 0.0, -0.0],
        "tiny": [5e-324, 1e-300, 1e-9, 2.5e-7, 0.0],
        "huge": [1.7e308, 1e300, 1e21, 123456789012345680.0, 2.0**53],
        "onlynan": [math.nan],
    }
    for number, (kind, cycle) in enumerate(cycles.items()):
        times = range(START_S * 1000 + 1137 + number * 1000, END_S * 1000, 20_000)
        yield One(
            {"__name__": "special", "kind": kind},
            [(at, cycle[place % len(cycle)]) for place, at in enumerate(times)],
        )


def _histograms(rng: random.Random) -> Iterator[One]:
    for job, instance in (("api", "a"), ("api", "b"), ("web", "a")):
        times = _times(rng, gaps=instance == "b")
        counts, total = [300.0, 500.0, 600.0, 700.0, 720.0], 480.0
        rows: list[list[float]] = []
        sums: list[float] = []
        for _ in times:
            if rng.random() < 0.01:
                counts, total = [0.0] * len(LIMITS), 0.0
            for _ in range(rng.randrange(12)):
                took = rng.expovariate(1.2)
                total += took
                counts = [count + (took <= float(limit)) for count, limit in zip(counts, LIMITS, strict=True)]
            rows.append(list(counts))
            sums.append(total)
        own = {"job": job, "instance": instance}
        for place, limit in enumerate(LIMITS):
            labels = {"__name__": "latency_seconds_bucket", "le": limit, **own}
            yield One(labels, [(at, row[place]) for at, row in zip(times, rows, strict=True)])
        yield One({"__name__": "latency_seconds_sum", **own}, list(zip(times, sums, strict=True)))
        counted = [(at, row[-1]) for at, row in zip(times, rows, strict=True)]
        yield One({"__name__": "latency_seconds_count", **own}, counted)


def _capacities() -> Iterator[One]:
    """Few and constant, to be matched with many; texts of every kind as labels."""
    for job, zone, value in (("api", "eu-1", 100.0), ("web", "us-2", 250.0), ("batch", "eu-1", 7.0)):
        times = range(START_S * 1000 + 2371, END_S * 1000, 30_000)
        yield One({"__name__": "capacity", "job": job, "zone": zone}, [(at, value) for at in times])
    for text in ("plain", 'quo"te', "back\\slash", "new\nline", "grün · 数", "a.b|c", "10", "9", "1e3"):
        at = START_S * 1000 + 2713
        samples = [(at + 30_000 * step, float(len(text.encode()) + step)) for step in range(178)]
        yield One({"__name__": "texts", "text": text}, samples)


def _ending() -> Iterator[One]:
    """Series that end with a stale marker, and one that comes back."""
    start = START_S * 1000 + 1531
    until = [(start + 15_000 * step, float(step)) for step in range(200)]
    yield One({"__name__": "ending", "how": "stale"}, [*until, (start + 15_000 * 200, STALE)])
    yield One({"__name__": "ending", "how": "silent"}, until)
    again = [(start + 15_000 * step, float(step)) for step in range(300, 358)]
    back = [*until, (start + 15_000 * 200, STALE), *again]
    yield One({"__name__": "ending", "how": "back"}, back)


def _young() -> Iterator[One]:
    """A counter that starts near zero, half an hour after the others."""
    start = START_S * 1000 + 1_800_641
    yield One({"__name__": "young_total"}, [(start + 15_000 * step, 2.0 + 3 * step) for step in range(240)])
