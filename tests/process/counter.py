"""Adds to a counter object from several threads. Run by its test, as a program."""

from __future__ import annotations

import random
import sys
import threading
import time

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Conflict
from penstock.objects.directory import ObjectDirectory
from penstock.storage.fs import OsFileSystem

KEY = "counter"


def add(store: ObjectDirectory, times: int, rng: random.Random) -> None:
    done = 0
    while done < times:
        blob = store.get(KEY)
        assert blob.version is not None
        try:
            store.put_if_match(KEY, str(int(bytes(blob.data)) + 1).encode(), blob.version)
        except Conflict:
            time.sleep(rng.uniform(0, 0.005))
        else:
            done += 1


def main(root: str, threads: int, times: int) -> None:
    store = ObjectDirectory(root, fs=OsFileSystem(), clock=SYSTEM_CLOCK)
    workers = [threading.Thread(target=add, args=(store, times, random.Random(n))) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
