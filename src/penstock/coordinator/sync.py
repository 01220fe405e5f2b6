"""Write coordination without an event loop: the same names, calls that wait. For scripts and Spark tasks.

    async def build() -> penstock.coordinator.WriteCoordinator[...]:
        storage = await SlateStorage.open("file:///data", "rows")
        return WriteCoordinator(RowDelta, RowFlusher(storage), image=0, snapshot=await storage.snapshot())

    with WriteCoordinator.open(build) as coordinator:
        coordinator.write(row).wait(Durability.APPLIED)

The coordinator, its delta and its flusher work on the one event loop thread of the process; threads may share
everything here. A wait that runs out of `timeout_s` raises `TimeoutError` and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from penstock import coordinator as _async
from penstock.blocking import LoopThread, loop_thread
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
T = TypeVar("T")


class WriteHandle:
    """Blocking twin of `penstock.coordinator.WriteHandle`."""

    __slots__ = ("_inner", "_loop")

    def __init__(self, inner: _async.WriteHandle, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @property
    def sequenced(self) -> bool:
        """Whether `epoch()` would return, or raise, at once."""
        return self._inner.sequenced

    def epoch(self, timeout_s: float | None = None) -> int:
        """The write's place in the order. Raises `ApplyError`, `FlushError`, `Shutdown`."""
        return self._loop.run(self._inner.epoch(), timeout_s)

    def result(self, timeout_s: float | None = None) -> object:
        """What the delta returned for this write. Raises as `epoch` does."""
        return self._loop.run(self._inner.result(), timeout_s)

    def wait(self, level: Durability = Durability.DURABLE, timeout_s: float | None = None) -> None:
        """Return when the write has reached `level`. Raises as `epoch` does."""
        self._loop.run(self._inner.wait(level), timeout_s)


