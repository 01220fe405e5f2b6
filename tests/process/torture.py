"""Writers that are killed at random while they append tokens to one object. Run by its test, as a program.

The parent has no threads, so it can fork a writer in a millisecond and kill hundreds of them in seconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import xxhash

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Conflict
from penstock.objects.directory import ObjectDirectory
from penstock.storage.fs import OsFileSystem

KEY = "queue/manifest"
WRITERS = 4


def encode(tokens: list[str]) -> bytes:
    """The tokens and a checksum over them: a torn object does not decode."""
    body = "\n".join(tokens).encode()
    return xxhash.xxh3_64_digest(body) + body


def decode(data: bytes) -> list[str]:
    assert xxhash.xxh3_64_digest(data[8:]) == data[:8], "the object is torn"
    return data[8:].decode().split("\n") if data[8:] else []


def open_directory(root: str) -> ObjectDirectory:
    return ObjectDirectory(root, fs=OsFileSystem(), clock=SYSTEM_CLOCK)


def write_forever(root: str, journal: str, name: str) -> None:
    store = open_directory(root)
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    number = 0
    while True:
        blob = store.get(KEY)
        assert blob.version is not None
        token = f"{name}-{number}"
        try:
            store.put_if_match(KEY, encode([*decode(bytes(blob.data)), token]), blob.version)
        except Conflict:
            continue
        os.write(fd, f"{token}\n".encode())
        number += 1


def start(root: str, journal: str, name: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            write_forever(root, journal, name)
        except BaseException as error:
            os.write(2, f"{name}: {error!r}\n".encode())
        finally:
            os._exit(1)
    return pid


def main(root: str, journal: str, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    store = open_directory(root)
    store.put_if_absent(KEY, encode([]))
    born = iter(range(10**9))
    pids = [start(root, journal, f"w{next(born)}") for _ in range(WRITERS)]
    deadline = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(0.001, 0.03))
        victim = rng.randrange(WRITERS)
        os.kill(pids[victim], signal.SIGKILL)
        _, status = os.waitpid(pids[victim], 0)
        assert os.WIFSIGNALED(status), "a writer failed by itself"
        kills += 1
        decode(bytes(store.get(KEY).data))
        pids[victim] = start(root, journal, f"w{next(born)}")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.stdout.write(f"{kills}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
