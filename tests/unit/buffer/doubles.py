"""A queue for one test, with its store, its clock, and stores that count, fail and wait on request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from penstock.buffer import manifest as m
from penstock.clock import Clock
from penstock.errors import NotFound, PenstockError
from penstock.metrics import Registry
from penstock.objects import Blob, ObjectInfo, Version
from penstock.objects.memory import MemoryStore
from penstock.objects.store import ByteRange, Data
from penstock.testing import ManualClock

T0 = 1_700_000_000_000
MANIFEST = "ingest/manifest"
GOLDEN = Path(__file__).parents[2] / "golden" / "buffer"


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


Hook = Callable[[str, str], "PenstockError | None"]


class ScriptedStore(MemoryStore):
    """Logs every call as (operation, key). A hook may return an error to raise before or after the call."""

    def __init__(self, *, clock: Clock) -> None:
        super().__init__("scripted", clock=clock)
        self.calls: list[tuple[str, str]] = []
        self.before: Hook = lambda op, key: None
        self.after: Hook = lambda op, key: None
        self.gate: Callable[[str, str], asyncio.Event | None] = lambda op, key: None

    async def _enter(self, op: str, key: str) -> None:
        self.calls.append((op, key))
        if (event := self.gate(op, key)) is not None:
            await event.wait()
        if (error := self.before(op, key)) is not None:
            raise error

    def _leave(self, op: str, key: str) -> None:
        if (error := self.after(op, key)) is not None:
            raise error

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        await self._enter("get", key)
        return await super().get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        await self._enter("get_if_changed", key)
        return await super().get_if_changed(key, version)

    async def put(self, key: str, data: Data) -> Version:
        await self._enter("put", key)
        version = await super().put(key, data)
        self._leave("put", key)
        return version

    async def put_if_absent(self, key: str, data: Data) -> Version:
        await self._enter("cas", key)
        version = await super().put_if_absent(key, data)
        self._leave("cas", key)
        return version

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        await self._enter("cas", key)
        new = await super().put_if_match(key, data, version)
        self._leave("cas", key)
        return new

    async def list(self, prefix: str) -> list[ObjectInfo]:
        await self._enter("list", prefix)
        return await super().list(prefix)

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        doomed = [*keys]
        failed: dict[str, PenstockError] = {}
        for key in doomed:
            self.calls.append(("delete", key))
            if (error := self.before("delete", key)) is not None:
                failed[key] = error
        await super().delete_many([key for key in doomed if key not in failed])
        return failed

    def count(self, op: str, key: str | None = None) -> int:
        return sum(call == op and (key is None or of == key) for call, of in self.calls)


def once(error: PenstockError, op: str, key_part: str = "", *, times: int = 1, skip: int = 0) -> Hook:
    """Return a hook that gives `error` for the first `times` matching calls after `skip` of them."""
    seen = 0

    def hook(called: str, key: str) -> PenstockError | None:
        nonlocal seen
        if called != op or (key != MANIFEST if key_part == MANIFEST else key_part not in key):
            return None
        seen += 1
        return error if skip < seen <= skip + times else None

    return hook


@dataclass
class Queue:
    """The queue of a test, with its producers, consumers and collectors."""

    clock: ManualClock = field(default_factory=ManualClock)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    registry: Registry = field(default_factory=Registry)

    def __post_init__(self) -> None:
        self.store = ScriptedStore(clock=self.clock)
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []

    def producer(self, **settings: object) -> Producer:
        config = ProducerConfig(store=self.store, **settings)  # type: ignore[arg-type]
        made = Producer(config, self.clock, rng=self.rng, registry=self.registry)
        self.producers.append(made)
        return made

    def unopened(self, **settings: object) -> Consumer:
        settings = {"gc_enabled": False} | settings
        config = ConsumerConfig(store=self.store, **settings)  # type: ignore[arg-type]
        made = Consumer(config, clock=self.clock, rng=self.rng, registry=self.registry)
        self.consumers.append(made)
        return made

    async def consumer(self, last_acked: int | None = None, **settings: object) -> Consumer:
        made = self.unopened(**settings)
        await made.initialize(last_acked)
        return made

    async def raw(self, key: str = MANIFEST) -> bytes:
        try:
            return bytes((await MemoryStore.get(self.store, key)).data)
        except NotFound:
            return m.EMPTY_MANIFEST

    async def manifest(self) -> m.Manifest:
        return m.decode_manifest(await self.raw())

    async def sequences(self) -> list[int]:
        return [entry.sequence for entry in (await self.manifest()).entries]

    async def keys(self, prefix: str = "") -> list[str]:
        return [info.key for info in await MemoryStore.list(self.store, prefix)]

    async def store_raw(self, key: str, data: bytes) -> None:
        await MemoryStore.put(self.store, key, data)

    async def fill(self, count: int, **settings: object) -> None:
        """Append `count` batches of one record each: b"0", b"1", ..."""
        producer = self.producer(**settings)
        for number in range(count):
            handle = await producer.produce([b"%d" % number], b"meta-%d" % number)
            await producer.flush()
            assert handle.watcher.result() is not None
        await producer.close()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.value(f"buffer.{name}", **labels)

    async def close(self) -> None:
        self.store.before = self.store.after = lambda op, key: None
        self.store.gate = lambda op, key: None
        for consumer in self.consumers:
            await consumer.release()
        for producer in self.producers:
            await asyncio.gather(producer.close(), return_exceptions=True)


@asynccontextmanager
async def queue() -> AsyncIterator[Queue]:
    made = Queue()
    try:
        yield made
    finally:
        await made.close()


async def turns(count: int = 50) -> None:
    """Let every ready task run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)
