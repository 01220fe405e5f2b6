"""The exactly-once recipe as a process: `kill_consumer.py STORE DATABASE [--once] [--die-at STEP]`.

With `--die-at` it kills itself, as `kill -9` would, when it passes that step, or with
`--passing N` when it does so for the n-th time. With `--trace` the names of the steps go to standard output.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections import Counter

from examples.exactly_once_sqlite import consume

from penstock.buffer import ConsumerConfig

GRACE = "300ms"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("database")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--die-at")
    parser.add_argument("--passing", type=int, default=1)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    passed: Counter[str] = Counter()

    def step(name: str) -> None:
        if arguments.trace:
            print(name, flush=True)
        passed[name] += 1
        if name == arguments.die_at and passed[name] == arguments.passing:
            os.kill(os.getpid(), signal.SIGKILL)

    config = ConsumerConfig(store=arguments.store, gc_interval="100ms", gc_grace_period=GRACE)
    consume(config, arguments.database, follow=not arguments.once, step=step)


if __name__ == "__main__":
    main()
