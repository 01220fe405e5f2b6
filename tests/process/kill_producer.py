"""A producer process that journals the answers it gets: `kill_producer.py STORE JOURNAL NAME`.

It writes a line before each call and another after its ack, and continues until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from penstock.buffer import Producer, ProducerConfig
from penstock.errors import PenstockError

LANES = 3


async def lane(producer: Producer, journal: int, name: str) -> None:
    rng = random.Random(name)
    number = 0
    while True:
        count = rng.randint(1, 20)
        call = f"{name}.{number}"
        os.write(journal, f"started {call} {count}\n".encode())
        handle = await producer.produce([f"{call}.{place}".encode() for place in range(count)])
        try:
            await handle.watcher.await_durable()
        except PenstockError as error:
            os.write(journal, f"failed {call} {type(error).__name__}\n".encode())
        else:
            os.write(journal, f"acked {call} {count}\n".encode())
            os.fsync(journal)
        number += 1


async def main(store: str, journal_path: str, name: str) -> None:
    journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    config = ProducerConfig(store=store, flush_interval="10ms", flush_size_bytes=300)
    async with Producer(config) as producer:
        await asyncio.gather(*(lane(producer, journal, f"{name}.{number}") for number in range(LANES)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
