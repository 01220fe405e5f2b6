"""Threads for blocking calls, made when first needed and made anew in a forked child."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from penstock.errors import Rejected

__all__ = ["Workers"]

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A thread pool that belongs to one process: threads do not survive a fork, a pool object does."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._mutex = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._closed = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the blocking call in a thread. Cancelling the wait does not stop the call."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor(), partial(call, *args, **kwargs)
        )

    def close(self) -> None:
        """Release the threads once their running calls are done; does not wait for them. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            # In a forked child the mutex may have been held by a thread that is no more.
            self._mutex, self._pool, self._pid = threading.Lock(), None, os.getpid()
        with self._mutex:
            if self._closed:
                raise Rejected(f"{self._name} is closed; open it again")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"penstock-{self._name}")
            return self._pool
