"""Measure the pipeline on Spark on this machine: `python benchmarks/spark.py`.

Every throughput is compared with one of Spark or a ceiling, measured in alternation in the same session. On a
busy machine, read the ratios. Data is written to a temporary directory (`--dir`) and removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import penstock
import spark_overhead
import spark_soak
import spark_throughput
from penstock.spark import build_session
from sections import Section, option_parser, run_sections, workdir
from spark_ceiling import ArrowFiles
from spark_runs import Bench

SECTIONS = ("source", "sinks", "micro-batch", "soak")
FULL_RECORDS = 10_000_000
_CONF = {
    "spark.driver.memory": "2g",  # so that the heap of a soak reaches its full size soon
    "spark.python.authenticate.socketTimeout": "60s",  # a busy machine starts workers slowly
}


def main() -> int:
    """Run the requested sections and print one table. With `--strict`, exit with 1 if a threshold is
    missed."""
    options = _options()
    with workdir(options.dir) as data:
        bench = _open(data)
        try:
            return run_sections(options, _sections(bench, options))
        finally:
            shutil.rmtree(data, ignore_errors=True)  # first: stopping Spark fails after an interrupt
            bench.spark.stop()


def _sections(bench: Bench, options: argparse.Namespace) -> dict[str, Section]:
    records = FULL_RECORDS if options.full else options.records
    return {
        "source": lambda: spark_throughput.read(bench, records, options.rounds),
        "sinks": lambda: spark_throughput.write(bench, records, options.rounds),
        "micro-batch": lambda: spark_overhead.run(bench, options.batches),
        "soak": lambda: spark_soak.run(bench, options.soak),
    }


def _open(data: Path) -> Bench:
    here, source = Path(__file__).parent, Path(penstock.__file__).parents[1]
    # The workers import the ceiling's source by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(here), str(source), os.environ.get("PYTHONPATH")])
    )
    cores = os.cpu_count() or 1
    spark = build_session("penstock bench", master=f"local[{cores}]", conf=_CONF)
    spark.dataSource.register(ArrowFiles)
    return Bench(spark=spark, workdir=data, partitions=cores)


def _options() -> argparse.Namespace:
    parser = option_parser("Measure the pipeline on Spark against Spark's own parts.", SECTIONS)
    parser.add_argument("--records", type=int, default=2_000_000, help="per round (default 2 million)")
    parser.add_argument("--full", action="store_true", help=f"{FULL_RECORDS:,} records per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the throughputs (default 5)")
    parser.add_argument("--batches", type=int, default=30, help="micro-batches for their cost (default 30)")
    parser.add_argument("--soak", type=float, default=1.0, metavar="MINUTES", help="default 1")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
