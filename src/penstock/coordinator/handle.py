"""What `write` and `flush` hand back: the epoch, and a way to wait for a level."""

from __future__ import annotations

import asyncio

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
        self._waiters: list[asyncio.Future[None]] | None = None

    @property
    def sequenced(self) -> bool:
        """Whether `epoch()` would return, or raise, at once."""
        return self._epoch is not None or self._failure is not None

    async def epoch(self) -> int:
        """The epoch, as soon as it is known. Raises what kept it from being used."""
        if not self.sequenced:
            await self._park()
        if self._failure is not None:
            raise self._failure()
        assert self._epoch is not None
        return self._epoch

    def settle(self, epoch: int) -> None:
        """Decide. Called once, by the coordinator."""
        self._epoch = epoch
        self._wake()

    def fail(self, failure: Failure) -> None:
        """Decide that there will be no epoch. Called once, by the coordinator."""
        self._failure = failure
        self._wake()

    async def _park(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)


class WriteHandle(_Sequenced):
    """One write on its way. Dropping the handle, or a wait on it, never touches the write."""

    __slots__ = ("_result",)

    def __init__(self, marks: Watermarks) -> None:
        super().__init__(marks)
        self._result: object = None

    async def epoch(self) -> int:
        """The write's place in the order, as soon as the coordinator has taken it off the queue.

        Raises `ApplyError` if the delta refused it, `FlushError` or `Shutdown` if it was never taken.
        """
        return await super().epoch()

    async def result(self) -> object:
        """What the delta returned for this write. Raises as `epoch` does."""
        await self.epoch()
        return self._result

    async def wait(self, level: Durability = Durability.DURABLE) -> None:
        """Return when the write has reached `level`.

        Raises as `epoch` does, and `FlushError` if it never will.
        Whether DURABLE comes by itself is a matter of `CoordinatorConfig.sync_mode`.
        """
        await self._marks.wait(level, await self.epoch())

    def accept(self, epoch: int, result: object) -> None:
        """The delta took the write. Called once, by the coordinator."""
        self._result = result
        self.settle(epoch)

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
        return await super().epoch()

    async def wait(self, level: Durability = Durability.FLUSHED) -> None:
        """Return when everything that the flush covers has reached `level`.

        DURABLE needs a `flush(durable=True)`, or a `sync_mode` that gets there by itself.
        """
        await self._marks.wait(level, await self.epoch())
