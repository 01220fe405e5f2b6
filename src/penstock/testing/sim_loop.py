"""A deterministic event loop on virtual time, without sockets, threads and real waits."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import logging
import random
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["Deadlock", "HorizonReached", "SimLoop", "SimulationError"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_log = logging.getLogger(__name__)
_PURGE_FLOOR = 64


class SimulationError(Exception):
    """The simulated program did not finish."""


class Deadlock(SimulationError):
    """Tasks would wait indefinitely, because nothing is ready and no timer is set."""


class HorizonReached(SimulationError):
    """The limit of virtual time or of steps is reached."""


class SimLoop(asyncio.BaseEventLoop):
    """An asyncio event loop whose time jumps to the next timer as soon as nothing is ready.

    Ready callbacks run in the order in which they became ready. With `shuffle=True` the seed determines a
    permutation within each turn. The order depends only on the seed and the program, never on hash order,
    object addresses or the machine.

    Running raises `Deadlock` if tasks wait for something that can no longer happen, and `HorizonReached`
    after `horizon_s` of virtual time or `steps_max` callbacks. Sockets, subprocesses and signals raise
    `NotImplementedError`. `run_in_executor` raises `RuntimeError`. Errors that no awaiting task receives are
    logged and kept in `unhandled`.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        shuffle: bool = False,
        horizon_s: float | None = None,
        steps_max: int | None = None,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.horizon_s = horizon_s
        self.steps_max = steps_max
        self.steps = 0
        self.unhandled: list[BaseException] = []
        self._order = random.Random(f"{seed}/order") if shuffle else None
        self._now_s = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_ordinal = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._task_ordinal = 0
        self._purge_at = _PURGE_FLOOR
        self._generators: dict[int, weakref.ref[AsyncGenerator[Any, Any]]] = {}
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._stopping = False
        self._thread_id: int | None = None
        self._closed = False

    # Time and callbacks

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("the simulation loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):
            raise RuntimeError("a simulation has one thread; a callback came from another")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("the simulation loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_ordinal += 1
        heapq.heappush(self._timers, (when, self._timer_ordinal, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore a cancelled timer, which asyncio reports here. It is skipped when it is due."""

    # Futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[_T]:
        if self._closed:
            raise RuntimeError("the simulation loop is closed")
        # asyncio numbers unnamed tasks per process. Numbers per loop are equal in every run.
        self._task_ordinal += 1
        label = f"task-{self._task_ordinal}" if name is None else str(name)
        task: asyncio.Task[_T] = asyncio.Task(coro, loop=self, name=label, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._purge_at:
            self._tasks = [task for task in self._tasks if not task.done() or _has_unretrieved_error(task)]
            self._purge_at = max(_PURGE_FLOOR, 2 * len(self._tasks))
        return task

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not finished, oldest first."""
        return [task for task in self._tasks if not task.done()]

    def report_unheard(self) -> None:
        """Pass the errors of finished tasks that were never retrieved to the exception handler, oldest first.

        asyncio does so when the garbage collector finds the task, which is not deterministic.
        """
        for task in self._tasks:
            if task.done() and _has_unretrieved_error(task):
                message = f"the error of {task.get_name()} was never retrieved"
                self.call_exception_handler({"message": message, "exception": task.exception()})

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        name = getattr(func, "__qualname__", repr(func))
        raise RuntimeError(f"a simulation has no threads, but {name} was passed to an executor")

    def set_task_factory(self, factory: object | None) -> None:
        if factory is not None:
            raise RuntimeError("a simulation creates its tasks itself and takes no task factory")

    # Running

    def check_can_run(self) -> None:
        """Raise `RuntimeError` if the loop is closed or running, or this thread is inside another loop."""
        if self._closed:
            raise RuntimeError("the simulation loop is closed")
        if self._thread_id is not None:
            raise RuntimeError("the simulation loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("a simulation cannot run inside another event loop; call it from plain code")

    def run_forever(self) -> None:
        self.check_can_run()
        hooks = sys.get_asyncgen_hooks()
        self._thread_id = threading.get_ident()
        sys.set_asyncgen_hooks(firstiter=self._generator_started, finalizer=self._generator_dropped)
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._stopping = False
            self._thread_id = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Generator[Any, None, _T] | Awaitable[_T]) -> _T:
        self.check_can_run()
        main: asyncio.Future[_T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        main.add_done_callback(self._main_done)
        try:
            self.run_forever()
        finally:
            main.remove_done_callback(self._main_done)
        if not main.done():
            raise RuntimeError("the simulation loop was stopped before its main task finished")
        return main.result()

    def _main_done(self, _: asyncio.Future[Any]) -> None:
        self._stopping = True

    def _turn(self) -> None:
        """Run all ready callbacks. Those that become ready during the turn run in the next one."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not self._ready:
            self._jump()
        while timers and timers[0][0] <= self._now_s:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)
        batch, self._ready = self._ready, []
        if self._order is not None and len(batch) > 1:
            self._order.shuffle(batch)
        self.steps += len(batch)
        for handle in batch:
            if not handle.cancelled():
                handle._run()
        if self.steps_max is not None and self.steps > self.steps_max:
            raise HorizonReached(self._failure(f"{self.steps} steps were not enough"))

    def _jump(self) -> None:
        """Move virtual time to the next timer."""
        if not self._timers:
            raise Deadlock(self._failure(f"nothing can ever run again after {self._now_s:.6f} s"))
        when = self._timers[0][0]
        if self.horizon_s is not None and when > self.horizon_s:
            raise HorizonReached(self._failure(f"not finished after {self.horizon_s} s of virtual time"))
        self._now_s = max(self._now_s, when)

    def _failure(self, what: str) -> str:
        pending = [f"{task.get_name()} ({_where(task)})" for task in self.pending_tasks()]
        return f"seed {self.seed}: {what}; pending tasks: {', '.join(pending) or 'none'}"

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._thread_id is not None

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._thread_id is not None:
            raise RuntimeError("cannot close a running simulation loop")
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()

    # Asynchronous generators

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(generator)] = weakref.ref(generator)

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.pop(id(generator), None)
        if not self._closed:
            self.create_task(generator.aclose())

    @property
    def has_generators(self) -> bool:
        """Whether an asynchronous generator was started and not closed."""
        return any(reference() is not None for reference in self._generators.values())

    async def shutdown_asyncgens(self) -> None:
        live, self._generators = self._generators, {}
        for reference in live.values():
            generator = reference()
            if generator is not None:
                await generator.aclose()

    async def shutdown_default_executor(self) -> None:
        """Do nothing: there is no executor."""

    # Errors and debugging

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._exception_handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._exception_handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        message = str(context.get("message", "unhandled error in the simulation"))
        self.unhandled.append(error if isinstance(error, BaseException) else RuntimeError(message))
        _log.error("%s", message, exc_info=error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: debug mode reads the clock of the machine, so it is always off."""


def _has_unretrieved_error(task: asyncio.Task[Any]) -> bool:
    return bool(getattr(task, "_log_traceback", False))


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost line at which a task waits."""
    waiting: Any = task.get_coro()
    line = "not started"
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            line = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return line
