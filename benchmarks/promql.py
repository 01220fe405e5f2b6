"""Measure queries and the codec of samples on this machine: `python benchmarks/promql.py`.

A thousand series, an hour of samples every 15 seconds. `rate` is compared with the same hand-written
arithmetic over two plain arrays, which must not be much faster: the difference is parsing, labels, gaps and
limits. Every other query is compared with the minimum of its work, one pass of numpy over the cells of its
result. Times are CPU times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.timeseries import Labels, Samples, Series
from penstock.timeseries.api import query_answer
from penstock.timeseries.gorilla import decode_many, encode_many
from penstock.timeseries.model import Floats, Times
from penstock.timeseries.promql import Engine, StaticSource
from rounds import Plan, interleave
from sections import run_planned
from table import Row

START_MS = 1_700_000_000_000
STEP_MS = 15_000
STEPS = 240
SERIES = 1000
QUERIES = {
    "rate": "rate(requests_total[5m])",
    "sum of rates": "sum by (job) (rate(requests_total[5m]))",
    "selector": "requests_total",
    "matching": "requests_total / on (job) group_left sum by (job) (requests_total)",
    "quantile over time": "quantile_over_time(0.9, requests_total[5m])",
}

YARDSTICKS = {
    "by hand": "the same arithmetic over two plain arrays",
    "floor": "one pass of arithmetic over the cells",
}
RATE_BAR = 2.0


def samples() -> list[Series]:
    rng = np.random.default_rng(7)
    times = START_MS + STEP_MS * np.arange(STEPS, dtype=np.int64)
    return [
        Series(
            labels=Labels.of(
                {"__name__": "requests_total", "job": f"job-{one % 10}", "instance": f"i-{one}"}
            ),
            samples=Samples(
                times + rng.integers(0, 200), np.cumsum(rng.integers(0, 90, STEPS)).astype(np.float64)
            ),
        )
        for one in range(SERIES)
    ]


def rate_by_hand(times: Times, values: Floats, steps: Times, range_ms: int) -> Floats:
    """Compute `rate` of series without gaps and of equal length. Each is a row of `times` and `values`."""
    rows, count = values.shape
    reach = int(times.max() - times.min()) + range_ms + 2
    keys = (times - times.min() + reach * np.arange(rows)[:, None]).ravel()
    ends = steps - times.min() + reach * np.arange(rows)[:, None]
    floor = count * np.arange(rows)[:, None]
    high = np.searchsorted(keys, ends, side="right")
    low = np.maximum(np.searchsorted(keys, ends - range_ms, side="right"), floor)
    flat_times, flat = times.ravel(), values.ravel()
    first, last = np.minimum(low, len(flat) - 1), np.maximum(high - 1, 0)
    fell = np.append(0.0, np.cumsum(np.where(flat[1:] < flat[:-1], flat[:-1], 0.0)))
    change = flat[last] - flat[first] + fell[last] - fell[first]
    sampled = (flat_times[last] - flat_times[first]) / 1000.0
    with np.errstate(all="ignore"):
        average = sampled / (high - low - 1)
        to_start = (flat_times[first] - (steps - range_ms)) / 1000.0
        to_end = (steps - flat_times[last]) / 1000.0
        to_start = np.where(to_start >= average * 1.1, average / 2, to_start)
        to_start = np.minimum(to_start, np.where(change > 0, sampled * (flat[first] / change), np.inf))
        to_end = np.where(to_end >= average * 1.1, average / 2, to_end)
        answer: Floats = change * (sampled + to_start + to_end) / sampled / (range_ms / 1000.0)
        return np.where(high - low >= 2, answer, np.nan)


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread, which does all the work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def queries(plan: Plan) -> list[Row]:
    """Measure range queries of 240 steps over all series, from text to result."""
    series = samples()
    source, engine = StaticSource(series), Engine()
    times, values = (
        np.stack([one.samples.timestamps for one in series]),
        np.stack([one.samples.values for one in series]),
    )
    steps = START_MS + STEP_MS * np.arange(STEPS, dtype=np.int64)
    cells = np.random.default_rng(1).random((SERIES, STEPS))
    end_ms = START_MS + STEP_MS * (STEPS - 1)

    def run(query: str) -> float:
        return timed(lambda: engine.range(query, START_MS, end_ms, STEP_MS).evaluate(source))

    contenders: dict[str, Callable[[], float]] = {
        name: partial(run, query) for name, query in QUERIES.items()
    }
    contenders["by hand"] = lambda: timed(lambda: rate_by_hand(times, values, steps, 300_000))
    contenders["floor"] = lambda: timed(lambda: np.sqrt(cells * 2.0 + 1.0))
    rates = interleave(contenders, work=SERIES * STEPS, rounds=plan.pick(7, 3))
    note = f"{SERIES:,} series x {STEPS} steps, samples every 15 s"
    return [
        Row(
            section="queries",
            what=f"{name}: {query}",
            ours=SERIES * STEPS / rates.median(name) * 1e3,
            ceiling=SERIES * STEPS / rates.median(yardstick) * 1e3,
            ratio=rates.ratio(yardstick, name),
            bar=RATE_BAR if name == "rate" else None,
            at_most=True,
            unit="ms CPU",
            against=YARDSTICKS[yardstick],
            note=note,
        )
        for name, query in QUERIES.items()
        for yardstick in ["by hand" if name == "rate" else "floor"]
    ]


def codec(plan: Plan) -> list[Row]:
    """Measure encoding and decoding a thousand streams of an hour together."""
    batch = [series.samples for series in samples()]
    streams = encode_many(batch)
    contenders: dict[str, Callable[[], float]] = {
        "encode": lambda: timed(lambda: encode_many(batch)),
        "decode": lambda: timed(lambda: decode_many(streams)),
    }
    count = SERIES * STEPS
    rates = interleave(contenders, work=count, rounds=plan.pick(7, 3))
    size = sum(map(len, streams)) / count
    note = f"{size:.1f} bytes a sample of 16"
    return [
        Row(section="codec", what=name, ours=rates.median(name) / 1e6, unit="M samples/s of CPU", note=note)
        for name in contenders
    ]


def answers(plan: Plan) -> list[Row]:
    """Measure the JSON of a matrix of all cells."""
    source, engine = StaticSource(samples()), Engine()
    end_ms = START_MS + STEP_MS * (STEPS - 1)
    result = engine.range("rate(requests_total[5m])", START_MS, end_ms, STEP_MS).evaluate(source)
    seconds = min(timed(lambda: query_answer(result)) for _ in range(plan.pick(5, 2)))
    return [
        Row(
            section="answers",
            what="JSON of a matrix",
            ours=SERIES * STEPS / seconds / 1e6,
            unit="M points/s of CPU",
        )
    ]


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"queries": queries, "codec": codec, "answers": answers}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure PromQL and the codec of samples.", SECTIONS, quick="a few seconds, with coarser figures"
        )
    )
