"""A persistence node: its Quiver, the consumer for receivers, and a worker for every destination."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.breaker import CircuitPolicy
from penstock.collector.config import NodeSettings, PersistenceSettings, Validation
from penstock.collector.consumers import ArrowConsumer, ConsumerNode, Decoder, RawConsumer, WriteHealth
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.export_worker import ExportWorker, OwnSource, SharedSource, Source
from penstock.collector.graph import Node
from penstock.collector.payload import Exporter
from penstock.collector.settings import BufferSettings, OtlpExporterSettings
from penstock.errors import Corrupt, NotFound
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.metrics import Registry
from penstock.storage import FileSystem, OsFileSystem, write_durably

if TYPE_CHECKING:
    from penstock.quiver import AsyncQuiver, QuiverConfig

_LOG = logging.getLogger(__name__)
_NAME: Final = "collector.id"
_IDENTITY: Final = re.compile(r"[0-9A-Z]{26}")
_RESTART_S: Final = 1.0


def directory_identity(fs: FileSystem, directory: str, *, clock: Clock = SYSTEM_CLOCK) -> str:
    """Return the identity of the directory. Durably create one if it has none.

    A directory that was removed and created again has a new identity, so that its first segments are not
    mistaken for earlier ones with the same numbers. Raise `Corrupt` if the file has other contents.
    """
    path = os.path.join(directory, _NAME)
    try:
        content = fs.read(path).decode("ascii", "replace").strip()
    except NotFound:
        if any("/segments/" in name for name, _ in fs.list_files(directory)):
            _LOG.warning(
                "%s is missing, but the directory has segments: it gets a new identity, and bundles that "
                "were appended to queues but not acknowledged here may be delivered again",
                path,
            )
        identity = mint_ulid(clock.now_ms(), SYSTEM_RNG)
        write_durably(fs, path, [identity.encode()], staging=directory)
        return identity
    if not _IDENTITY.fullmatch(content):
        raise Corrupt(f"{path} does not contain an identity; restore it, or remove it and accept duplicates")
    return content


async def open_quiver(
    config: QuiverConfig, *, subscribers: Sequence[str], core_id: int, cores: int, registry: Registry
) -> AsyncQuiver:
    """Open and recover a directory, and activate its subscribers.

    A known subscriber continues at its position. A new one receives all stored data. Raise the errors of
    `AsyncQuiver.open`, such as a directory in use, a wrong setting, or damage.
    """
    from penstock.quiver import AsyncQuiver

    quiver = await AsyncQuiver.open(config.path, config, core_id=core_id, cores=cores, registry=registry)
    try:
        for name in subscribers:
            await quiver.register(name)
            await quiver.activate(name)
        for name in await quiver.orphans(subscribers):
            _LOG.warning(
                "%s: %s is no longer in the configuration, and its undelivered data is kept: configure it "
                "again, or drop it with `penstock quiver subscribers %s --drop %s`",
                config.path,
                name,
                config.path,
                name,
            )
    except BaseException:
        await quiver.close()
        raise
    return quiver


class Worker(Protocol):
    """The interface of a task that delivers bundles to one destination."""

    name: str

    def stop(self) -> None: ...

    async def run(self) -> None: ...


class PersistentPipeline:
    """One persistence node on one core."""

    def __init__(
        self,
        node: Node,
        settings: PersistenceSettings,
        quiver: AsyncQuiver,
        *,
        core_id: int,
        directory: str,
        dead_letters: DeadLetters,
        clock: Clock,
        rng: random.Random,
        registry: Registry,
        fs: FileSystem | None = None,
    ) -> None:
        self.node = node
        self.quiver = quiver
        self.health = WriteHealth(clock)
        self._settings = settings
        identity = directory_identity(fs or OsFileSystem(), directory, clock=clock)
        self._origin = f"{identity}-core{core_id}"
        self._dead_letters = dead_letters
        self._clock = clock
        self._rng = rng
        self._registry = registry
        self._decoder = Decoder()
        self._is_cut_short = False
        self._workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def consumer(self) -> ConsumerNode:
        """Return the consumer that stores requests in this pipeline."""
        if self._settings.is_raw:
            is_full = self._settings.validation is Validation.FULL
            return RawConsumer(self.quiver, full=is_full, decoder=self._decoder, health=self.health)
        return ArrowConsumer(self.quiver, decoder=self._decoder, health=self.health)

    def start(self, destinations: Sequence[tuple[str, NodeSettings, Exporter, int]]) -> None:
        """Start delivering to each destination, given as (name, settings, exporter, concurrency)."""
        shared = None
        if self._settings.is_shared:
            shared = SharedSource(self.quiver, self.node.name, self.node.destinations)
        for name, settings, exporter, concurrency in destinations:
            source = OwnSource(self.quiver, name) if shared is None else shared.of(name)
            worker = self._worker(name, settings, exporter, concurrency, source, is_own=shared is None)
            self._workers.append(worker)
            self._tasks.append(asyncio.create_task(_kept_running(worker, self._clock), name=f"to {name}"))

    def hurry(self) -> None:
        """Stop delivering, and return active bundles to Quiver."""
        self._is_cut_short = True
        for task in self._tasks:
            task.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Deliver the remaining bundles. Return False if some were still active at the timeout."""
        for worker in self._workers:
            worker.stop()
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return not late and not self._is_cut_short

    def waiting(self) -> dict[str, int]:
        """Return the number of segments that are not fully delivered, for each subscriber that has any."""
        names = {self.node.name} if self._settings.is_shared else set(self.node.destinations)
        waiting = [one for one in self.quiver.subscribers() if one.name in names and one.pending_segments]
        return {one.name: one.pending_segments for one in waiting}

    def _worker(
        self,
        name: str,
        settings: NodeSettings,
        exporter: Exporter,
        concurrency: int,
        source: Source,
        *,
        is_own: bool,
    ) -> Worker:
        if isinstance(settings, BufferSettings) and is_own and self._is_in_order:
            return self._buffer_worker(name, settings, source)
        policy, join_bytes = CircuitPolicy(), 0
        if isinstance(settings, OtlpExporterSettings):
            policy, join_bytes = settings.probe.policy, settings.join_bytes_max
        return ExportWorker(
            name,
            source,
            exporter,
            dead_letters=self._dead_letters,
            policy=policy,
            join_bytes=join_bytes,
            concurrency=concurrency,
            origin=self._origin,
            clock=self._clock,
            rng=self._rng,
            registry=self._registry,
        )

    @property
    def _is_in_order(self) -> bool:
        return self._settings.quiver.delivery.order == "oldest_first"

    def _buffer_worker(self, name: str, settings: BufferSettings, source: Source) -> Worker:
        from penstock.collector.buffer_export import BufferExportWorker

        return BufferExportWorker(
            name,
            source,
            settings,
            app=f"collector:{settings.name or name}:{self._origin}",
            dead_letters=self._dead_letters,
            origin=self._origin,
            clock=self._clock,
            rng=self._rng,
            registry=self._registry,
        )


async def _kept_running(worker: Worker, clock: Clock) -> None:
    """Restart a worker after a bug, so that deliveries to its destination continue."""
    while True:
        try:
            await worker.run()
            return
        except Exception:  # noqa: BLE001
            _LOG.exception("%s: delivery failed and is restarted", worker.name)
            await clock.sleep(_RESTART_S)
