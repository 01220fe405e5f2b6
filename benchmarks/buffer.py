"""Measure the buffer on this machine: `python benchmarks/buffer.py`.

Every figure is compared with a ceiling or a peer measured in alternation in the same run, so ratios are
meaningful even if absolute numbers are not. On a busy machine, read the ratios. Data is written to a
temporary directory on the disk under test (`--dir`) and removed afterwards. Servers listen only on loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import appends
import codec
import consume
import memory
import peers
import produce
import slow_store
from rounds import Plan
from sections import option_parser, run_sections, workdir
from table import Row


def _peers(plan: Plan) -> list[Row]:
    if absent := peers.missing():
        print(f"left out, not installed: {', '.join(absent)}", file=sys.stderr)
        return []
    return peers.run(plan)


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "codec": codec.run,
    "produce": produce.run,
    "consume": consume.run,
    "append": appends.backlog,
    "drain": consume.drain,
    "contention": appends.contention,
    "ledger": appends.ledger,
    "slow": slow_store.run,
    "foreign": slow_store.foreign,
    "memory": memory.run,
    "peers": _peers,
}


def main() -> int:
    """Run the requested sections and print one table. With `--strict`, exit with 1 if a threshold is
    missed."""
    parser = option_parser("Measure the buffer against raw I/O and real peers.", SECTIONS)
    parser.add_argument("--quick", action="store_true", help="about a minute, with coarser figures")
    options = parser.parse_args()
    with workdir(options.dir) as data:
        plan = Plan(quick=options.quick, workdir=data)
        return run_sections(options, {name: partial(section, plan) for name, section in SECTIONS.items()})


if __name__ == "__main__":
    sys.exit(main())
