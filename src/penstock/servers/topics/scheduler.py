"""Which topic is delivered next: by priority, put together and put off as the pressure asks.

A topic that waits is in the set once. Nothing here changes what a subscription gets, only when: whatever was
marked is given out, at the latest when the pressure has fallen or the topic has waited long enough.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.clock import Clock
from penstock.topics import ReadySet, Scheduler, band_of

if TYPE_CHECKING:
    from penstock.servers.topics.broadcaster import Channel

T = TypeVar("T")

_SLACK_S: Final = 0.001
"""What is due so soon comes back with what is due now."""


class Delays(Generic[T]):
    """Items that come back when their time is over, each held at most once. One task for all of them.

    `back` is called with each; it must not raise, and may hold the item again.
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
        """Give it back at this time; what is held already comes when it would have come.

        Who is due before all others may have to wait for the first of them.
        """
        if item in self._held:
            return
        self._held[item] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), item))
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def discard(self, item: T) -> None:
        """It need not come back."""
        self._held.pop(item, None)

    def close(self) -> None:
        """Nothing comes back any more."""
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


_PULSE_S: Final = 0.05
"""How often those that wait are looked at: they rise, or what they waited for is over."""
_AT_ONCE: Final = 1000


class DeliveryScheduler:
    """Channels with something to deliver. Belongs to the event loop's thread.

    `wake` is called when there is something to take; `put_off` every 50 ms with the channels that are not
    served because of the pressure, and with none when it has fallen.
    """

    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        *,
        wake: Callable[[], None],
        put_off: Callable[[Sequence[Channel]], None],
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._wake = wake
        self._put_off = put_off
        self._ready: ReadySet[Channel] = ReadySet()
        self._held: Delays[Channel] = Delays(clock, self._enter)
        self._pulsing: asyncio.Task[None] | None = None
        # Those that are put off are no reason to put off more.
        scheduler.watch(lambda: self._ready.servable)

    def __len__(self) -> int:
        """How many wait, those that are put off included."""
        return len(self._ready) + len(self._held)

    @property
    def is_due(self) -> bool:
        """Whether there is something to take."""
        return self._ready.servable > 0

    def mark(self, channel: Channel) -> None:
        """Something was published, or the topic is gone, of which its subscriptions hear at once."""
        is_gone = channel.feed.is_gone
        if channel.is_waiting:
            if not is_gone:
                return
            self.discard(channel)
        channel.is_waiting = True
        channel.priority = _AT_ONCE if is_gone else channel.feed.priority(self._clock.now_ms())
        free_s = channel.served_s + self._scheduler.ladder.coalesce_ms / 1000
        if free_s > self._clock.monotonic() and band_of(channel.priority) > 0:
            self._held.hold(channel, free_s)
        else:
            self._enter(channel)

    def _enter(self, channel: Channel) -> None:
        self._ready.mark(channel, channel.priority, self._now_ms())
        if self._ready.is_lowest_paused and not self.is_due:
            self._pulse()
        else:
            self._wake()

    def discard(self, channel: Channel) -> None:
        """Nobody follows it any more."""
        channel.is_waiting = False
        self._ready.discard(channel)
        self._held.discard(channel)

    def begin(self) -> None:
        """A turn begins: look how hard the server is pressed."""
        was_paused = self._ready.is_lowest_paused
        self._ready.is_lowest_paused = self._scheduler.ladder.defers
        if was_paused and not self._ready.is_lowest_paused:
            self._put_off(())

    def take(self) -> Channel | None:
        """The next channel; None when there is none that may be served."""
        if not self.is_due:
            return None
        found = self._ready.take(self._now_ms())
        assert found is not None
        channel, wait_ms = found
        channel.is_waiting = False
        channel.served_s = self._clock.monotonic()
        if channel.priority >= 0:
            # The others were perhaps made to wait: that they did is no pressure.
            self._scheduler.observe(wait_ms)
        return channel

    def end(self) -> None:
        """A turn is over; what still waits is looked at again, also if nothing happens."""
        if len(self._ready):
            self._pulse()

    def close(self) -> None:
        """Nobody is left to deliver to."""
        self._held.close()
        if self._pulsing is not None:
            self._pulsing.cancel()
            self._pulsing = None

    def _pulse(self) -> None:
        if self._pulsing is None:
            self._pulsing = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while len(self._ready):
            await self._clock.sleep(_PULSE_S)
            self.begin()
            if paused := self._ready.paused():
                self._put_off(paused)
            self._ready.age(self._now_ms())
            if self.is_due:
                self._wake()
        self._pulsing = None

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)
