"""Levels of durability, their watermarks, the handles that wait for a level, and the metrics."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from enum import IntEnum
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from penstock.coordinator.errors import ApplyError
from penstock.metrics import DEFAULT_REGISTRY, SECONDS_BUCKETS, Registry

_FINE: Final = (0.00001, 0.0001, *SECONDS_BUCKETS)
"""Histogram buckets, from a write that does not wait to a very slow flush."""


class Durability(IntEnum):
    """The levels that a caller can wait for. Each includes the ones before it."""

    APPLIED = 1
    """Applied to the delta in memory, in order."""
    FLUSHED = 2
    """In the storage and visible in the snapshot that readers get. A crash may still lose it."""
    WRITTEN = 2
    DURABLE = 3
    """Persisted by the storage. It survives a crash."""


class EpochRange(NamedTuple):
    """The epochs after `lo`, up to and including `hi`."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"({self.lo}, {self.hi}]"


Failure: TypeAlias = Callable[[], Exception]
"""Factory that returns a new error object for each caller."""


class Watermark:
    """An epoch that never decreases. Raising it wakes only the waiters that it satisfies."""

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
        """Number of waiters, including cancelled ones that are not removed yet."""
        return len(self._waiters)

    async def wait(self, epoch: int) -> None:
        """Return when the mark has reached `epoch`. Raises the failure if it cannot."""
        while self._value < epoch:
            if self._failure is not None:
                raise self._failure()
            await self._park(epoch)

    def raise_to(self, epoch: int) -> None:
        """Raise the mark to `epoch` and wake the waiters it satisfies. A mark never decreases."""
        if epoch < self._value:
            raise AssertionError(f"a watermark at {self._value} cannot go back to {epoch}")
        self._value = epoch
        if self._farthest <= epoch:
            self._wake_all(reached=True)
        while self._waiters and self._waiters[0][0] <= epoch:
            self._wake(heapq.heappop(self._waiters)[2])

    def fail(self, failure: Failure) -> None:
        """Freeze the mark. Current and later waiters for a higher epoch get the failure."""
        self._failure = failure
        self._wake_all(reached=False)

    def enlist(self, epoch: int, future: asyncio.Future[bool]) -> None:
        """Resolve `future` with True when the mark reaches `epoch`, or with False when it no longer can.

        A waiter that is cancelled must call `forget`.
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
        """Record that an enlisted waiter was cancelled."""
        # A mark may stay unchanged for a long time. Cancelled waiters must not accumulate in the meantime.
        self._gone += 1
        if self._gone * 2 > len(self._waiters):
            self._waiters = [waiter for waiter in self._waiters if not waiter[2].done()]
            heapq.heapify(self._waiters)
            self._gone = 0

    def _wake_all(self, *, reached: bool) -> None:
        """Wake all waiters in order, without maintaining the heap."""
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
        """Return when `level` has reached `epoch`. Raises the failure if it cannot."""
        await self._marks[level].wait(epoch)

    def enlist(self, level: Durability, epoch: int, future: asyncio.Future[bool]) -> None:
        """See `Watermark.enlist`."""
        self._marks[level].enlist(epoch, future)

    def forget(self, level: Durability) -> None:
        """See `Watermark.forget`."""
        self._marks[level].forget()

    def raise_to(self, level: Durability, epoch: int) -> None:
        """Raise `level` to `epoch`, which every lower level must have reached."""
        if level > Durability.APPLIED and epoch > self._marks[Durability(level - 1)].value:
            raise AssertionError(
                f"epoch {epoch} cannot be {level.name} before it is {Durability(level - 1).name}"
            )
        self._marks[level].raise_to(epoch)

    def fail(self, failure: Failure) -> None:
        """Freeze all marks."""
        for mark in self._marks.values():
            mark.fail(failure)


class _Sequenced:
    """An epoch that is settled once and may be awaited by any number of callers."""

    __slots__ = ("_epoch", "_failure", "_marks", "_waiters")

    def __init__(self, marks: Watermarks) -> None:
        self._marks = marks
        self._epoch: int | None = None
        self._failure: Failure | None = None
        self._waiters: list[tuple[asyncio.Future[bool], Durability | None]] | None = None

    @property
    def sequenced(self) -> bool:
        """Whether `epoch()` would return or raise without waiting."""
        return self._epoch is not None or self._failure is not None

    async def _settled(self) -> int:
        """Return the epoch as soon as it is assigned. Raises the failure if none will be assigned."""
        if self._epoch is None and self._failure is None:
            await self._park(None)
        return self._decided()

    async def _reach(self, level: Durability) -> None:
        """Return when the epoch has reached `level`. Raises the failure if it cannot."""
        if self._epoch is None and self._failure is None and await self._park(level):
            return
        await self._marks.wait(level, self._decided())

    def settle(self, epoch: int) -> None:
        """Set the epoch. Called once, by the coordinator."""
        self._epoch = epoch
        if self._waiters is not None:
            self._hand_over(epoch)

    def fail(self, failure: Failure) -> None:
        """Record that no epoch will be assigned. Called once, by the coordinator."""
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
        """Wait until the epoch is settled or, with `level`, until that level is reached. Return True if it
        is reached."""
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
        """Move waiters to the marks of their levels without waking them."""
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
    """A write in progress. Dropping the handle or cancelling a wait does not affect the write."""

    __slots__ = ("_result", "size")

    def __init__(self, marks: Watermarks) -> None:
        super().__init__(marks)
        self._result: object = None
        self.size = 0
        """The size of the write while it is queued."""

    async def epoch(self) -> int:
        """Return the write's epoch as soon as the coordinator has taken the write off the queue.

        Raises `ApplyError` if the delta refused the write, and `FlushError` or `Shutdown` if it was never
        taken.
        """
        return await self._settled()

    async def result(self) -> object:
        """Return the delta's result for this write. Raises the same errors as `epoch`."""
        await self._settled()
        return self._result

    def wait(self, level: Durability = Durability.DURABLE) -> Coroutine[None, None, None]:
        """Wait until the write has reached `level`. Raises the same errors as `epoch`, or `FlushError` if it
        cannot.

        `CoordinatorConfig.sync_mode` decides whether DURABLE is reached without a call of `flush`.
        """
        return self._reach(level)

    def accept(self, epoch: int, result: object) -> None:
        """Record that the delta applied the write. Called once, by the coordinator."""
        self._result = result
        self._epoch = epoch
        if self._waiters is not None:
            self._hand_over(epoch)

    def refuse(self, epoch: int, reason: Exception) -> None:
        """Record that the delta refused the write. Called once, by the coordinator."""

        def failure() -> Exception:
            error = ApplyError(epoch, str(reason) or type(reason).__name__)
            error.__cause__ = reason
            return error

        self.fail(failure)


