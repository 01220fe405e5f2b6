"""A reader's state in memory, kept up to date by events and rebuilt when one was missed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.coordinator.errors import Lagged, Shutdown
from penstock.coordinator.events import FlushEvent, Subscription
from penstock.coordinator.watermarks import Watermark
from penstock.errors import PenstockError

__all__ = ["IncrementalCache"]

D = TypeVar("D")
S = TypeVar("S")
T = TypeVar("T")


class IncrementalCache(Generic[D, S, T]):
    """`state` equals what `rebuild` makes of a snapshot, at the cost of the deltas since.

        cache = await IncrementalCache.open(coordinator.subscribe(), rebuild=load, apply=add)
        while await cache.step(): ...

    A delta is applied only by a cache that is exactly where the delta begins; otherwise the state is rebuilt.
    """

    def __init__(
        self,
        subscription: Subscription[D, S],
        state: T,
        *,
        rebuild: Callable[[S], Awaitable[T]],
        apply: Callable[[T, D], T],
    ) -> None:
        self.state = state
        self.rebuilds = 0
        self._subscription = subscription
        self._rebuild = rebuild
        self._apply = apply
        self._epoch = Watermark(subscription.view.epoch)

    @classmethod
    async def open(
        cls,
        subscription: Subscription[D, S],
        *,
        rebuild: Callable[[S], Awaitable[T]],
        apply: Callable[[T, D], T],
    ) -> IncrementalCache[D, S, T]:
        """A cache of the subscription's first view.

        `rebuild` reads a snapshot; `apply` returns the state after a delta.
        """
        state = await rebuild(subscription.view.snapshot)
        return cls(subscription, state, rebuild=rebuild, apply=apply)

    @property
    def epoch(self) -> int:
        """The last epoch in `state`."""
        return self._epoch.value

    async def wait(self, epoch: int) -> None:
        """Return when `state` holds `epoch`: a read of one's own flushed write.

        Raises what stopped the coordinator, or `Shutdown`, if the cache was told that it never will.
        """
        await self._epoch.wait(epoch)

    async def step(self) -> bool:
        """Wait for the next event and follow it.

        False when there will be none; raises what the subscription raises.
        """
        try:
            event = await anext(self._subscription)
        except Lagged:
            return True
        except StopAsyncIteration:
            self._epoch.fail(lambda: Shutdown("the coordinator is closed, and the cache with it"))
            return False
        except PenstockError:
            self._epoch.fail(self._subscription.failure or Shutdown)
            raise
        if isinstance(event, FlushEvent):
            await self._follow(event)
        return True

    async def run(self) -> None:
        """Follow until the coordinator is closed. What else ends it, ends the cache for those who wait."""
        try:
            while await self.step():
                pass
        except Exception as error:
            reason = f"the cache has stopped: {str(error) or type(error).__name__}"
            self._epoch.fail(self._subscription.failure or (lambda: Shutdown(reason)))
            raise

    async def _follow(self, event: FlushEvent[D, S]) -> None:
        if event.epoch_range.hi <= self.epoch:
            return
        if event.epoch_range.lo == self.epoch:
            self.state = self._apply(self.state, event.delta)
        else:
            self.state = await self._rebuild(event.snapshot)
            self.rebuilds += 1
        self._epoch.raise_to(event.epoch_range.hi)
