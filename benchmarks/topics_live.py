"""Measure the live side of the event-log server on this machine: `python benchmarks/topics_live.py`.

The server runs as its users run it, in a process of its own; one load generator is every client at once and
shares the machine with it, so what it takes to read the deliveries is in the figures. Data goes to a
temporary directory (`--dir`) and is removed again; the server listens on loopback only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import topics_jobs
import topics_streams
from rounds import Plan
from sections import option_parser, run_sections, workdir
from table import Row

SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "watch": topics_streams.watch_latency,
    "fanout": topics_streams.socket_fanout,
    "queue": topics_jobs.queue_jobs,
    "routers": topics_jobs.router_fanout,
    "priority": topics_jobs.urgent_topic,
}


def main() -> int:
    """Run the sections asked for and print one table. With `--strict`, exits with 1 when a bar is missed."""
    parser = option_parser("Measure live delivery by the event-log server.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
