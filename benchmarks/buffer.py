"""Measure the buffer on this machine: `python benchmarks/buffer.py`.

Every figure stands beside a ceiling or a peer measured in the same run, in turns, so a ratio means something
even where the absolute numbers do not: on a busy machine, read the ratios. Data goes to a temporary directory
on the disk under test (`--dir`) and is removed again; servers listen on loopback only.
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

import appends
import codec
import consume
import memory
import peers
import produce
from rounds import Plan
from table import Row, print_table, write_json

SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "codec": codec.run,
    "produce": produce.run,
    "consume": consume.run,
    "append": appends.backlog,
    "drain": consume.drain,
    "contention": appends.contention,
    "memory": memory.run,
    "peers": peers.run,
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
    try:
        for name in options.only or SECTIONS:
            if name == "peers" and (absent := peers.missing()):
                print(f"peers … left out, not installed: {', '.join(absent)}", file=sys.stderr)
                continue
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
    parser = argparse.ArgumentParser(description="Measure the buffer against raw I/O and real peers.")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="one section (repeatable)")
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--strict", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
