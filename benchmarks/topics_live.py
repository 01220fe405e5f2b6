"""Measure the live side of the event-log server on this machine: `python benchmarks/topics_live.py`.

The server runs in its own process, as in production. One load generator simulates all clients on the same
machine, so the figures include the cost of reading the deliveries. Data is written to a temporary directory
(`--dir`) and removed afterwards. The server listens only on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import topics_jobs
import topics_streams
from rounds import Plan
from sections import run_planned
from table import Row

SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "watch": topics_streams.watch_latency,
    "fanout": topics_streams.socket_fanout,
    "queue": topics_jobs.queue_jobs,
    "routers": topics_jobs.router_fanout,
    "priority": topics_jobs.urgent_topic,
}


if __name__ == "__main__":
    sys.exit(
        run_planned(
            "Measure live delivery by the event-log server.",
            SECTIONS,
            quick="about a minute, with coarser figures",
        )
    )
