"""A local directory as an object store, with a compare-and-swap that holds across processes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError, Rejected
from penstock.objects.directory import LOCK_WAIT_S, ObjectDirectory
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version
from penstock.storage import FileSystem, OsFileSystem

_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class LocalStore:
    """An `ObjectStore` in a directory: every object is a plain file at its key.

    A write is durable on return, even after a power failure, and atomic for other threads and processes of
    this machine. Network file systems are only as reliable as their `flock` and `fsync`. A forked child may
    continue to use the store.
    """

    def __init__(
        self,
        root: str | Path,
        fs: FileSystem | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """Open the directory. A write that waits `lock_wait_s` for another's lock raises `LockHeld`."""
        self._core = ObjectDirectory(str(root), fs=fs or OsFileSystem(), clock=clock, lock_wait_s=lock_wait_s)
        self._workers = Workers("local", _THREADS)

    @property
    def url(self) -> str:
        return self._core.url

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        return await self._workers.run(self._core.get, key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        return await self._workers.run(self._core.get_if_changed, key, version)

    async def put(self, key: str, data: Data) -> Version:
        return await self._workers.run(self._core.put, key, data)

    async def put_if_absent(self, key: str, data: Data) -> Version:
        return await self._workers.run(self._core.put_if_absent, key, data)

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        return await self._workers.run(self._core.put_if_match, key, data, version)

    async def head(self, key: str) -> ObjectInfo:
        return await self._workers.run(self._core.head, key)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self._workers.run(self._core.list, prefix)

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        return await self._workers.run(self._core.delete_many, list(keys))

    async def close(self) -> None:
        self._workers.close()


class Workers:
    """A pool of threads for blocking calls, started on demand, and again in a forked child.

    A pool belongs to one process: its threads do not survive a fork, but the pool object does.
    """

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
        """Release the threads after their running calls, without waiting for these. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            # In a forked child, the mutex may be held by a thread that no longer exists.
            self._mutex, self._pool, self._pid = threading.Lock(), None, os.getpid()
        with self._mutex:
            if self._closed:
                raise Rejected(f"{self._name} is closed; open it again")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"penstock-{self._name}")
            return self._pool
