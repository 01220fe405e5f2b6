"""What the collector needs of the store between receivers and exporters, and of an exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.collector.outcome import Outcome
from penstock.collector.payload import Payload
from penstock.otlp import Signal

if TYPE_CHECKING:
    import pyarrow as pa


class Ref(Protocol):
    """The place of a bundle."""

    @property
    def segment_seq(self) -> int: ...

    @property
    def bundle(self) -> int: ...


class Delivery(Protocol):
    """One bundle that was handed out, until it is resolved (`penstock.quiver.Bundle`)."""

    @property
    def batch(self) -> pa.RecordBatch: ...

    @property
    def ref(self) -> Ref: ...

    @property
    def signal(self) -> str: ...

    @property
    def slot(self) -> int: ...

    @property
    def items(self) -> int: ...

    @property
    def attempt(self) -> int: ...

    def ack(self) -> bool:
        """Every answer is false when it came too late: the lease had ended, and the bundle comes again."""
        ...

    def nack(self, reason: str = ..., retry_after: float | None = ...) -> bool: ...

    def reject(self, reason: str = ...) -> bool: ...

    def defer(self, delay: float | None = ...) -> bool: ...


class Store(Protocol):
    """A durable queue with a place of its own for each subscriber (`penstock.collector.pipeline`)."""

    async def ingest(self, batch: pa.RecordBatch, *, signal: str) -> object:
        """Returns when the batch survives a power cut, as far as the flush policy promises it."""
        ...

    async def ingest_raw(self, data: bytes, signal: str) -> object: ...

    @property
    def takes_writes(self) -> bool:
        """False for a while after the disk failed a write, unless it has taken another one since."""
        ...

    async def next_bundle(self, subscriber: str, timeout: float | None = None) -> Delivery | None: ...

    def unacked_unleased(self, subscriber: str) -> int:
        """Bundles that were handed out, are not resolved, and are in nobody's hands."""
        ...

    def waiting(self, subscriber: str) -> int:
        """Segments of which it has not taken everything."""
        ...

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


class Accepted(Protocol):
    """What a receiver tells its client about a request that was taken."""

    @property
    def rejected(self) -> int: ...

    @property
    def message(self) -> str: ...


class ConsumerNode(Protocol):
    """Where a receiver puts its requests."""

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        """Returns when the request is safe. Raises `PenstockError`; see `answers.refusal_of`."""
        ...


class Exporter(Protocol):
    """The end of the way. `send` never raises what the destination may do: that is an `Outcome`."""

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome: ...

    async def close(self) -> None: ...