class FlushHandle:
    """Blocking twin of `penstock.coordinator.FlushHandle`."""

    __slots__ = ("_inner", "_loop")

    def __init__(self, inner: _async.FlushHandle, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @property
    def sequenced(self) -> bool:
        """Whether `epoch()` would return, or raise, at once."""
        return self._inner.sequenced

    def epoch(self, timeout_s: float | None = None) -> int:
        """The last epoch that the flush covers. Raises `FlushError` or `Shutdown`."""
        return self._loop.run(self._inner.epoch(), timeout_s)

    def wait(self, level: Durability = Durability.FLUSHED, timeout_s: float | None = None) -> None:
        """Return when everything that the flush covers has reached `level`."""
        self._loop.run(self._inner.wait(level), timeout_s)


class Channel(Generic[W]):
    """Blocking twin of `penstock.coordinator.Channel`."""

    def __init__(self, inner: _async.Channel[W], loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @property
    def depth(self) -> int:
        """Writes that wait to be applied."""
        return self._inner.depth

    def write(self, write: W, *, timeout: float | None = None) -> WriteHandle:
        """Queue `write`, when there is room. Raises `WriteTimeout`, `Shutdown`, `FlushError`."""
        return WriteHandle(self._loop.run(self._inner.write(write, timeout=timeout)), self._loop)

    def try_write(self, write: W) -> WriteHandle:
        """Queue `write` now. Raises `Backpressure` with the write, `Shutdown`, `FlushError`."""
        return WriteHandle(self._loop.run(_call(lambda: self._inner.try_write(write))), self._loop)

    def pause(self) -> None:
        """Apply no more of this channel's writes."""
        self._loop.run(_call(self._inner.pause))

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._loop.run(_call(self._inner.resume))


class Subscription(Generic[D, S], Iterator[FlushEvent[D, S] | FreezeEvent[D, S]]):
    """Blocking twin of `penstock.coordinator.Subscription`, for one reader."""

    def __init__(self, inner: _async.Subscription[D, S], loop: LoopThread) -> None:
        self.inner = inner
        self._loop = loop

    @property
    def view(self) -> View[D, S]:
        """The view at the instant of the subscription: the first event leads on from it."""
        return self.inner.view

    def __next__(self) -> FlushEvent[D, S] | FreezeEvent[D, S]:
        """Wait for the next event. Raises `Lagged` once when events were dropped."""
        try:
            return self._loop.run(_next(self.inner))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Stop listening."""
        self._loop.run(_call(self.inner.close))


class WriteCoordinator(Generic[W, D, S]):
    """Blocking twin of `penstock.coordinator.WriteCoordinator`."""

    def __init__(self, inner: _async.WriteCoordinator[W, D, S], loop: LoopThread) -> None:
        """Use `open`."""
        self._inner = inner
        self._loop = loop

    @classmethod
    def open(
        cls, build: Callable[[], Awaitable[_async.WriteCoordinator[W, D, S]]]
    ) -> WriteCoordinator[W, D, S]:
        """Make a coordinator on the loop, with whatever storage it needs, and start it.

        Raises what `build` raises.
        """
        loop = loop_thread()

        async def make() -> _async.WriteCoordinator[W, D, S]:
            made = await build()
            made.start()
            return made

        return cls(loop.run(make()), loop)

    def write(self, write: W, *, timeout: float | None = None) -> WriteHandle:
        """Queue `write` in the default channel, when there is room. See `Channel.write`."""
        return WriteHandle(self._loop.run(self._inner.write(write, timeout=timeout)), self._loop)

    def try_write(self, write: W) -> WriteHandle:
        """Queue `write` in the default channel now, or raise `Backpressure`."""
        return WriteHandle(self._loop.run(_call(lambda: self._inner.try_write(write))), self._loop)

    def channel(self, name: str, *, capacity: int | None = None) -> Channel[W]:
        """Another way in, made on first use, with a queue of its own."""
        made = self._loop.run(_call(lambda: self._inner.channel(name, capacity=capacity)))
        return Channel(made, self._loop)

    def pause(self, name: str) -> None:
        """Stop applying the writes of one channel. Raises `ConfigError` if there is none of that name."""
        self._loop.run(_call(lambda: self._inner.pause(name)))

    def resume(self, name: str) -> None:
        """Go on applying the writes of one channel."""
        self._loop.run(_call(lambda: self._inner.resume(name)))

    def flush(self, epoch: int | None = None, *, durable: bool = False, strict: bool = False) -> FlushHandle:
        """Have everything flushed whose `write` returned before. See the async `flush`."""
        made = self._loop.run(self._inner.flush(epoch, durable=durable, strict=strict))
        return FlushHandle(made, self._loop)

    def view(self) -> View[D, S]:
        """The database at this instant. Its `current` delta goes on changing: leave it to the loop."""
        return self._inner.view()

    def watermark(self, level: Durability) -> int:
        """The last epoch that has reached `level`."""
        return self._inner.watermark(level)

    @property
    def storage_wait_s(self) -> float:
        """How long the flush or the sync that is under way has taken so far; 0 if there is none."""
        return self._inner.storage_wait_s

    def subscribe(self, *, freezes: bool = False) -> Subscription[D, S]:
        """Every flush from now on, and with `freezes` every freeze, too."""
        made = self._loop.run(_call(lambda: self._inner.subscribe(freezes=freezes)))
        return Subscription(made, self._loop)

    def close(self) -> None:
        """Take no more writes, flush what is queued, sync, and stop. Raises what stopped it before."""
        self._loop.run(self._inner.close())

    def abort(self) -> None:
        """Stop at once, as a crash would."""
        self._loop.run(self._inner.abort())

    def __enter__(self) -> WriteCoordinator[W, D, S]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _call(function: Callable[[], T]) -> T:
    """A plain call, on the loop, because what it touches belongs to it."""
    return function()


async def _next(subscription: _async.Subscription[D, S]) -> FlushEvent[D, S] | FreezeEvent[D, S]:
    return await anext(subscription)


class _Database(Protocol):
    """What every database over a coordinator can be asked."""

    @property
    def failed(self) -> _async.FlushError | None: ...
    @property
    def unstored(self) -> int: ...
    @property
    def storage_wait_s(self) -> float: ...
    async def check(self) -> None: ...
    async def failure(self) -> _async.FlushError: ...
    async def close(self) -> None: ...


B = TypeVar("B", bound=_Database)


class BlockingDatabase(Generic[B]):
    """What the blocking twins of databases have in common; threads may share one."""

    def __init__(self, inner: B, loop: LoopThread) -> None:
        """Use `open`."""
        self._inner = inner
        self._loop = loop

    @property
    def failed(self) -> _async.FlushError | None:
        """What stopped the database, if anything did."""
        return self._inner.failed

    @property
    def unstored(self) -> int:
        """Writes that were taken and are not durable."""
        return self._inner.unstored

    @property
    def storage_wait_s(self) -> float:
        """How long the storage has been at what it stores now, in seconds; 0 if it stores nothing."""
        return self._inner.storage_wait_s

    def check(self) -> None:
        """Ask the storage whether this process is still its writer. Raises `Fenced` and `Unavailable`."""
        self._loop.run(self._inner.check())

    def failure(self, timeout_s: float | None = None) -> _async.FlushError:
        """Wait until the database stops by itself, and return why. Raises `TimeoutError`."""
        return self._loop.run(self._inner.failure(), timeout_s)

    def close(self) -> None:
        """Store everything, durably, and give the storage back. Raises the `FlushError` that stopped it."""
        self._loop.run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# `penstock.coordinator` lists them beside their asyncio twins.
BlockingFlushHandle = FlushHandle
BlockingWriteHandle = WriteHandle
