"""Measure the pipeline on Spark on this machine: `python benchmarks/spark.py`.

Every throughput stands beside one of Spark's own or a ceiling, measured in the same session in turns: on a
busy machine, read the ratios. Data goes to a temporary directory (`--dir`) and is removed again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import penstock
import spark_overhead
import spark_soak
import spark_throughput
from penstock.spark import build_session
from spark_ceiling import ArrowFiles
from spark_runs import Bench
from table import Row, print_table, write_json

SECTIONS = ("source", "sinks", "micro-batch", "soak")
FULL_RECORDS = 10_000_000
_CONF = {
    "spark.driver.memory": "2g",  # so that a soak sees the heap at its full size soon
    "spark.python.authenticate.socketTimeout": "60s",  # a busy machine starts workers slowly
}


def main() -> int:
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that data and Spark go in any case
    workdir = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=options.dir))
    load = os.getloadavg()[0]
    rows: list[Row] = []
    began = time.monotonic()
    bench = _open(workdir)
    try:
        for name in options.only or SECTIONS:
            started = time.monotonic()
            print(f"{name} …", file=sys.stderr, flush=True)
            rows += _section(name, bench, options)()
            print(f"{name} {time.monotonic() - started:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)  # first: stopping Spark fails after an interrupt
        bench.spark.stop()
    print(f"{os.cpu_count()} CPUs, load {load:.1f} at the start, {time.monotonic() - began:.0f} s in all\n")
    print_table(rows)
    if options.json is not None:
        write_json(rows, options.json)
    return 1 if options.strict and any(row.met is False for row in rows) else 0


def _section(name: str, bench: Bench, options: argparse.Namespace) -> Callable[[], list[Row]]:
    records = FULL_RECORDS if options.full else options.records
    return {
        "source": lambda: spark_throughput.read(bench, records, options.rounds),
        "sinks": lambda: spark_throughput.write(bench, records, options.rounds),
        "micro-batch": lambda: spark_overhead.run(bench, options.batches),
        "soak": lambda: spark_soak.run(bench, options.soak),
    }[name]


def _open(workdir: Path) -> Bench:
    here, source = Path(__file__).parent, Path(penstock.__file__).parents[1]
    # The workers import the ceiling's source by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(here), str(source), os.environ.get("PYTHONPATH")])
    )
    cores = os.cpu_count() or 1
    spark = build_session("penstock bench", master=f"local[{cores}]", conf=_CONF)
    spark.dataSource.register(ArrowFiles)
    return Bench(spark=spark, workdir=workdir, partitions=cores)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the pipeline on Spark against Spark's own parts.")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="one section (repeatable)")
    parser.add_argument("--records", type=int, default=2_000_000, help="per round (default 2 million)")
    parser.add_argument("--full", action="store_true", help=f"{FULL_RECORDS:,} records per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the throughputs (default 5)")
    parser.add_argument("--batches", type=int, default=30, help="micro-batches for their cost (default 30)")
    parser.add_argument("--soak", type=float, default=1.0, metavar="MINUTES", help="default 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--strict", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
