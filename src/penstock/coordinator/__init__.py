"""Write coordination.

One loop orders writes, collects them in a delta, flushes deltas, and reports how durable each write is.

    async with WriteCoordinator(MyDelta, MyFlusher(storage), image=image, snapshot=snapshot) as coordinator:
        handle = await coordinator.write(row)
        await coordinator.flush(durable=True)
        await handle.wait(Durability.DURABLE)

A database supplies a `Delta` and a `Flusher`. `penstock.coordinator.storage` defines the storage interface,
and `penstock.coordinator.slate` implements it over SlateDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
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
    from penstock.coordinator.keys import Subsystem, read_terminated, terminated
    from penstock.coordinator.position import FedSource, Position
    from penstock.coordinator.queues import Channel
    from penstock.coordinator.slate import SlateStorage, SlateStore
    from penstock.coordinator.storage import (
        KEY_BYTES_MAX,
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
    from penstock.coordinator.sync import BlockingDatabase, BlockingFlushHandle, BlockingWriteHandle
    from penstock.coordinator.values import array, read_array, read_utf8, utf8
    from penstock.coordinator.watermarks import Durability, EpochRange, FlushHandle, WriteHandle

__all__ = [
    "DEFAULT_CHANNEL",
    "KEY_BYTES_MAX",
    "ApplyError",
    "Backpressure",
    "BlockingDatabase",
    "BlockingFlushHandle",
    "BlockingWriteHandle",
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
    "KeyValue",
    "Lagged",
    "Merge",
    "MergeOperator",
    "Operation",
    "Position",
    "Put",
    "Shutdown",
    "SizeUnit",
    "SlateStorage",
    "SlateStore",
    "Storage",
    "StorageRead",
    "Subscription",
    "Subsystem",
    "SyncMode",
    "View",
    "WriteCoordinator",
    "WriteHandle",
    "WriteTimeout",
    "array",
    "pairs",
    "read_array",
    "read_terminated",
    "read_utf8",
    "terminated",
    "utf8",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config": "CoordinatorConfig SizeUnit SyncMode",
            "coordinator": "DEFAULT_CHANNEL WriteCoordinator",
            "errors": (
                "ApplyError Backpressure CoordinatorError EpochNotAssigned FlushError FlushFenced Lagged "
                "Shutdown WriteTimeout"
            ),
            "events": "FlushEvent FlushReason FreezeEvent Frozen Subscription View",
            "flush": "Delta Flusher",
            "keys": "Subsystem read_terminated terminated",
            "position": "FedSource Position",
            "queues": "Channel",
            "slate": "SlateStorage SlateStore",
            "storage": (
                "KEY_BYTES_MAX Delete KeyValue Merge MergeOperator Operation Put Storage StorageRead pairs"
            ),
            "values": "array read_array read_utf8 utf8",
            "sync": "BlockingDatabase BlockingFlushHandle BlockingWriteHandle",
            "watermarks": "Durability EpochRange FlushHandle WriteHandle",
        },
    )
