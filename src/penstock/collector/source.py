"""Where a courier gets its bundles: a subscriber of its own, or its turns of one that several share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from penstock.collector.payload import ArrowPayload, Payload, Place, RawPayload
from penstock.collector.seam import Delivery, Store
from penstock.errors import PenstockError
from penstock.otlp.schema import Signal

__all__ = ["OwnSource", "SharedSource", "Source", "Turns", "payload_of"]

_RAW_SLOTS: Final = frozenset({60, 61, 62})
_PULL_S: Final = 0.5
_HAND_OVER_S: Final = 0.1
"""What is there takes a moment from the hands of the one that pulls for all."""


class Source(Protocol):
    """Hands out bundles."""

    async def next(self, timeout_s: float) -> Delivery | None: ...

    def strays(self) -> int:
        """Bundles that were handed out, are not resolved, and are in nobody's hands."""
        ...


class OwnSource:
    """One subscriber: it gets everything."""

    def __init__(self, store: Store, subscriber: str) -> None:
        self._store = store
        self._subscriber = subscriber

    async def next(self, timeout_s: float) -> Delivery | None:
        return await self._store.next_bundle(self._subscriber, timeout=timeout_s)

    def strays(self) -> int:
        return self._store.strays(self._subscriber)


class Turns:
    """Whose turn it is, among those that are ready. Pure."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._last = len(self._names) - 1

    def pick(self, ready: Sequence[str]) -> str | None:
        """The first of `ready` behind the one that was picked last; one that is not ready is passed over."""
        for step in range(1, len(self._names) + 1):
            place = (self._last + step) % len(self._names)
            if self._names[place] in ready:
                self._last = place
                return self._names[place]
        return None


class SharedSource:
    """One subscriber for several destinations: each bundle goes to one of them, by turns."""

    def __init__(self, store: Store, subscriber: str, destinations: Sequence[str]) -> None:
        self._store = store
        self._subscriber = subscriber
        self._turns = Turns(destinations)
        self._waiting: dict[str, deque[asyncio.Future[Delivery]]] = {name: deque() for name in destinations}
        self._pulling: asyncio.Task[None] | None = None

    def of(self, destination: str) -> Source:
        return _Share(self, destination)

    def strays(self) -> int:
        return self._store.strays(self._subscriber)

    async def next_for(self, destination: str, timeout_s: float) -> Delivery | None:
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting[destination].append(future)
        if self._pulling is None or self._pulling.done():
            self._pulling = asyncio.ensure_future(self._pull())
        try:
            done, _ = await asyncio.wait([future], timeout=max(timeout_s, _HAND_OVER_S))
        except asyncio.CancelledError:
            if not future.cancel() and future.exception() is None:
                future.result().defer(0.0)
            raise
        if not done:
            future.cancel()
            return None
        return future.result()

    async def _pull(self) -> None:
        while self._ready():
            try:
                delivery = await self._store.next_bundle(self._subscriber, timeout=_PULL_S)
            except PenstockError as error:
                for waiter in self._ready():
                    self._waiting[waiter].popleft().set_exception(error)
                return
            if delivery is None:
                continue
            name = self._turns.pick(self._ready())
            if name is None:
                delivery.defer(0.0)
                return
            self._waiting[name].popleft().set_result(delivery)

    def _ready(self) -> list[str]:
        for queue in self._waiting.values():
            while queue and queue[0].done():
                queue.popleft()
        return [name for name, queue in self._waiting.items() if queue]


class _Share:
    def __init__(self, shared: SharedSource, destination: str) -> None:
        self._shared = shared
        self._destination = destination

    async def next(self, timeout_s: float) -> Delivery | None:
        return await self._shared.next_for(self._destination, timeout_s)

    def strays(self) -> int:
        return self._shared.strays()


def payload_of(delivery: Delivery, origin: str) -> Payload:
    """What a delivery holds: a request as it came, or columns."""
    ref = delivery.ref
    place = Place(origin, ref.segment_seq, ref.bundle)
    signal = Signal(str(delivery.signal))
    if delivery.slot in _RAW_SLOTS:
        return RawPayload(delivery.batch.column(0)[0].as_py(), signal, place)
    return ArrowPayload(delivery.batch, signal, place)
