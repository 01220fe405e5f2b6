"""From a receiver's request to where it is safe: a store, or the exporters themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock import otlp
from penstock.collector.batcher import Mixed, RequestBatcher, check_framing
from penstock.collector.outcome import Outcome, Verdict
from penstock.collector.payload import RawPayload
from penstock.collector.ports import Accepted, ConsumerNode, Exporter, Store
from penstock.errors import InvalidInput, Unavailable
from penstock.otlp import Signal

_INLINE_BYTES: Final = 64 * 1024
"""A larger request is decoded on a thread: it would hold up everybody else's answers."""
_ALONE_BYTES: Final = 1024**2
"""A larger one is decoded while no other of that size is: it takes some twenty times its size meanwhile."""
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Reply:
    """What was refused of a request that was taken."""

    rejected: int = 0
    message: str = ""


TAKEN: Final = Reply()


class Decoder:
    """Where requests are decoded: here when they are small, on a thread when not, one by one when large."""

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
    """Requests as they came, one bundle each. Only their outermost fields are checked, unless `full`."""

    def __init__(self, store: Store, *, full: bool = False, decoder: Decoder | None = None) -> None:
        self._store = store
        self._full = full
        self._decoder = decoder or Decoder()

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if check_framing(data) == 0:
            return TAKEN
        if self._full:
            await self._decoder.run(otlp.count_items, data, signal)
        await self._store.ingest_raw(data, signal.value)
        return TAKEN


class ArrowConsumer:
    """Requests as columns. Small ones that come at the same time become one bundle, others one each.

    They are decoded on a thread, so that others can come meanwhile.
    """

    def __init__(self, store: Store, *, decoder: Decoder | None = None) -> None:
        self._store = store
        self._decoder = decoder or Decoder()
        self._gathering = RequestBatcher(self._keep)

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if not data:
            return TAKEN
        if len(data) > _INLINE_BYTES:
            return await self._keep(data, signal, alone=True)
        return await self._gathering.add(data, signal)

    async def _keep(self, data: bytes, signal: Signal, *, alone: bool) -> Accepted:
        decoded = await self._decoder.run(otlp.decode, data, signal, inline_bytes=0)
        if decoded.rejected and not alone:
            raise Mixed("some items of some requests are refused")
        if decoded.items:
            await self._store.ingest(decoded.batch, signal=signal.value)
        return Reply(decoded.rejected, decoded.message) if decoded.rejected or decoded.message else TAKEN


class DirectConsumer:
    """Straight into one exporter: the client is answered when that has taken it, and nothing is kept."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if check_framing(data) == 0:
            return TAKEN
        return _reply(await self._exporter.send(RawPayload(data, signal)))


class RoundRobin:
    """One of several, each in its turn."""

    def __init__(self, targets: Sequence[ConsumerNode]) -> None:
        self._targets = list(targets)
        self._turn = 0

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        target = self._targets[self._turn]
        self._turn = (self._turn + 1) % len(self._targets)
        return await target.take(data, signal)


class FanOut:
    """All of several; taken when all have it. The first that refuses decides, others may have it by then."""

    def __init__(self, targets: Sequence[ConsumerNode]) -> None:
        self._targets = list(targets)

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        replies = await asyncio.gather(*(target.take(data, signal) for target in self._targets))
        return max(replies, key=lambda reply: (reply.rejected, bool(reply.message)))


class _Busy(Unavailable):
    """The exporter could not take it; its hint goes on to the client."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _reply(outcome: Outcome) -> Accepted:
    if outcome.verdict is Verdict.ACK:
        return (
            Reply(outcome.rejected_items, outcome.reason)
            if outcome.reason or outcome.rejected_items
            else TAKEN
        )
    if outcome.verdict is Verdict.RETRY:
        raise _Busy(outcome.reason, outcome.retry_after_s)
    raise InvalidInput(outcome.reason)
