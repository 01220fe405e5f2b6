"""How far each level has come, and who waits for it to go further."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from penstock.coordinator.durability import Durability

__all__ = ["Failure", "Watermark", "Watermarks"]

Failure: TypeAlias = Callable[[], Exception]
"""Makes the error to raise, a new one for everybody who gets it."""


class Watermark:
    """An epoch that only grows. Raising it costs nothing for those who wait for a later one."""

    __slots__ = ("_failure", "_farthest", "_gone", "_ordinals", "_value", "_waiters")

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self._failure: Failure | None = None
        self._ordinals = count()
        self._waiters: list[tuple[int, int, asyncio.Future[bool]]] = []
        self._farthest = 0
        self._gone = 0

    @property
    def value(self) -> int:
        return self._value

    @property
    def waiting(self) -> int:
        """How many wait, or have given up and are not forgotten yet."""
        return len(self._waiters)

    async def wait(self, epoch: int) -> None:
        """Return when the mark is at `epoch` or behind it. Raises the failure if it will not get there."""
        while self._value < epoch:
            if self._failure is not None:
                raise self._failure()
            await self._park(epoch)

    def raise_to(self, epoch: int) -> None:
        """Move on to `epoch` and wake those who waited for it. A mark never goes back."""
        if epoch < self._value:
            raise AssertionError(f"a watermark at {self._value} cannot go back to {epoch}")
        self._value = epoch
        if self._farthest <= epoch:
            self._wake_all(reached=True)
        while self._waiters and self._waiters[0][0] <= epoch:
            self._wake(heapq.heappop(self._waiters)[2])

    def fail(self, failure: Failure) -> None:
        """The mark stays where it is: everybody who waits for more gets the failure, now or later."""
        self._failure = failure
        self._wake_all(reached=False)

    def enlist(self, epoch: int, future: asyncio.Future[bool]) -> None:
        """Wake `future` when the mark is at `epoch` (True), or never gets there (False).

        Whoever gives up says `forget`.
        """
        if self._value >= epoch:
            future.set_result(True)
        elif self._failure is not None:
            future.set_result(False)
        else:
            if epoch > self._farthest:
                self._farthest = epoch
            heapq.heappush(self._waiters, (epoch, next(self._ordinals), future))

    async def _park(self, epoch: int) -> None:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.enlist(epoch, future)
        try:
            await future
        except asyncio.CancelledError:
            self.forget()
            raise

    def forget(self) -> None:
        """Somebody who was enlisted has given up."""
        # A mark may stand still for long while callers come and give up: they must not pile up.
        self._gone += 1
        if self._gone * 2 > len(self._waiters):
            self._waiters = [waiter for waiter in self._waiters if not waiter[2].done()]
            heapq.heapify(self._waiters)
            self._gone = 0

    def _wake_all(self, *, reached: bool) -> None:
        """The same as one by one, in the same order, without keeping a heap in order meanwhile."""
        waiters, self._waiters, self._gone = self._waiters, [], 0
        waiters.sort()
        for _, _, future in waiters:
            if not future.done():
                future.set_result(reached)

    def _wake(self, future: asyncio.Future[bool]) -> None:
        if future.done():
            self._gone = max(0, self._gone - 1)
        else:
            future.set_result(True)


class Watermarks:
    """One mark for each level: applied >= flushed >= durable at every instant."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks = {level: Watermark() for level in Durability}

    def __getitem__(self, level: Durability) -> int:
        return self._marks[level].value

    async def wait(self, level: Durability, epoch: int) -> None:
        """Return when `level` has reached `epoch`. Raises the failure if it never will."""
        await self._marks[level].wait(epoch)

    def enlist(self, level: Durability, epoch: int, future: asyncio.Future[bool]) -> None:
        """See `Watermark.enlist`."""
        self._marks[level].enlist(epoch, future)

    def forget(self, level: Durability) -> None:
        """See `Watermark.forget`."""
        self._marks[level].forget()

    def raise_to(self, level: Durability, epoch: int) -> None:
        """Move `level` on to `epoch`, which every level below it has reached."""
        if level > Durability.APPLIED and epoch > self._marks[Durability(level - 1)].value:
            raise AssertionError(
                f"epoch {epoch} cannot be {level.name} before it is {Durability(level - 1).name}"
            )
        self._marks[level].raise_to(epoch)

    def fail(self, failure: Failure) -> None:
        """No mark moves any more."""
        for mark in self._marks.values():
            mark.fail(failure)
