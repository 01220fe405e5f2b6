"""A small database for tests: every word gets the next number and is stored under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.coordinator import (
    CoordinatorConfig,
    Delta,
    Durability,
    Flusher,
    FlushError,
    FlushEvent,
    Lagged,
    Put,
    Storage,
    StorageRead,
    Subscription,
    WriteCoordinator,
    pairs,
)
from penstock.metrics import Registry
from penstock.testing import ManualClock
from penstock.testing.memory_storage import MemoryDisk, MemoryStorage

T = TypeVar("T")
COUNTER = b"counter"
SIZE = 10
"""Size of one word."""


class WordDelta(Delta[str, int]):
    """Words in order, each with a unique number."""

    def init(self, image: int) -> None:
        self.next_number = image
        self.words: dict[int, str] = {}
        self.batches: list[int] = []

    def apply(self, writes: Sequence[str]) -> Sequence[object]:
        self.batches.append(len(writes))
        return super().apply(writes)

    def apply_one(self, write: str) -> int:
        if write.startswith("bad"):
            raise ValueError(f"{write} is no word")
        number, self.next_number = self.next_number, self.next_number + 1
        self.words[number] = write
        return number

    def estimate_size(self) -> int:
        return SIZE * len(self.words)

    def fork_image(self) -> int:
        return self.next_number


class WordFlusher(Flusher[WordDelta, StorageRead]):
    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    async def flush(self, delta: WordDelta) -> StorageRead:
        rows = [Put(b"w%08d" % number, word.encode()) for number, word in delta.words.items()]
        await self.storage.apply([*rows, Put(COUNTER, str(delta.next_number).encode())])
        return await self.storage.snapshot()

    async def sync(self) -> None:
        await self.storage.flush()


Words = WriteCoordinator[str, WordDelta, StorageRead]


async def words_in(read: StorageRead) -> list[str]:
    return [pair.value.decode() async for pair in pairs(read.scan(b"w"))]


class Follower:
    """A reader's words. It applies a delta that starts at its position, and otherwise reads everything
    again."""

    def __init__(self, subscription: Subscription[WordDelta, StorageRead], words: list[str]) -> None:
        self.words = words
        self.epoch = subscription.view.epoch
        self.rebuilds = 0
        self._subscription = subscription

    @classmethod
    async def open(cls, coordinator: Words) -> Follower:
        subscription = coordinator.subscribe()
        return cls(subscription, await words_in(subscription.view.snapshot))

    async def step(self) -> bool:
        """Follow the next event. Return False when there are no more."""
        try:
            event = await anext(self._subscription)
        except Lagged:
            return True
        except StopAsyncIteration:
            return False
        assert isinstance(event, FlushEvent)
        if event.epoch_range.hi <= self.epoch:
            return True
        if event.epoch_range.lo == self.epoch:
            self.words = [*self.words, *event.delta.words.values()]
        else:
            self.words = await words_in(event.snapshot)
            self.rebuilds += 1
        self.epoch = event.epoch_range.hi
        return True

    async def run(self) -> None:
        while await self.step():
            pass


class World:
    """One disk, one clock, and the coordinators opened over them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = MemoryDisk()
        self.storage = self.disk.open()
        self.registry = Registry()
        self.failures: list[FlushError] = []
        self._opened: list[Words] = []

    async def build(
        self,
        storage: MemoryStorage | None = None,
        delta: type[WordDelta] = WordDelta,
        size_of: Callable[[str], int] | None = None,
        **config: object,
    ) -> Words:
        """Return a coordinator over the current storage, not started."""
        storage = storage or self.storage
        counter = await storage.get(COUNTER)
        coordinator: Words = WriteCoordinator(
            delta,
            WordFlusher(storage),
            image=int(counter or 0),
            snapshot=storage.seen,
            config=CoordinatorConfig.from_mapping({"flush_size_threshold": 1000 * SIZE} | config),
            clock=self.clock,
            registry=self.registry,
            size_of=size_of,
            on_failure=self.failures.append,
        )
        self._opened.append(coordinator)
        return coordinator

    async def open(self, storage: MemoryStorage | None = None, **config: object) -> Words:
        """Return a started coordinator."""
        coordinator = await self.build(storage, **config)
        coordinator.start()
        return coordinator

    async def close(self) -> None:
        for coordinator in self._opened:
            await coordinator.abort()

    async def __aenter__(self) -> World:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def turns(count: int = 30) -> None:
    """Let all runnable tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def marks(coordinator: Words) -> tuple[int, int, int]:
    applied, flushed, durable = (coordinator.watermark(level) for level in Durability)
    return applied, flushed, durable


def is_waiting(task: asyncio.Task[T]) -> bool:
    return not task.done()
