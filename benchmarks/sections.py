"""The framework of all benchmarks: run the sections in order, then print one table."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rounds import Plan
from table import Row, print_table, write_json

__all__ = ["PlannedSection", "Section", "option_parser", "run_planned", "run_sections", "workdir"]

Section: TypeAlias = Callable[[], list[Row]]
PlannedSection: TypeAlias = Callable[[Plan], list[Row]]


def option_parser(description: str, sections: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser of the options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", choices=list(sections), help="one section (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--strict", action="store_true", help="fail when a bar is missed")
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure (default: temporary)")
    return parser


@contextmanager
def workdir(parent: Path | None) -> Iterator[Path]:
    """Create a directory for data that is removed at the end, also after a SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def run_sections(options: argparse.Namespace, sections: Mapping[str, Section]) -> int:
    """Run the requested sections and print their table. With `--strict`, return 1 if a threshold is
    missed."""
    load = os.getloadavg()[0]
    rows: list[Row] = []
    began = time.monotonic()
    for name in options.only or sections:
        started = time.monotonic()
        print(f"{name} …", file=sys.stderr, flush=True)
        rows += sections[name]()
        print(f"{name} {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(f"{os.cpu_count()} CPUs, load {load:.1f} at the start, {time.monotonic() - began:.0f} s in all\n")
    print_table(rows)
    if options.json is not None:
        write_json(rows, options.json)
    return 1 if options.strict and any(row.met is False for row in rows) else 0


def run_planned(description: str, sections: Mapping[str, PlannedSection], *, quick: str) -> int:
    """Run a benchmark whose sections share one plan. Return the exit code.

    `quick` is the help text of `--quick`.
    """
    parser = option_parser(description, sections)
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in sections.items()})
