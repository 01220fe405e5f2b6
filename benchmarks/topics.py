"""Measure the event-log server on this machine: `python benchmarks/topics.py`.

The server runs in its own process, as in production. The load generator shares the machine with it. Figures
with a reference are measured in alternation with it in the same run. On a busy machine, read the ratios and
the CPU per record. Data is written to a temporary directory on the disk under test (`--dir`) and removed
afterwards. All servers listen only on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import peers
import topics_lone
import topics_reads
import topics_state
import topics_writes
from rounds import Plan
from sections import option_parser, run_sections, workdir
from table import Row

SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "latency": topics_writes.latency,
    "lone": topics_lone.lone,
    "singles": topics_writes.singles,
    "batches": topics_writes.batches,
    "diff": topics_reads.run,
    "recovery": topics_state.recovery,
    "memory": topics_state.memory,
}


def main() -> int:
    """Run the requested sections and print one table. With `--strict`, exit with 1 if a threshold is
    missed."""
    parser = option_parser("Measure the event-log server, its disk and its peers.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    options = parser.parse_args()
    if absent := peers.missing():
        print(f"peers are left out, not installed: {', '.join(absent)}", file=sys.stderr)
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
