"""A local directory as an object store, with a compare-and-swap that holds across processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.objects.directory import LOCK_WAIT_S, ObjectDirectory
from penstock.objects.store import Blob, ByteRange, Data, ObjectInfo, Version
from penstock.objects.workers import Workers
from penstock.storage import FileSystem, OsFileSystem

__all__ = ["LocalStore"]

_THREADS = 8


class LocalStore:
    """An `ObjectStore` in a directory: every object is a plain file at its key.

    Durable on return, also against a power cut; atomic against other threads and processes on this machine.
    Network file systems are only as good as their `flock` and `fsync`. A forked child may go on using it.
    """

    def __init__(
        self,
        root: str | Path,
        fs: FileSystem | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """`lock_wait_s` bounds the wait for another writer's lock; then a write raises `LockHeld`."""
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
