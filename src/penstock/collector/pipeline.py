"""One persistence node at work: its store, the way in, and a worker for every destination.

The store behind a persistence node: Quiver, opened for one core, with its subscribers at work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.breaker import CircuitPolicy
from penstock.collector.config import NodeSettings, PersistenceSettings, Validation
from penstock.collector.consumers import ArrowConsumer, Decoder, RawConsumer
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.export_worker import ExportWorker, OwnSource, SharedSource, Source
from penstock.collector.graph import Node
from penstock.collector.ports import ConsumerNode, Delivery, Exporter, Store
from penstock.collector.settings import BufferSettings, OtlpExporterSettings
from penstock.errors import Corrupt, NotFound, PenstockError, Rejected
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.metrics import Registry
from penstock.storage import FileSystem, OsFileSystem, write_durably

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.quiver import AsyncQuiver, QuiverConfig

_LOG = logging.getLogger(__name__)
_NAME: Final = "collector.id"
_FAILED_S: Final = 30.0
"""After that a failed write tells nothing of the next one. Nobody sends one while this is not ready."""
_IDENTITY: Final = re.compile(r"[0-9A-Z]{26}")


def directory_identity(fs: FileSystem, directory: str, *, clock: Clock = SYSTEM_CLOCK) -> str:
    """The identity in the directory; made, durably, if there is none.

    A directory that was removed and made anew has another one, so that its first segments are not taken for
    those that were delivered long ago. Raises `Corrupt` for a file that holds something else.
    """
    path = os.path.join(directory, _NAME)
    try:
        found = fs.read(path).decode("ascii", "replace").strip()
    except NotFound:
        if any("/segments/" in name for name, _ in fs.list_files(directory)):
            _LOG.warning(
                "%s is missing, but there are segments beside it: the directory gets a new identity, and "
                "what was delivered into queues but not acknowledged here may be delivered again",
                path,
            )
        made = mint_ulid(clock.now_ms(), SYSTEM_RNG)
        write_durably(fs, path, [made.encode()], staging=directory)
        return made
    if not _IDENTITY.fullmatch(found):
        raise Corrupt(f"{path} holds no identity; restore it, or remove it if duplicates in queues are fine")
    return found


class QuiverStore:
    """Quiver as workers and receivers see it."""

    def __init__(self, quiver: AsyncQuiver, clock: Clock = SYSTEM_CLOCK) -> None:
        self._quiver = quiver
        self._clock = clock
        self._failed_s: float | None = None

    async def ingest(self, batch: pa.RecordBatch, *, signal: str) -> object:
        return await self._written(self._quiver.ingest(batch, signal=signal))

    async def ingest_raw(self, data: bytes, signal: str) -> object:
        return await self._written(self._quiver.ingest_raw(data, signal))

    async def _written(self, write: Awaitable[object]) -> object:
        from penstock.quiver import AtCapacity

        try:
            written = await write
        except (AtCapacity, Rejected):
            raise
        except PenstockError:
            self._failed_s = self._clock.monotonic()
            raise
        self._failed_s = None
        return written

    @property
    def takes_writes(self) -> bool:
        return self._failed_s is None or self._clock.monotonic() - self._failed_s >= _FAILED_S

    async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Delivery | None:
        return await self._quiver.next_bundle(subscriber, timeout)

    def unacked_unleased(self, subscriber: str) -> int:
        return sum(found.deferred for found in self._quiver.subscribers() if found.name == subscriber)

    def waiting(self, subscriber: str) -> int:
        return sum(found.pending_segments for found in self._quiver.subscribers() if found.name == subscriber)

    async def flush(self) -> None:
        await self._quiver.flush()

    async def close(self) -> None:
        await self._quiver.close()


async def open_store(
    config: QuiverConfig, *, subscribers: Sequence[str], core_id: int, cores: int, registry: Registry
) -> Store:
    """Recovered and ready. A subscriber that is known goes on where it was; a new one gets all that is kept.

    Raises what opening raises: a directory in use, settings that do not fit, damage that stops it.
    """
    from penstock.quiver import AsyncQuiver

    quiver = await AsyncQuiver.open(config.path, config, core_id=core_id, cores=cores, registry=registry)
    try:
        for name in subscribers:
            await quiver.register(name)
            await quiver.activate(name)
        for name in await quiver.orphans(subscribers):
            _LOG.warning(
                "%s: %s is not in the file any more, and what it has not taken is kept for it: put it back, "
                "or let go of it with `penstock quiver subscribers %s --drop %s`",
                config.path,
                name,
                config.path,
                name,
            )
    except BaseException:
        await quiver.close()
        raise
    return QuiverStore(quiver)


_RESTART_S: Final = 1.0


class Worker(Protocol):
    """What brings bundles to a destination."""

    name: str

    def stop(self) -> None: ...

    async def run(self) -> None: ...


class PersistentPipeline:
    """Everything of one persistence node on one core."""

    def __init__(
        self,
        node: Node,
        settings: PersistenceSettings,
        store: Store,
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
        self.store = store
        self._settings = settings
        identity = directory_identity(fs or OsFileSystem(), directory, clock=clock)
        self._origin = f"{identity}-core{core_id}"
        self._dead_letters = dead_letters
        self._clock = clock
        self._rng = rng
        self._registry = registry
        self._decoder = Decoder()
        self._is_hurried = False
        self._carriers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def intake(self) -> ConsumerNode:
        """Where receivers put what is to be kept here."""
        if self._settings.is_raw:
            is_full = self._settings.validation is Validation.FULL
            return RawConsumer(self.store, full=is_full, decoder=self._decoder)
        return ArrowConsumer(self.store, decoder=self._decoder)

    def start(self, destinations: Sequence[tuple[str, NodeSettings, Exporter, int]]) -> None:
        """Begin to deliver to (name, settings, exporter, concurrency)."""
        shared = None
        if self._settings.is_shared:
            shared = SharedSource(self.store, self.node.name, self.node.destinations)
        for name, settings, exporter, concurrency in destinations:
            source = OwnSource(self.store, name) if shared is None else shared.of(name)
            carrier = self._carrier(name, settings, exporter, concurrency, source, is_own=shared is None)
            self._carriers.append(carrier)
            self._tasks.append(asyncio.create_task(_kept_running(carrier, self._clock), name=f"to {name}"))

    def hurry(self) -> None:
        """Deliver nothing more: what is under way goes back to the store."""
        self._is_hurried = True
        for task in self._tasks:
            task.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Bring what can be brought; false if some of it was still under way when the time was up."""
        for carrier in self._carriers:
            carrier.stop()
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return not late and not self._is_hurried

    def waiting(self) -> dict[str, int]:
        """Segments that are not delivered as a whole, by the subscriber that they are kept for."""
        names = [self.node.name] if self._settings.is_shared else self.node.destinations
        return {name: count for name in names if (count := self.store.waiting(name))}

    def _carrier(
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
            return self._queue_carrier(name, settings, source)
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

    def _queue_carrier(self, name: str, settings: BufferSettings, source: Source) -> Worker:
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


async def _kept_running(carrier: Worker, clock: Clock) -> None:
    """A fault of ours must not end a destination's deliveries for good."""
    while True:
        try:
            await carrier.run()
            return
        except Exception:  # noqa: BLE001
            _LOG.exception("%s: delivery stopped, and begins again", carrier.name)
            await clock.sleep(_RESTART_S)
