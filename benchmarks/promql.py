"""Measure queries and the codec of samples on this machine: `python benchmarks/promql.py`.

A thousand series, an hour of samples every 15 seconds. Beside each query stands the floor of its work:
one pass of numpy over the cells it answers. Times are of CPU.
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
from penstock.timeseries.promql import Engine, StaticSource
from rounds import Plan, interleave
from sections import option_parser, run_sections, workdir
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


def timed(work: Callable[[], object]) -> float:
    """Seconds of CPU: one thread does all of it, and others on the machine do not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


def queries(plan: Plan) -> list[Row]:
    """Range queries of 240 steps over all series, from text to result."""
    source, engine = StaticSource(samples()), Engine()
    cells = np.random.default_rng(1).random((SERIES, STEPS))
    end_ms = START_MS + STEP_MS * (STEPS - 1)

    def run(query: str) -> float:
        return timed(lambda: engine.range(query, START_MS, end_ms, STEP_MS).evaluate(source))

    contenders: dict[str, Callable[[], float]] = {
        name: partial(run, query) for name, query in QUERIES.items()
    }
    contenders["floor"] = lambda: timed(lambda: np.sqrt(cells * 2.0 + 1.0))
    rates = interleave(contenders, work=SERIES * STEPS, rounds=plan.pick(7, 3))
    return [
        Row(
            section="queries",
            what=f"{name}: {QUERIES[name]}",
            ours=SERIES * STEPS / rates.median(name) * 1e3,
            ceiling=SERIES * STEPS / rates.median("floor") * 1e3,
            unit="ms CPU",
            against="one pass of arithmetic over the cells",
            note=f"{SERIES:,} series x {STEPS} steps, samples every 15 s",
        )
        for name in QUERIES
    ]


def codec(plan: Plan) -> list[Row]:
    """Streams of an hour, encoded and decoded, a thousand at once."""
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
    """The JSON of a matrix of all cells."""
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


def main() -> int:
    """Run the sections asked for and print one table."""
    parser = option_parser("Measure PromQL and the codec of samples.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="a few seconds, with coarser figures")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
