"""Measure the event-log server on this machine: `python benchmarks/topics.py`.

The server runs as its users run it, in a process of its own; the load generator shares the machine with it.
What has a yardstick stands beside it, measured in the same run in turns: on a busy machine, read the ratios
and the CPU per record. Data goes to a temporary directory on the disk under test (`--dir`) and is removed
again; all servers listen on loopback only.
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
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
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
