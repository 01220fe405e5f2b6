"""Write coordination.

One loop orders writes, gathers them in a delta, flushes deltas, and says how safe each write is.

    async with WriteCoordinator(MyDelta, MyFlusher(storage), image=image, snapshot=snapshot) as coordinator:
        handle = await coordinator.write(row)
        await coordinator.flush(durable=True)
        await handle.wait(Durability.DURABLE)

A database brings a `Delta` and a `Flusher`; `penstock.coordinator.storage` is what it stores into, and
`penstock.coordinator.slate` is that over SlateDB.
"""

from __future__ import annotations

from penstock.coordinator.cache import IncrementalCache
from penstock.coordinator.config import CoordinatorConfig, SizeUnit, SyncMode
from penstock.coordinator.coordinator import DEFAULT_CHANNEL, WriteCoordinator
from penstock.coordinator.errors import (
    ApplyError,
    Backpressure,
    CoordinatorError,
    EpochNotAssigned,
    FlushError,
    FlushFenced,
    Lagged,
    Shutdown,
    WriteTimeout,
)
from penstock.coordinator.events import FlushEvent, FlushReason, FreezeEvent, Frozen, Subscription, View
from penstock.coordinator.flush import Delta, Flusher
from penstock.coordinator.position import FedSource, Position
from penstock.coordinator.queues import Channel
from penstock.coordinator.storage import (
    Delete,
    KeyValue,
    Merge,
    MergeOperator,
    Operation,
    Put,
    Storage,
    StorageRead,
    pairs,
)
from penstock.coordinator.watermarks import Durability, EpochRange, FlushHandle, WriteHandle

__all__ = [
    "DEFAULT_CHANNEL",
    "ApplyError",
    "Backpressure",
    "Channel",
    "CoordinatorConfig",
    "CoordinatorError",
    "Delete",
    "Delta",
    "Durability",
    "EpochNotAssigned",
    "EpochRange",
    "FedSource",
    "FlushError",
    "FlushEvent",
    "FlushFenced",
    "FlushHandle",
    "FlushReason",
    "Flusher",
    "FreezeEvent",
    "Frozen",
    "IncrementalCache",
    "KeyValue",
    "Lagged",
    "Merge",
    "MergeOperator",
    "Operation",
    "Position",
    "Put",
    "Shutdown",
    "SizeUnit",
    "Storage",
    "StorageRead",
    "Subscription",
    "SyncMode",
    "View",
    "WriteCoordinator",
    "WriteHandle",
    "WriteTimeout",
    "pairs",
]
