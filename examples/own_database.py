"""Your own database: counters over object storage, durable when the call returns.

    python examples/own_database.py file:///var/penstock/counters apples=3 pears=1

Prints every counter. Kill it at any point: an acknowledged addition is counted exactly once.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections import Counter
from collections.abc import Sequence

from penstock.coordinator import (
    Delta,
    Durability,
    Flusher,
    Merge,
    Put,
    Storage,
    StorageRead,
    WriteCoordinator,
    pairs,
)
from penstock.coordinator.keys import Subsystem, key_prefix
from penstock.coordinator.slate import SlateStorage

COUNTERS = key_prefix(Subsystem.KV, 1) + b"c"
ADDITIONS = key_prefix(Subsystem.KV, 1) + b"n"
U64 = struct.Struct("<Q")


def add_up(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Merge operands. Addition is associative, so the storage may group them in any way."""
    return U64.pack(sum(U64.unpack(operand)[0] for operand in operands))


class CountDelta(Delta[tuple[str, int], int]):
    """The sums since the last flush. The image is the number of additions ever made."""

    def init(self, image: int) -> None:
        self.additions = image
        self.sums: Counter[str] = Counter()

    def apply_one(self, write: tuple[str, int]) -> int:
        name, amount = write
        if not name or amount < 0:  # check first, then change: a refused write changes nothing
            raise ValueError(f"{name}={amount} is not an addition to a counter")
        self.sums[name] += amount
        self.additions += 1
        return self.additions

    def estimate_size(self) -> int:
        return 100 * len(self.sums)

    def fork_image(self) -> int:
        return self.additions


class CountFlusher(Flusher[CountDelta, StorageRead]):
    """One delta, one batch: a thousand additions to a counter are one merge."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def flush(self, delta: CountDelta) -> StorageRead:
        merges = [Merge(COUNTERS + name.encode(), U64.pack(amount)) for name, amount in delta.sums.items()]
        await self._storage.apply([*merges, Put(ADDITIONS, U64.pack(delta.additions))])
        return await self._storage.snapshot()

    async def sync(self) -> None:
        await self._storage.flush()


async def count(url: str, additions: list[tuple[str, int]]) -> dict[str, int]:
    """Add, wait until all of it is durable, and return every counter."""
    async with await SlateStorage.open(url, "counters", merge=add_up) as storage:
        image = U64.unpack(await storage.get(ADDITIONS) or bytes(U64.size))[0]
        counters: WriteCoordinator[tuple[str, int], CountDelta, StorageRead] = WriteCoordinator(
            CountDelta, CountFlusher(storage), image=image, snapshot=await storage.snapshot()
        )
        async with counters:
            handles = [await counters.write(addition) for addition in additions]
            await counters.flush(durable=True)
            for handle in handles:
                await handle.wait(Durability.DURABLE)
            rows = [row async for row in pairs(counters.view().snapshot.scan(COUNTERS))]
    return {row.key[len(COUNTERS) :].decode(): U64.unpack(row.value)[0] for row in rows}


if __name__ == "__main__":
    store, *texts = sys.argv[1:]
    wanted = [(name, int(amount)) for name, _, amount in (text.partition("=") for text in texts)]
    for name, total in asyncio.run(count(store, wanted)).items():
        sys.stdout.write(f"{name} {total}\n")
