"""One persistence node at work: its store, the way in, and a courier for every destination."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final, Protocol

from penstock.clock import Clock
from penstock.collector.circuit import CircuitPolicy
from penstock.collector.courier import Courier
from penstock.collector.dead_letters import DeadLetters
from penstock.collector.graph import Node
from penstock.collector.identity import directory_identity
from penstock.collector.intake import ArrowIntake, Decoder, RawIntake
from penstock.collector.plan import NodeSettings, PersistenceSettings, Validation
from penstock.collector.seam import Exporter, Intake, Store
from penstock.collector.settings import BufferSettings, OtlpExporterSettings
from penstock.collector.source import OwnSource, SharedSource, Source
from penstock.fs import FileSystem, OsFileSystem
from penstock.metrics import Registry

__all__ = ["Carrier", "Vault"]

_LOG = logging.getLogger(__name__)
_RESTART_S: Final = 1.0


class Carrier(Protocol):
    """What brings bundles to a destination."""

    name: str

    def stop(self) -> None: ...

    async def run(self) -> None: ...


class Vault:
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
        self._carriers: list[Carrier] = []
        self._tasks: list[asyncio.Task[None]] = []

    def intake(self) -> Intake:
        """Where receivers put what is to be kept here."""
        if self._settings.is_raw:
            is_full = self._settings.validation is Validation.FULL
            return RawIntake(self.store, full=is_full, decoder=self._decoder)
        return ArrowIntake(self.store, decoder=self._decoder)

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
    ) -> Carrier:
        if isinstance(settings, BufferSettings) and is_own and self._is_in_order:
            return self._queue_carrier(name, settings, source)
        policy, join_bytes = CircuitPolicy(), 0
        if isinstance(settings, OtlpExporterSettings):
            policy, join_bytes = settings.probe.policy, settings.join_bytes_max
        return Courier(
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

    def _queue_carrier(self, name: str, settings: BufferSettings, source: Source) -> Carrier:
        from penstock.collector.queue_courier import QueueCourier

        return QueueCourier(
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


async def _kept_running(carrier: Carrier, clock: Clock) -> None:
    """A fault of ours must not end a destination's deliveries for good."""
    while True:
        try:
            await carrier.run()
            return
        except Exception:  # noqa: BLE001
            _LOG.exception("%s: delivery stopped, and begins again", carrier.name)
            await clock.sleep(_RESTART_S)
