"""An engine on a disk in memory with a fixed clock, and helpers for its tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
import pytest

from penstock.errors import OutcomeUnknown
from penstock.testing.clock import ManualClock
from penstock.testing.disk import DiskFault, FakeDisk, PlannedFault, PowerCut, Survival
from penstock.testing.topics_kit import InlineCommitters, InlineWorkers
from penstock.topics import Engine, EngineConfig, NewRecord, Page, TopicConfig

T = TypeVar("T")

DATA = "/data"
COLD = "/cold"
FSYNC = TopicConfig(durable=True)


def rec(value: object, *, tag: str | None = None, node: str | None = None, meta: object = None) -> NewRecord:
    raw_meta = None if meta is None else msgspec.Raw(json.dumps(meta).encode())
    return NewRecord(data=msgspec.Raw(json.dumps(value).encode()), tag=tag, node=node, meta=raw_meta)


def recs(*values: object, tag: str | None = None) -> list[NewRecord]:
    return [rec(value, tag=tag) for value in values]


class DetachedWorkers(InlineWorkers):
    """Workers whose work continues after its caller is cancelled, as in a thread."""

    async def tidy(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.ensure_future(self._do(work)))


class World:
    """One data directory: open it, stop it, cut the power, open it again."""

    def __init__(
        self,
        *,
        disk: FakeDisk | None = None,
        clock: ManualClock | None = None,
        make_workers: Callable[[], InlineWorkers] = InlineWorkers,
        is_quick: bool = False,
        **config: object,
    ):
        self.clock = clock or ManualClock()
        self.disk = disk or FakeDisk(clock=self.clock)
        self.config: dict[str, object] = {"data_dir": DATA, "wal_shards": 1, "wal_file_bytes": 4096, **config}
        self._make_workers = make_workers
        self.is_quick = is_quick
        self.engine: Engine
        self.committers: InlineCommitters
        self.workers: InlineWorkers

    async def open(self, **changes: object) -> Engine:
        self.config |= changes
        self.committers, self.workers = InlineCommitters(are_quick=self.is_quick), self._make_workers()
        self.engine = Engine(
            EngineConfig(**self.config),  # type: ignore[arg-type]
            fs=self.disk,
            clock=self.clock,
            workers=self.workers,
            committers=self.committers,
        )
        await self.engine.start()
        return self.engine

    async def restart(self, **changes: object) -> Engine:
        """Stop cleanly and start again."""
        await self.engine.close()
        return await self.open(**changes)

    async def crash(
        self, survival: Survival = Survival.NOTHING, *, rng: random.Random | None = None, **changes: object
    ) -> Engine:
        """Cut the power, keep this part of the data that was not durable, and start again."""
        self.unplug(survival, rng)
        return await self.open(**changes)

    async def abandon(self) -> Engine:
        """Kill the process and start again without a power failure.

        Data that was not durable still is not.
        """
        self._stop_ticking()
        self.engine._lock.__exit__(None, None, None)
        return await self.open()

    def unplug(self, survival: Survival = Survival.NOTHING, rng: random.Random | None = None) -> None:
        self._stop_ticking()
        self.disk = self.disk.crash(survival, rng)

    def _stop_ticking(self) -> None:
        routing = self.engine._routing
        routing.is_closed = True
        if routing._ticking is not None:
            routing._ticking.cancel()
        upkeep = self.engine._maintenance
        for ticking in (None if upkeep is None else upkeep._ticking, self.engine.scheduler._ticking):
            if ticking is not None:
                ticking.cancel()

    async def kill(self, **changes: object) -> Engine:
        """Kill the process while the machine keeps running."""
        return await self.crash(Survival.EVERYTHING, **changes)

    def files(self) -> list[str]:
        return [name for name, _ in self.disk.list_files(DATA)]


def flip_bit(disk: FakeDisk, path: str, bit: int) -> None:
    """Flip one bit of a file durably."""
    file = disk.open_log(path)
    byte = disk.read(path, bit // 8, 1)[0] ^ (1 << bit % 8)
    file.write_durably_at(bit // 8, [bytes([byte])])
    file.close()


def values(page: Page) -> list[object]:
    return [json.loads(bytes(record.data)) for record in page.records()]


def seqs(page: Page) -> list[int]:
    return [record.seq for record in page.records()]


async def read_all(engine: Engine, topic: str, from_seq: int = 0) -> dict[int, object]:
    """Return every live record by its sequence number, read page by page."""
    found: dict[int, object] = {}
    while True:
        page = await engine.diff(topic, from_seq, limit=1000)
        found |= dict(zip(seqs(page), values(page), strict=True))
        if page.caught_up:
            return found
        assert page.next_from_seq > from_seq
        from_seq = page.next_from_seq


async def settle() -> None:
    """Let all ready tasks run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run_until_power_cut(work: Coroutine[object, None, object]) -> None:
    """Run to the end or until a power cut, even where an event loop would only log the error."""
    with contextlib.suppress(PowerCut):
        asyncio.run(_until_power_cut(work))


async def _until_power_cut(work: Coroutine[object, None, object]) -> None:
    loop = asyncio.get_running_loop()
    cut: asyncio.Future[None] = loop.create_future()

    def told(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), PowerCut):
            loop.default_exception_handler(context)
        elif not cut.done():
            cut.set_result(None)

    loop.set_exception_handler(told)
    working = asyncio.ensure_future(work)
    await asyncio.wait([working, cut], return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        await working
    # Waiting tasks are cancelled with the loop and get no outcome.


async def gather_outcomes(calls: Iterable[asyncio.Future[object]]) -> list[object]:
    return list(await asyncio.gather(*calls, return_exceptions=True))


async def fail_to_sync_the_snapshot(world: World) -> None:
    """Leave a checkpoint complete except for the durable name of its snapshot."""
    sync_dir = world.disk.sync_dir

    def failing(path: str) -> None:
        if path.endswith("/meta"):
            world.disk.plan = PlannedFault(call=len(world.disk.calls), kind=DiskFault.FAIL_ONCE)
        sync_dir(path)

    world.disk.sync_dir = failing  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        await world.engine.checkpoint()
    world.disk.sync_dir = sync_dir  # type: ignore[method-assign]
