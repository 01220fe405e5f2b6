"""A database process that journals the answers it gets: `kill_coordinator.py STORE JOURNAL NAME`.

It notes a word before it is written and again when it is durable, and continues until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

from tests.unit.coordinator.doubles import COUNTER, WordDelta, WordFlusher

from penstock.coordinator import CoordinatorConfig, Durability, StorageRead, SyncMode, WriteCoordinator
from penstock.coordinator.slate import SlateStorage

LANES = 8


async def lane(coordinator: WriteCoordinator[str, WordDelta, StorageRead], journal: int, name: str) -> None:
    for number in count():
        word = f"{name}.{number}"
        os.write(journal, f"started {word}\n".encode())
        await (await coordinator.write(word)).wait(Durability.DURABLE)
        os.write(journal, f"durable {word}\n".encode())


async def main(store: str, journal_path: str, name: str) -> None:
    journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    storage = await SlateStorage.open(store, "words")
    coordinator: WriteCoordinator[str, WordDelta, StorageRead] = WriteCoordinator(
        WordDelta,
        WordFlusher(storage),
        image=int(await storage.get(COUNTER) or 0),
        snapshot=await storage.snapshot(),
        config=CoordinatorConfig(flush_interval="3ms", sync_mode=SyncMode.EVERY_FLUSH),
    )
    coordinator.start()
    await asyncio.gather(*(lane(coordinator, journal, f"{name}.{number}") for number in range(LANES)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
