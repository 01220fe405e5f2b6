"""Writes numbered bundles into a Quiver and takes some of them out, noting each step, until it is killed.

A number is noted as accepted after `ingest` returned, and as taken before it is acknowledged.
"""

from __future__ import annotations

import os
import sys
import threading

import pyarrow as pa

from penstock.metrics import Registry
from penstock.quiver import AtCapacity, Quiver, QuiverConfig

CONFIG = {
    "segment": {"target_size": "200kB", "max_open_duration": "50ms"},
    "wal": {"max_size": "2MB", "rotation_target": "300kB"},
    "retention": {"size_cap": "1GB", "min_free": 0},
    "maintenance_interval": "10ms",
    "ack": {"flush_interval": "10ms", "checkpoint_records": 500},
}
WRITERS = 3


def note(fd: int, number: int) -> None:
    os.write(fd, b"%d\n" % number)


def write(quiver: Quiver, fd: int, first: int) -> None:
    number = first
    while True:
        number += WRITERS
        values = pa.array([number] * (1 + number % 40), pa.int64())
        batch = pa.record_batch({"n": values, "s": pa.array(["x" * 50] * len(values))})
        try:
            quiver.ingest({50 + number % 3: batch} if number % 5 else {50: batch, 51: batch})
        except AtCapacity:
            continue
        note(fd, number)


def take(quiver: Quiver, fd: int) -> None:
    while True:
        bundle = quiver.next_bundle("lake", timeout=1)
        if bundle is not None:
            note(fd, bundle.batch.column("n")[0].as_py())
            bundle.ack()


def main() -> None:
    path, first = sys.argv[1], int(sys.argv[2])
    accepted = os.open(f"{path}/accepted", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    taken = os.open(f"{path}/taken", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    quiver = Quiver.open(f"{path}/data", QuiverConfig.from_mapping(CONFIG), registry=Registry())
    quiver.register("lake")
    quiver.activate("lake")
    threads = [threading.Thread(target=take, args=(quiver, taken), daemon=True)]
    for n in range(WRITERS):
        threads.append(threading.Thread(target=write, args=(quiver, accepted, first + n), daemon=True))
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    threads[0].join()


if __name__ == "__main__":
    main()
