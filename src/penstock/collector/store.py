"""The store behind a persistence node: Quiver, opened for one core, with its subscribers at work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.collector.seam import Delivery, Store
from penstock.metrics import Registry

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.quiver import AsyncQuiver, QuiverConfig

__all__ = ["QuiverStore", "open_store"]

_LOG = logging.getLogger(__name__)


class QuiverStore:
    """Quiver as couriers and receivers see it."""

    def __init__(self, quiver: AsyncQuiver) -> None:
        self._quiver = quiver

    async def ingest(self, batch: pa.RecordBatch, *, signal: str) -> object:
        return await self._quiver.ingest(batch, signal=signal)

    async def ingest_raw(self, data: bytes, signal: str) -> object:
        return await self._quiver.ingest_raw(data, signal)

    async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Delivery | None:
        return await self._quiver.next_bundle(subscriber, timeout)

    def strays(self, subscriber: str) -> int:
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
