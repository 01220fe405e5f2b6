"""Consumers of requests, which store them in Quiver or pass them to an exporter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from penstock import otlp
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.collector.batcher import TAKEN, Mixed, Reply, RequestBatcher, check_framing
from penstock.collector.outcome import Outcome, Verdict
from penstock.collector.payload import Exporter, RawPayload
from penstock.errors import InvalidInput, PenstockError, Rejected, Unavailable
from penstock.otlp import Signal
from penstock.quiver import AtCapacity

if TYPE_CHECKING:
    from penstock.quiver import AsyncQuiver

_INLINE_BYTES: Final = 64 * 1024
"""The maximum size for decoding in place. A larger request would delay the replies to all others."""
_ALONE_BYTES: Final = 1024**2
"""The maximum size for concurrent decoding. A larger request takes about twenty times its size in memory."""
_FAILED_S: Final = 30.0
_Made = TypeVar("_Made")


class ConsumerNode(Protocol):
    """The node that a receiver passes its requests to."""

    async def take(self, data: bytes, signal: Signal) -> Reply:
        """Return when the request is stored or delivered. Raise `PenstockError`; see `status.refusal_of`."""
        ...


class WriteHealth:
    """Whether the disk of a store accepts writes, judged by its last write."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._failed_s: float | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one write. A refused write says nothing about the disk."""
        try:
            yield
        except (AtCapacity, Rejected):
            raise
        except PenstockError:
            self._failed_s = self._clock.monotonic()
            raise
        self._failed_s = None

    @property
    def takes_writes(self) -> bool:
        """False for 30 s after a failed write, unless another write has succeeded since.

        After that a failure says nothing about the next write, and a collector that is not ready receives
        none.
        """
        return self._failed_s is None or self._clock.monotonic() - self._failed_s >= _FAILED_S


class Decoder:
    """Decodes small requests in place, larger ones on a thread, and the largest one at a time."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    async def run(
        self,
        decode: Callable[[bytes, Signal], _Made],
        data: bytes,
        signal: Signal,
        *,
        inline_bytes: int = _INLINE_BYTES,
    ) -> _Made:
        if len(data) <= inline_bytes:
            return decode(data, signal)
        if len(data) <= _ALONE_BYTES:
            return await asyncio.to_thread(decode, data, signal)
        async with self._alone:
            return await asyncio.to_thread(decode, data, signal)


class RawConsumer:
    """Stores requests unchanged, one bundle each. Checks only their outermost fields unless `full` is set."""

    def __init__(
        self,
        quiver: AsyncQuiver,
        *,
        full: bool = False,
        decoder: Decoder | None = None,
        health: WriteHealth | None = None,
    ) -> None:
        self._quiver = quiver
        self._health = health or WriteHealth()
        self._full = full
        self._decoder = decoder or Decoder()

    async def take(self, data: bytes, signal: Signal) -> Reply:
        if check_framing(data) == 0:
            return TAKEN
        if self._full:
            await self._decoder.run(otlp.count_items, data, signal)
        with self._health.watching():
            await self._quiver.ingest_raw(data, signal.value)
        return TAKEN


class ArrowConsumer:
    """Stores requests as columns. Small concurrent requests become one bundle, larger ones one each.

    They are decoded on a thread, so that other requests can arrive meanwhile.
    """

    def __init__(
        self, quiver: AsyncQuiver, *, decoder: Decoder | None = None, health: WriteHealth | None = None
    ) -> None:
        self._quiver = quiver
        self._health = health or WriteHealth()
        self._decoder = decoder or Decoder()
        self._batcher = RequestBatcher(self._keep)

    async def take(self, data: bytes, signal: Signal) -> Reply:
        if not data:
            return TAKEN
        if len(data) > _INLINE_BYTES:
            return await self._keep(data, signal, alone=True)
        return await self._batcher.add(data, signal)

    async def _keep(self, data: bytes, signal: Signal, *, alone: bool) -> Reply:
        decoded = await self._decoder.run(otlp.decode, data, signal, inline_bytes=0)
        if decoded.rejected and not alone:
            raise Mixed("some items of some requests are refused")
        if decoded.items:
            with self._health.watching():
                await self._quiver.ingest(decoded.batch, signal=signal.value)
        return Reply(decoded.rejected, decoded.message) if decoded.rejected or decoded.message else TAKEN


class DirectConsumer:
    """Passes requests to one exporter and replies when it has accepted them. Stores nothing."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    async def take(self, data: bytes, signal: Signal) -> Reply:
        if check_framing(data) == 0:
            return TAKEN
        return _reply(await self._exporter.send(RawPayload(data, signal)))


class RoundRobinConsumer:
    """Passes each request to the next of several consumers."""

    def __init__(self, targets: Sequence[ConsumerNode]) -> None:
        self._targets = list(targets)
        self._turn = 0

    async def take(self, data: bytes, signal: Signal) -> Reply:
        target = self._targets[self._turn]
        self._turn = (self._turn + 1) % len(self._targets)
        return await target.take(data, signal)


class FanOutConsumer:
    """Passes each request to all of several consumers.

    The request is accepted when all have accepted it. The first refusal fails the request, even if other
    consumers have already accepted it.
    """

    def __init__(self, targets: Sequence[ConsumerNode]) -> None:
        self._targets = list(targets)

    async def take(self, data: bytes, signal: Signal) -> Reply:
        replies = await asyncio.gather(*(target.take(data, signal) for target in self._targets))
        return max(replies, key=lambda reply: (reply.rejected, bool(reply.message)))


class _Busy(Unavailable):
    """The exporter could not accept the request. The client receives the exporter's retry delay."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _reply(outcome: Outcome) -> Reply:
    if outcome.verdict is Verdict.ACK:
        return (
            Reply(outcome.rejected_items, outcome.reason)
            if outcome.reason or outcome.rejected_items
            else TAKEN
        )
    if outcome.verdict is Verdict.RETRY:
        raise _Busy(outcome.reason, outcome.retry_after_s)
    raise InvalidInput(outcome.reason)
