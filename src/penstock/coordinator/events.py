"""Views of the database and the events that lead from one to the next.

Each subscriber has its own bounded queue of events and gets an error if it misses any.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from penstock.coordinator.errors import Lagged
from penstock.coordinator.watermarks import EpochRange, Failure

D = TypeVar("D")
S = TypeVar("S")


class FlushReason(StrEnum):
    """The reason why the coordinator froze a delta."""

    SIZE_THRESHOLD = "size_threshold"
    INTERVAL = "interval"
    EXPLICIT = "explicit"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(Generic[D]):
    """A delta that takes no more writes and is queued for its flush or being flushed."""

    delta: D
    epoch_range: EpochRange
    size: int
    reason: FlushReason
    frozen_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View(Generic[D, S]):
    """The database at one instant, from the oldest data to the newest.

    `snapshot` holds everything up to `epoch`. `frozen` (newest first) and `current` hold the later writes.
    `current` keeps changing: read it only on the coordinator's loop, and do not await while you read.
    """

    snapshot: S
    epoch: int
    last_flushed: D | None
    frozen: tuple[Frozen[D], ...]
    current: D


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushEvent(Generic[D, S]):
    """A flushed delta: the snapshot that shows it, the delta, and its epochs `(lo, hi]`.

    A cache at `epoch_range.lo` applies the delta and is then at `epoch_range.hi`. Rebuild any other cache
    from the snapshot.
    """

    snapshot: S
    delta: D
    epoch_range: EpochRange
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeEvent(Generic[D, S]):
    """A delta that was frozen and will be flushed. It is `view.frozen[0]`."""

    view: View[D, S]
    epoch_range: EpochRange


class Subscription(Generic[D, S], AsyncIterator[FlushEvent[D, S] | FreezeEvent[D, S]]):
    """The events after `view`, in order; a gap raises `Lagged`.

    Use it from one reader. Iteration ends when the coordinator closes, or raises the error that stopped it.
    """

    def __init__(
        self, view: View[D, S], broadcast: Broadcast[D, S], *, freezes: bool, capacity: int, size_max: int
    ) -> None:
        self.view = view
        """The view at the instant of the subscription. The first event follows directly after it."""
        self._broadcast = broadcast
        self._freezes = freezes
        self._capacity = capacity
        self._size_max = size_max
        self._ring: deque[FlushEvent[D, S] | FreezeEvent[D, S]] = deque()
        self._size = 0
        self._missed = 0
        self._ended = False
        self._failure: Failure | None = None
        self._wake = asyncio.Event()

    async def __anext__(self) -> FlushEvent[D, S] | FreezeEvent[D, S]:
        """Return the next event.

        Raises `Lagged` once when events were dropped; the next call returns the newest.
        """
        while True:
            if self._missed:
                missed, self._missed = self._missed, 0
                raise Lagged(missed)
            if self._ring:
                return self._pop()
            if self._ended:
                raise StopAsyncIteration if self._failure is None else self._failure()
            self._wake.clear()
            await self._wake.wait()

    @property
    def failure(self) -> Failure | None:
        """Factory of the error that ended the subscription. None while it is open and after an orderly
        end."""
        return self._failure

    def close(self) -> None:
        """End the subscription."""
        self._broadcast.remove(self)
        self._ring.clear()
        self.end(None)

    def offer(self, event: FlushEvent[D, S] | FreezeEvent[D, S]) -> None:
        """Queue an event. If it does not fit, drop all queued events first. Called by the coordinator."""
        if isinstance(event, FreezeEvent) and not self._freezes:
            return
        size = _size(event)
        if len(self._ring) >= self._capacity or (self._ring and self._size + size > self._size_max):
            # One missed event already forces a rebuild, so the other events need not stay in memory.
            self._missed += len(self._ring)
            self._ring.clear()
            self._size = 0
        self._ring.append(event)
        self._size += size
        self._wake.set()

    def end(self, failure: Failure | None) -> None:
        """End the iteration once the queued events are read. Called by the coordinator."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._wake.set()

    def _pop(self) -> FlushEvent[D, S] | FreezeEvent[D, S]:
        event = self._ring.popleft()
        self._size -= _size(event)
        return event


def _size(event: FlushEvent[D, S] | FreezeEvent[D, S]) -> int:
    return event.size if isinstance(event, FlushEvent) else 0


class Broadcast(Generic[D, S]):
    """All subscriptions of a coordinator."""

    def __init__(self, *, capacity: int, size_max: int) -> None:
        self._capacity = capacity
        self._size_max = size_max
        self._subscriptions: list[Subscription[D, S]] = []
        self._end: tuple[Failure | None] | None = None

    def subscribe(self, view: View[D, S], *, freezes: bool) -> Subscription[D, S]:
        """Return a subscription that starts after `view`."""
        made = Subscription(view, self, freezes=freezes, capacity=self._capacity, size_max=self._size_max)
        if self._end is None:
            self._subscriptions.append(made)
        else:
            made.end(self._end[0])
        return made

    def send(self, event: FlushEvent[D, S] | FreezeEvent[D, S]) -> None:
        """Offer an event to every subscription, without waiting."""
        for subscription in self._subscriptions:
            subscription.offer(event)

    def end(self, failure: Failure | None) -> None:
        """End all subscriptions, with `failure` if it is given."""
        self._end = (failure,)
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            subscription.end(failure)

    def remove(self, subscription: Subscription[D, S]) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
