"""From a receiver's request to where it is safe: a store, or the exporters themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock import otlp
from penstock.collector.framing import check_framing
from penstock.collector.outcome import Outcome, Verdict
from penstock.collector.payload import RawPayload
from penstock.collector.seam import Accepted, Exporter, Intake, Store
from penstock.errors import InvalidInput, Unavailable
from penstock.otlp.signal import Signal

__all__ = ["TAKEN", "ArrowIntake", "BroadcastIntake", "DirectIntake", "RawIntake", "Reply", "TurnsIntake"]

_INLINE_BYTES: Final = 64 * 1024
"""A larger request is decoded on a thread: it would hold up everybody else's answers."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What was refused of a request that was taken."""

    rejected: int = 0
    message: str = ""


TAKEN: Final = Reply()


class RawIntake:
    """Requests as they came, one bundle each. Only their outermost fields are checked, unless `full`."""

    def __init__(self, store: Store, *, full: bool = False) -> None:
        self._store = store
        self._full = full

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if check_framing(data) == 0:
            return TAKEN
        if self._full:
            otlp.count_items(data, signal)
        await self._store.ingest_raw(data, signal.value)
        return TAKEN


class ArrowIntake:
    """Requests as columns, one bundle each."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if not data:
            return TAKEN
        if len(data) <= _INLINE_BYTES:
            decoded = otlp.decode(data, signal)
        else:
            decoded = await asyncio.to_thread(otlp.decode, data, signal)
        if decoded.items:
            await self._store.ingest(decoded.batch, signal=signal.value)
        return Reply(decoded.rejected, decoded.message) if decoded.rejected or decoded.message else TAKEN


class DirectIntake:
    """Straight into one exporter: the client is answered when that has taken it, and nothing is kept."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        if check_framing(data) == 0:
            return TAKEN
        return _reply(await self._exporter.send(RawPayload(data, signal)))


class TurnsIntake:
    """One of several, each in its turn."""

    def __init__(self, targets: Sequence[Intake]) -> None:
        self._targets = list(targets)
        self._turn = 0

    async def take(self, data: bytes, signal: Signal) -> Accepted:
        target = self._targets[self._turn]
        self._turn = (self._turn + 1) % len(self._targets)
        return await target.take(data, signal)


class BroadcastIntake:
    """All of several; taken when all have it. The first that refuses decides, others may have it by then."""

    def __init__(self, targets: Sequence[Intake]) -> None:
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
        return Reply(outcome.rejected_items, outcome.reason) if outcome.reason else TAKEN
    if outcome.verdict is Verdict.RETRY:
        raise _Busy(outcome.reason, outcome.retry_after_s)
    raise InvalidInput(outcome.reason)
