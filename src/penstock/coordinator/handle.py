"""What `write` and `flush` hand back: the epoch, and a way to wait for a level."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from penstock.coordinator.durability import Durability
from penstock.coordinator.errors import ApplyError
from penstock.coordinator.watermarks import Failure, Watermarks

__all__ = ["FlushHandle", "WriteHandle"]


class _Sequenced:
    """An epoch that is settled once and can be waited for by anybody, any number of times."""

    __slots__ = ("_epoch", "_failure", "_marks", "_waiters")

    def __init__(self, marks: Watermarks) -> None:
        self._marks = marks
        self._epoch: int | None = None
        self._failure: Failure | None = None
        self._waiters: list[tuple[asyncio.Future[bool], Durability | None]] | None = None

    @property
    def sequenced(self) -> bool:
        """Whether `epoch()` would return, or raise, at once."""
        return self._epoch is not None or self._failure is not None

    async def _settled(self) -> int:
        """The epoch, as soon as it is known. Raises what kept it from being used."""
        if self._epoch is None and self._failure is None:
            await self._park(None)
        return self._decided()

    async def _reach(self, level: Durability) -> None:
        """Return when the epoch has reached `level`. Raises what keeps it from it."""
        if self._epoch is None and self._failure is None and await self._park(level):
            return
        await self._marks.wait(level, self._decided())

    def settle(self, epoch: int) -> None:
        """Decide. Called once, by the coordinator."""
        self._epoch = epoch
        if self._waiters is not None:
            self._hand_over(epoch)

    def fail(self, failure: Failure) -> None:
        """Decide that there will be no epoch. Called once, by the coordinator."""
        self._failure = failure
        waiters, self._waiters = self._waiters, None
        for waiter, _ in waiters or ():
            if not waiter.done():
                waiter.set_result(False)

    def _decided(self) -> int:
        if self._failure is not None:
            raise self._failure()
        assert self._epoch is not None
        return self._epoch

    async def _park(self, level: Durability | None) -> bool:
        """Wait until it is decided; with `level` until that is reached (True) or never will be."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append((waiter, level))
        try:
            return await waiter
        except asyncio.CancelledError:
            self._leave(waiter, level)
            raise

    def _hand_over(self, epoch: int) -> None:
        """From one line to the next, without waking anybody who waits for a level in between."""
        waiters, self._waiters = self._waiters, None
        for waiter, level in waiters or ():
            if waiter.done():
                continue
            if level is None:
                waiter.set_result(False)
            else:
                self._marks.enlist(level, epoch, waiter)

    def _leave(self, waiter: asyncio.Future[bool], level: Durability | None) -> None:
        if self._waiters is not None:
            self._waiters.remove((waiter, level))
        elif level is not None:
            self._marks.forget(level)


class WriteHandle(_Sequenced):
    """One write on its way. Dropping the handle, or a wait on it, never touches the write."""

    __slots__ = ("_result", "size")

    def __init__(self, marks: Watermarks) -> None:
        super().__init__(marks)
        self._result: object = None
        self.size = 0
        """What the write counts for while it waits to be applied."""

    async def epoch(self) -> int:
        """The write's place in the order, as soon as the coordinator has taken it off the queue.

        Raises `ApplyError` if the delta refused it, `FlushError` or `Shutdown` if it was never taken.
        """
        return await self._settled()

    async def result(self) -> object:
        """What the delta returned for this write. Raises as `epoch` does."""
        await self._settled()
        return self._result

    def wait(self, level: Durability = Durability.DURABLE) -> Coroutine[None, None, None]:
        """Await it: returns when the write has reached `level`.

        Raises as `epoch` does, and `FlushError` if it never will.
        Whether DURABLE comes by itself is a matter of `CoordinatorConfig.sync_mode`.
        """
        return self._reach(level)

    def accept(self, epoch: int, result: object) -> None:
        """The delta took the write. Called once, by the coordinator."""
        self._result = result
        self._epoch = epoch
        if self._waiters is not None:
            self._hand_over(epoch)

    def refuse(self, epoch: int, reason: Exception) -> None:
        """The delta refused the write. Called once, by the coordinator."""

        def failure() -> Exception:
            error = ApplyError(epoch, str(reason) or type(reason).__name__)
            error.__cause__ = reason
            return error

        self.fail(failure)


class FlushHandle(_Sequenced):
    """One flush on its way."""

    __slots__ = ()

    async def epoch(self) -> int:
        """The last epoch that the flush covers, as soon as it is known. Raises `FlushError` or `Shutdown`."""
        return await self._settled()

    async def wait(self, level: Durability = Durability.FLUSHED) -> None:
        """Return when everything that the flush covers has reached `level`.

        DURABLE needs a `flush(durable=True)`, or a `sync_mode` that gets there by itself.
        """
        await self._reach(level)
