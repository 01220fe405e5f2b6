"""Write coordination without an event loop: the same names, with calls that wait.

    async def build() -> penstock.coordinator.WriteCoordinator[...]:
        storage = await SlateStorage.open("file:///data", "rows")
        return WriteCoordinator(RowDelta, RowFlusher(storage), image=0, snapshot=await storage.snapshot())

    with WriteCoordinator.open(build) as coordinator:
        coordinator.write(row).wait(Durability.APPLIED)

The coordinator, its delta and its flusher run on the process's one event loop thread. Threads may share all
objects of this module. A wait whose `timeout_s` expires raises `TimeoutError` and has no other effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from penstock.blocking import (
    BlockingContext,
    BlockingProxy,
    blocking,
    blocking_call,
    loop_thread,
)
from penstock.coordinator import coordinator as _coordinator
from penstock.coordinator import events as _events
from penstock.coordinator import queues as _queues
from penstock.coordinator import watermarks as _watermarks
from penstock.coordinator.errors import FlushError
from penstock.coordinator.events import FlushEvent, FreezeEvent, View
from penstock.coordinator.flush import Delta
from penstock.coordinator.watermarks import Durability

__all__ = [
    "BlockingDatabase",
    "Channel",
    "FlushHandle",
    "Subscription",
    "WriteCoordinator",
    "WriteHandle",
]

W = TypeVar("W")
D = TypeVar("D", bound=Delta[Any, Any])
S = TypeVar("S")


class WriteHandle(BlockingProxy[_watermarks.WriteHandle]):
    """Blocking form of `penstock.coordinator.WriteHandle`."""

    __slots__ = ()

    @property
    def sequenced(self) -> bool:
        """True if `epoch()` returns or raises without waiting."""
        return self._inner.sequenced

    def epoch(self, timeout_s: float | None = None) -> int:
        """Return the write's place in the order. Raises `ApplyError`, `FlushError`, `Shutdown`."""
        return self._loop.run(self._inner.epoch(), timeout_s)

    def result(self, timeout_s: float | None = None) -> object:
        """Return the delta's result for this write. Raises the same errors as `epoch`."""
        return self._loop.run(self._inner.result(), timeout_s)

    def wait(self, level: Durability = Durability.DURABLE, timeout_s: float | None = None) -> None:
        """Wait until the write has reached `level`. Raises the same errors as `epoch`."""
        self._loop.run(self._inner.wait(level), timeout_s)


class FlushHandle(BlockingProxy[_watermarks.FlushHandle]):
    """Blocking form of `penstock.coordinator.FlushHandle`."""

    __slots__ = ()

    @property
    def sequenced(self) -> bool:
        """True if `epoch()` returns or raises without waiting."""
        return self._inner.sequenced

    def epoch(self, timeout_s: float | None = None) -> int:
        """Return the last epoch that the flush covers. Raises `FlushError` or `Shutdown`."""
        return self._loop.run(self._inner.epoch(), timeout_s)

    def wait(self, level: Durability = Durability.FLUSHED, timeout_s: float | None = None) -> None:
        """Wait until everything that the flush covers has reached `level`."""
        self._loop.run(self._inner.wait(level), timeout_s)


class Channel(BlockingProxy[_queues.Channel[W]], Generic[W]):
    """Blocking form of `penstock.coordinator.Channel`."""

    @property
    def depth(self) -> int:
        """Number of writes that wait to be applied."""
        return self._inner.depth

    write = blocking(_queues.Channel[W].write, WriteHandle)
    try_write = blocking_call(_queues.Channel[W].try_write, WriteHandle)
    pause = blocking_call(_queues.Channel[W].pause)
    resume = blocking_call(_queues.Channel[W].resume)


