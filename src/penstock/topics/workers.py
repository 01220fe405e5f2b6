"""Threads for blocking work: one for maintenance, and a few for reads from the cold tier.

They are separate so that a slow cold store delays neither checkpoints nor the event loop. A cold store that
hangs does not delay the close either, because no call waits for its threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from penstock.topics.errors import ShuttingDown

T = TypeVar("T")

_COLD_READS: Final = 4


class Workers(Protocol):
    """Run blocking calls for the event loop."""

    async def tidy(self, work: Callable[[], T]) -> T:
        """Run calls one after the other, in order."""
        ...

    async def fetch(self, work: Callable[[], T]) -> T:
        """Run a few calls at a time.

        Raise `ShuttingDown` for calls that were not started before the close.
        """
        ...

    def close(self) -> None:
        """Wait for maintenance calls, but not for fetches. The workers must not be used afterwards."""
        ...


class _Job(Generic[T]):
    """One call, and the future of its caller."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = self._loop.create_future()

    def run(self) -> None:
        if self.done.cancelled():
            return
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - the waiter receives it
            self.fail(error)
        else:
            self._settle_soon(lambda: self.done.set_result(result))

    def fail(self, error: BaseException) -> None:
        self._settle_soon(lambda: self.done.set_exception(error))

    def _settle_soon(self, settle: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not self.done.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
            self._loop.call_soon_threadsafe(unless_done)


class LooseThreads:
    """Threads that start when first needed and that nothing waits for at the end, not even the process."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def __call__(self, work: Callable[[], T], /) -> T:
        """Run a blocking call. A single thread runs them in order."""
        job = _Job(work)
        self._start()
        self._jobs.put(job)  # type: ignore[arg-type]
        return await job.done

    def _start(self) -> None:
        if len(self._threads) < self._count:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """Start no more calls. Running calls may or may not finish."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.fail(ShuttingDown("the event log is closing; retry when it is back"))
            else:
                job.run()


class ThreadWorkers:
    """The workers of an engine, with their own threads."""

    def __init__(self) -> None:
        self._tidy = ThreadPoolExecutor(1, thread_name_prefix="topics-tidy")
        self._fetch = LooseThreads(_COLD_READS, "topics-cold")

    async def tidy(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tidy, work)

    async def fetch(self, work: Callable[[], T]) -> T:
        return await self._fetch(work)

    def close(self) -> None:
        self._fetch.close()
        self._tidy.shutdown()
