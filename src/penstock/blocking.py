"""Async code for callers without an event loop: one loop on one background thread per process.

`LoopThread` runs coroutines for callers that wait. The `sync` module of each package uses the rest of this
module to derive a blocking class from each async class:

    class Client(BlockingContext[_client.Client]):
        write = blocking(_client.Client.write)
        follow = blocking_iterator(_client.Client.follow)

Such a method has the parameters, the docstring and the result type of the async method. Type checkers see
them. It runs the coroutine on the loop and raises what the coroutine raises.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from penstock.errors import Rejected, Unavailable

__all__ = [
    "BlockingContext",
    "BlockingMethod",
    "BlockingOpen",
    "BlockingProxy",
    "LoopThread",
    "NativeRuntime",
    "blocking",
    "blocking_call",
    "blocking_iterator",
    "blocking_open",
    "loop_thread",
]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
InnerT = TypeVar("InnerT")
ContextT = TypeVar("ContextT", bound="_AsyncContext")


class LoopThread:
    """An event loop on its own daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-loop", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs in this process. Threads do not survive a fork."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` on the loop, wait for it, and return or raise its outcome.

        When `timeout_s` expires, raises `TimeoutError` and leaves the work running. An interrupt of the
        caller (Ctrl-C, or a signal handler that raises) cancels the work, because no caller would receive its
        result.
        """
        if not self.alive:
            work.close()
            raise Rejected("created before this process was forked: create it again in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise Rejected(
                "a blocking call from inside the event loop would never return: use the async class"
            )
        handoff = _Handoff(work, self._loop)
        try:
            self._loop.call_soon_threadsafe(handoff.start)
            return handoff.outcome.result(timeout_s)
        except BaseException as error:
            if timeout_s is None or not isinstance(error, TimeoutError):
                self._loop.call_soon_threadsafe(handoff.abandon)
            raise

    def iterate(self, source: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the values of `source`, each fetched on demand. Close `source` at the end."""

        async def advance() -> T | None:
            return await anext(source, None)

        async def close() -> None:
            await source.aclose()

        try:
            while (value := self.run(advance())) is not None:
                yield value
        finally:
            self.run(close())


class _Handoff(Generic[T]):
    """One coroutine handed to the loop, and its outcome.

    `start` and `abandon` run on the loop in the order in which they were scheduled. Therefore an interrupt at
    any time, even during scheduling, leaves no work running without a waiter.
    """

    def __init__(self, work: Coroutine[None, None, T], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.cancel()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def abandon(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


_shared: LoopThread | None = None
_making = threading.Lock()


def loop_thread() -> LoopThread:
    """Return the loop thread of this process, started on first use."""
    global _shared
    with _making:
        if _shared is None or not _shared.alive:
            _shared = LoopThread()
        return _shared


def _after_fork() -> None:
    global _shared, _making
    _shared = None
    _making = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


class BlockingMethod(Protocol[P, R_co]):
    """The type of a method made by `blocking`: parameters `P`, result `R_co`."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> Callable[Concatenate[Any, P], R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type, /) -> Callable[P, R_co]: ...


class BlockingOpen(Protocol[P]):
    """The type of a class method made by `blocking_open`: parameters `P`, result an instance of the class."""

    def __get__(self, instance: object, owner: type[T], /) -> Callable[P, T]: ...


class BlockingProxy(Generic[InnerT]):
    """The blocking form of an object that is used on the loop thread only."""

    __slots__ = ("_inner", "_loop")

    def __init__(self, inner: InnerT, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop


class _AsyncContext(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class BlockingContext(BlockingProxy[ContextT]):
    """The blocking form of an open async context manager; leaving the `with` block closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))


@overload
def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> BlockingMethod[P, R]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], wrap: Callable[[T, LoopThread], R]
) -> BlockingMethod[P, R]: ...
def blocking(method: Callable[..., Any], wrap: Callable[[Any, LoopThread], Any] | None = None) -> Any:
    """Make the blocking form of a coroutine method, for the body of a `BlockingProxy`.

    `wrap` makes the result blocking too, from the async result and the loop.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], *args: Any, **kwargs: Any) -> Any:
        result = self._loop.run(getattr(self._inner, name)(*args, **kwargs))
        return result if wrap is None else wrap(result, self._loop)

    return call


@overload
def blocking_call(method: Callable[Concatenate[Any, P], R]) -> BlockingMethod[P, R]: ...
@overload
def blocking_call(
    method: Callable[Concatenate[Any, P], T], wrap: Callable[[T, LoopThread], R]
) -> BlockingMethod[P, R]: ...
def blocking_call(method: Callable[..., Any], wrap: Callable[[Any, LoopThread], Any] | None = None) -> Any:
    """Like `blocking`, for a plain method that may only be called on the loop."""
    name = method.__name__

    async def run(inner: Any, args: Any, kwargs: Any) -> Any:
        return getattr(inner, name)(*args, **kwargs)

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], *args: Any, **kwargs: Any) -> Any:
        result = self._loop.run(run(self._inner, args, kwargs))
        return result if wrap is None else wrap(result, self._loop)

    return call


def blocking_iterator(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> BlockingMethod[P, Iterator[T]]:
    """Like `blocking`, for an async generator method. Each value is fetched on demand."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: BlockingProxy[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._loop.iterate(getattr(self._inner, name)(*args, **kwargs))

    # The annotation of the async method names an async generator.
    call.__signature__ = inspect.signature(method).replace(return_annotation="Iterator")  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def blocking_open(method: Callable[P, Coroutine[Any, Any, Any]]) -> BlockingOpen[P]:
    """Make the blocking form of an async class method that opens the object of a `BlockingProxy`."""

    @functools.wraps(method.__func__)  # type: ignore[attr-defined]
    def call(cls: Callable[[Any, LoopThread], Any], *args: Any, **kwargs: Any) -> Any:
        loop = loop_thread()
        return cls(loop.run(method(*args, **kwargs)), loop)

    return classmethod(call)


class NativeRuntime:
    """Guard for a library that starts its own threads, which do not survive a fork.

    A child forked after the first use would wait indefinitely for threads that exist only in its parent.
    """

    def __init__(self, what: str) -> None:
        """`what` names the library in the error message."""
        self._what = what
        self._used = False
        self._dead = False
        os.register_at_fork(after_in_child=self._forked)

    def use(self, name: str) -> None:
        """Record that `name` is about to use the library.

        Raises `Unavailable` in a process that was forked after the first use.
        """
        if self._dead:
            raise Unavailable(
                f"{name} cannot be used in this process: it was forked from one that had used {self._what}; "
                "start workers with 'spawn' or 'forkserver', or fork before the first use"
            )
        self._used = True

    def _forked(self) -> None:
        self._dead = self._dead or self._used
