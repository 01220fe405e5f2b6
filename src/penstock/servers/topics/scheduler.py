"""The delivery order of topics: by priority, coalesced and deferred under overload.

A waiting topic is in the set once. Scheduling changes only when a subscription receives its records. Every
marked topic is delivered, at the latest when the overload ends or it has waited long enough.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from penstock.clock import Clock
from penstock.topics import Feed, ReadySet, Scheduler, band_of

T = TypeVar("T")

_SLACK_S: Final = 0.001
"""Items that are due this soon are returned together with those due now."""


class Delays(Generic[T]):
    """Items that are returned when due. Each is held at most once; one task serves all.

    `back` is called with each due item. It must not raise, and may hold the item again.
    """

    def __init__(self, clock: Clock, back: Callable[[T], None]) -> None:
        self._clock = clock
        self._back = back
        self._held: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._waiting: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, item: T, due_s: float) -> None:
        """Return the item at `due_s`. An item that is already held keeps its time.

        An item that is due before all others may wait for the first of them.
        """
        if item in self._held:
            return
        self._held[item] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), item))
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def discard(self, item: T) -> None:
        """Drop an item."""
        self._held.pop(item, None)

    def close(self) -> None:
        """Drop all items."""
        self._held.clear()
        self._heap.clear()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def _wait(self) -> None:
        while self._heap:
            await self._clock.sleep(max(self._heap[0][0] - self._clock.monotonic(), _SLACK_S))
            now_s = self._clock.monotonic() + _SLACK_S
            while self._heap and self._heap[0][0] <= now_s:
                due_s, _, item = heapq.heappop(self._heap)
                if self._held.get(item) == due_s:
                    del self._held[item]
                    self._back(item)
        self._waiting = None


_CHECK_EVERY_S: Final = 0.05
"""How often to check waiting channels: their priority may have risen, or the overload may have ended."""
_IMMEDIATE: Final = 1000


class Scheduled:
    """A topic that is delivered by priority."""

    __slots__ = ("feed", "is_waiting", "priority", "served_s")

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.is_waiting = False
        self.priority = 0
        self.served_s = float("-inf")


C = TypeVar("C", bound=Scheduled)


class DeliveryScheduler(Generic[C]):
    """Topics with records to deliver. Owned by the event loop's thread.

    `wake` is called when a topic can be taken. `on_deferred` is called every 50 ms with the topics that are
    deferred because the server is overloaded, and once with an empty sequence when the overload ends.
    """

    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        *,
        wake: Callable[[], None],
        on_deferred: Callable[[Sequence[C]], None],
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._wake = wake
        self._on_deferred = on_deferred
        self._ready: ReadySet[C] = ReadySet()
        self._held: Delays[C] = Delays(clock, self._enter)
        self._checking: asyncio.Task[None] | None = None
        # Deferred topics must not count as load that defers more topics.
        scheduler.watch(lambda: self._ready.servable)

    def __len__(self) -> int:
        """Return the number of waiting topics, including deferred ones."""
        return len(self._ready) + len(self._held)

    @property
    def is_due(self) -> bool:
        """Whether a topic can be taken."""
        return self._ready.servable > 0

    def mark(self, channel: C) -> None:
        """Schedule a topic with new records. A deleted topic is delivered immediately."""
        is_gone = channel.feed.is_gone
        if channel.is_waiting:
            if not is_gone:
                return
            self.discard(channel)
        channel.is_waiting = True
        channel.priority = _IMMEDIATE if is_gone else channel.feed.priority(self._clock.now_ms())
        free_s = channel.served_s + self._scheduler.ladder.coalesce_ms / 1000
        if free_s > self._clock.monotonic() and band_of(channel.priority) > 0:
            self._held.hold(channel, free_s)
        else:
            self._enter(channel)

    def _enter(self, channel: C) -> None:
        self._ready.mark(channel, channel.priority, self._now_ms())
        if self._ready.is_lowest_paused and not self.is_due:
            self._check_soon()
        else:
            self._wake()

    def discard(self, channel: C) -> None:
        """Remove a topic that is no longer followed."""
        channel.is_waiting = False
        self._ready.discard(channel)
        self._held.discard(channel)

    def begin(self) -> None:
        """Begin a turn: read the current overload."""
        was_paused = self._ready.is_lowest_paused
        self._ready.is_lowest_paused = self._scheduler.ladder.defers
        if was_paused and not self._ready.is_lowest_paused:
            self._on_deferred(())

    def take(self) -> C | None:
        """Return the next topic, or None if none may be served."""
        if not self.is_due:
            return None
        found = self._ready.take(self._now_ms())
        assert found is not None
        channel, wait_ms = found
        channel.is_waiting = False
        channel.served_s = self._clock.monotonic()
        if channel.priority >= 0:
            # Topics of lower priority may have been deferred: their wait is not a measure of the load.
            self._scheduler.observe(wait_ms)
        return channel

    def end(self) -> None:
        """End a turn. Topics that still wait are checked again, even if nothing is published."""
        if len(self._ready):
            self._check_soon()

    def close(self) -> None:
        """Stop: there are no subscribers."""
        self._held.close()
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    def _check_soon(self) -> None:
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        while len(self._ready):
            await self._clock.sleep(_CHECK_EVERY_S)
            self.begin()
            if paused := self._ready.paused():
                self._on_deferred(paused)
            self._ready.age(self._now_ms())
            if self.is_due:
                self._wake()
        self._checking = None

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
