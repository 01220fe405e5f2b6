"""Giving a staged file its final name, where readers find it."""

from __future__ import annotations

import asyncio
import os
from typing import Final, Protocol, runtime_checkable

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import Corrupt, NotFound, OutcomeUnknown, Unavailable
from penstock.ids import SYSTEM_RNG
from penstock.objects import ByteRange, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.spark.tables.parts import staged_key
from penstock.storage import FileSystem, OsFileSystem, publish

__all__ = ["CopyingStore", "publish_file"]

_POLICY: Final = RetryPolicy(deadline_s=30.0)
_FILE: Final = "file://"


@runtime_checkable
class CopyingStore(Protocol):
    """A store that copies objects by itself, so that their bytes need not come here."""

    async def copy(self, source: str, target: str) -> None:
        """Store what `source` holds as `target` too. Raises `NotFound`. Safe to repeat."""
        ...


async def publish_file(store: ObjectStore, path: str, *, fs: FileSystem | None = None) -> None:
    """See to it that `path` is there, durably, and its staged file is not. Safe to repeat, also at the same
    time.

    A staged file that is gone has been published by somebody: it is removed only after that. Raises `Corrupt`
    when neither is there.
    """

    async def move() -> None:
        if store.url.startswith(_FILE):
            await asyncio.to_thread(_rename, fs or OsFileSystem(), store.url[len(_FILE) :], path)
        else:
            await _copy(store, path)

    try:
        await retry(move, _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    except NotFound:
        if not await _is_there(store, path):
            raise Corrupt(
                f"{path} in {store.url} is committed, but neither it nor its staged file "
                f"{staged_key(path)} is there: somebody removed it. Restore it, or, if its rows may be "
                "missing, store an empty Parquet file under that name"
            ) from None


async def _copy(store: ObjectStore, path: str) -> None:
    staged = staged_key(path)
    if isinstance(store, CopyingStore):
        await store.copy(staged, path)
    else:
        await store.put(path, (await store.get(staged)).data)
    failed = await store.delete_many([staged])
    if failed:
        raise next(iter(failed.values()))


def _rename(fs: FileSystem, root: str, path: str) -> None:
    source, target = os.path.join(root, staged_key(path)), os.path.join(root, path)
    folder = os.path.dirname(target)
    fs.stat(source)
    fs.make_dirs(folder)
    try:
        publish(fs, source, target)
    except OutcomeUnknown as error:
        raise Unavailable(f"{error}; publishing it again is safe") from error
    while len(folder) > len(root):
        folder = os.path.dirname(folder)
        fs.sync_dir(folder)


async def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        await retry(
            lambda: store.get(key, ByteRange(start=0, length=1)), _POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG
        )
    except NotFound:
        return False
    return True
