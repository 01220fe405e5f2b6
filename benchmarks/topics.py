"""Measure the event-log server on this machine: `python benchmarks/topics.py`.

The server runs as its users run it, in a process of its own; the load generator shares the machine with it.
What has a yardstick stands beside it, measured in the same run in turns: on a busy machine, read the ratios
and the CPU per record. Data goes to a temporary directory on the disk under test (`--dir`) and is removed
again; all servers listen on loopback only.
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

import peers
import topics_reads
import topics_state
import topics_writes
from rounds import Plan
from table import Row, print_table, write_json

SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "latency": topics_writes.latency,
    "lone": topics_writes.lone,
    "singles": topics_writes.singles,
    "batches": topics_writes.batches,
    "diff": topics_reads.run,
    "recovery": topics_state.recovery,
    "memory": topics_state.memory,
}


def main() -> int:
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that data and servers go in any case
    workdir = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=options.dir))
    plan = Plan(quick=options.quick, workdir=workdir)
    load = os.getloadavg()[0]
    rows: list[Row] = []
    began = time.monotonic()
    if absent := peers.missing():
        print(f"peers are left out, not installed: {', '.join(absent)}", file=sys.stderr)
    try:
        for name in options.only or SECTIONS:
            started = time.monotonic()
            print(f"{name} …", end=" ", file=sys.stderr, flush=True)
            rows += SECTIONS[name](plan)
            print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    print(f"{os.cpu_count()} CPUs, load {load:.1f} at the start, {time.monotonic() - began:.0f} s in all\n")
    print_table(rows)
    if options.json is not None:
        write_json(rows, options.json)
    return 1 if options.strict and any(row.met is False for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the event-log server, its disk and its peers.")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="one section (repeatable)")
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--strict", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
