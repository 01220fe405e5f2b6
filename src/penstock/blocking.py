"""Run async code for callers without an event loop, on one background thread per process.

Every blocking class is a thin wrapper: the async code runs on the shared loop while the caller waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Generic, TypeVar

from penstock.errors import Rejected, Unavailable

__all__ = ["LoopThread", "NativeRuntime", "loop_thread"]

T = TypeVar("T")


class LoopThread:
    """An event loop on its own daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-loop", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the loop can run work; False in a forked child, where its thread does not exist."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def run(self, work: Coroutine[None, None, T], timeout_s: float | None = None) -> T:
        """Run `work` on the loop, wait, and return its result. Raise whatever `work` raises.

        If `timeout_s` expires, `work` continues to run. If the caller is interrupted (Ctrl-C, or a signal
        handler that raises), `work` is cancelled, because nothing could receive its result.
        """
        if not self.alive:
            work.close()
            raise Rejected("made before this process was forked: make it again in the child process")
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


class _Handoff(Generic[T]):
    """One coroutine handed to the loop, and its result.

    `start` and `abandon` run on the loop, in the order in which they were sent. An interrupt at any moment,
    even while the coroutine is being handed over, therefore leaves no coroutine running without a waiter.
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
    """Return the loop thread of this process. Start it on first use and after a fork."""
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


class NativeRuntime:
    """Tracks whether this process may use a library whose threads do not survive a fork.

    A child forked after the first use would wait indefinitely for threads that exist only in its parent.
    """

    def __init__(self, what: str) -> None:
        """`what` names the library in the error message."""
        self._what = what
        self._used = False
        self._dead = False
        os.register_at_fork(after_in_child=self._forked)

    def use(self, name: str) -> None:
        """Record a use; call it before every use. Raise `Unavailable` if the library cannot work here."""
        if self._dead:
            raise Unavailable(
                f"{name} cannot be used in this process: it was forked from one that had used {self._what}; "
                "start workers with 'spawn' or 'forkserver', or fork before the first use"
            )
        self._used = True

    def _forked(self) -> None:
        self._dead = self._dead or self._used