class Subscription(
    BlockingProxy[_events.Subscription[D, S]], Iterator[FlushEvent[D, S] | FreezeEvent[D, S]], Generic[D, S]
):
    """Blocking form of `penstock.coordinator.Subscription`, for one reader."""

    @property
    def view(self) -> View[D, S]:
        """The view at the instant of the subscription. The first event follows directly after it."""
        return self._inner.view

    def __next__(self) -> FlushEvent[D, S] | FreezeEvent[D, S]:
        """Wait for the next event. Raises `Lagged` once when events were dropped."""

        async def advance() -> FlushEvent[D, S] | FreezeEvent[D, S]:
            return await anext(self._inner)

        try:
            return self._loop.run(advance())
        except StopAsyncIteration:
            raise StopIteration from None

    close = blocking_call(_events.Subscription[D, S].close)


class WriteCoordinator(BlockingContext[_coordinator.WriteCoordinator[W, D, S]], Generic[W, D, S]):
    """Blocking form of `penstock.coordinator.WriteCoordinator`."""

    @classmethod
    def open(
        cls, build: Callable[[], Awaitable[_coordinator.WriteCoordinator[W, D, S]]]
    ) -> WriteCoordinator[W, D, S]:
        """Create a coordinator by running `build` on the loop, and start it.

        `build` opens the storage and returns the coordinator. Its errors are raised here.
        """

        async def make() -> _coordinator.WriteCoordinator[W, D, S]:
            coordinator = await build()
            coordinator.start()
            return coordinator

        loop = loop_thread()
        return cls(loop.run(make()), loop)

    write = blocking(_coordinator.WriteCoordinator[W, D, S].write, WriteHandle)
    try_write = blocking_call(_coordinator.WriteCoordinator[W, D, S].try_write, WriteHandle)
    flush = blocking(_coordinator.WriteCoordinator[W, D, S].flush, FlushHandle)
    close = blocking(_coordinator.WriteCoordinator[W, D, S].close)
    abort = blocking(_coordinator.WriteCoordinator[W, D, S].abort)

    subscribe = blocking_call(_coordinator.WriteCoordinator[W, D, S].subscribe, Subscription[D, S])
    channel = blocking_call(_coordinator.WriteCoordinator[W, D, S].channel, Channel[W])
    pause = blocking_call(_coordinator.WriteCoordinator[W, D, S].pause)
    resume = blocking_call(_coordinator.WriteCoordinator[W, D, S].resume)

    def view(self) -> View[D, S]:
        """Return the database at this instant. Its `current` delta keeps changing: do not read it outside
        the loop."""
        return self._inner.view()

    def watermark(self, level: Durability) -> int:
        """Return the last epoch that has reached `level`."""
        return self._inner.watermark(level)

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._inner.storage_wait_s


class _Database(Protocol):
    """Operations common to all databases over a coordinator."""

    @property
    def failed(self) -> FlushError | None: ...
    @property
    def unstored(self) -> int: ...
    @property
    def storage_wait_s(self) -> float: ...
    async def check(self) -> None:
        """Check with the storage that this process is still its writer. Raises `Fenced`, `Unavailable`."""

    async def failure(self) -> FlushError: ...
    async def close(self) -> None:
        """Make all writes durable, and release the storage. Raises the `FlushError` that stopped the
        database."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


B = TypeVar("B", bound=_Database)


class BlockingDatabase(BlockingContext[B]):
    """Base class of the blocking databases. Threads may share an instance."""

    @property
    def failed(self) -> FlushError | None:
        """The error that stopped the database, or None."""
        return self._inner.failed

    @property
    def unstored(self) -> int:
        """Number of accepted writes that are not durable yet."""
        return self._inner.unstored

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        return self._inner.storage_wait_s

    check = blocking(_Database.check)
    close = blocking(_Database.close)

    def failure(self, timeout_s: float | None = None) -> FlushError:
        """Wait until an error stops the database, and return it. Raises `TimeoutError`."""
        return self._loop.run(self._inner.failure(), timeout_s)


# `penstock.coordinator` exports them under these names, next to their async forms.
BlockingFlushHandle = FlushHandle
BlockingWriteHandle = WriteHandle