class FlushHandle(_Sequenced):
    """A flush in progress."""

    __slots__ = ()

    async def epoch(self) -> int:
        """Return the last epoch that the flush covers, once it is known.

        Raises `FlushError` or `Shutdown`.
        """
        return await self._settled()

    async def wait(self, level: Durability = Durability.FLUSHED) -> None:
        """Wait until everything that the flush covers has reached `level`.

        DURABLE requires `flush(durable=True)` or a `sync_mode` that syncs automatically.
        """
        await self._reach(level)


class Instruments:
    """The metrics of a coordinator in one registry. `product` and a dot are prepended to their names."""

    def __init__(self, registry: Registry | None = None, product: str = "") -> None:
        self.registry = r = registry or DEFAULT_REGISTRY
        prefix = f"{product}.write_coordinator" if product else "write_coordinator"
        self.send_duration = r.histogram(
            f"{prefix}.send_duration_seconds",
            "Until a call was taken or refused.",
            ("command", "status"),
            _FINE,
        )
        self.backpressure = r.counter(
            f"{prefix}.queue_backpressure_total", "Calls that met no room.", ("command", "reason")
        )
        self.queue_depth = r.gauge(f"{prefix}.queue_depth", "Writes that wait to be applied.", ("channel",))
        self.apply_duration = r.histogram(
            f"{prefix}.delta_apply_duration_seconds", "Applying one batch of writes.", (), _FINE
        ).labels()
        self.estimated_bytes = r.gauge(
            f"{prefix}.delta_estimated_bytes", "Size of the current delta, in the unit of its threshold."
        ).labels()
        marks = r.gauge(f"{prefix}.watermark", "The last epoch that has reached a level.", ("level",))
        self.marks = {level: marks.labels(level=level.name.lower()) for level in Durability}
        self.freeze_duration = r.histogram(
            f"{prefix}.delta_freeze_duration_seconds", "Freezing a delta and starting the next.", (), _FINE
        ).labels()
        self.event_send_duration = r.histogram(
            f"{prefix}.flush_event_send_duration_seconds", "Until a frozen delta's flush began.", (), _FINE
        ).labels()
        self.event_queue_depth = r.gauge(
            f"{prefix}.flush_event_queue_depth", "Frozen deltas that wait for their flush."
        ).labels()
        self.flushes = r.counter(f"{prefix}.flush_total", "Deltas frozen for a flush.", ("reason",))
        self.flush_duration = r.histogram(
            f"{prefix}.flush_delta_duration_seconds", "Storing one delta.", (), _FINE
        ).labels()
        self.sync_duration = r.histogram(
            f"{prefix}.flush_storage_duration_seconds", "Persisting what was stored.", (), _FINE
        ).labels()
