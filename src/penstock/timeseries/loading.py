"""Series of buckets from the storage into memory, each read once however many writers need it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from penstock.coordinator import StorageRead
from penstock.errors import Corrupt
from penstock.timeseries.bucket import Bucket
from penstock.timeseries.damage import DamageLog, place_of
from penstock.timeseries.directory import BucketSeries, Directory
from penstock.timeseries.records import load_bucket

__all__ = ["BucketLoader"]

_AT_ONCE: Final = 16
"""Buckets that are read side by side: each takes some round trips to the store."""


class BucketLoader:
    """Fills a directory. A load goes on when the writer that asked for it gives up: others may need it."""

    def __init__(
        self,
        directory: Directory,
        *,
        snapshot: Callable[[], StorageRead],
        is_over: Callable[[Bucket], bool],
        damage: DamageLog,
    ) -> None:
        self._directory = directory
        self._snapshot = snapshot
        self._is_over = is_over
        self._damage = damage
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._loads: dict[Bucket, asyncio.Task[None]] = {}

    def try_hold(self, buckets: Collection[Bucket]) -> bool:
        """Reserve these buckets if all of them are in memory."""
        if any(bucket not in self._directory for bucket in buckets):
            return False
        self._directory.reserve(buckets)
        return True

    async def hold(self, buckets: Collection[Bucket]) -> None:
        """Reserve these buckets, read first if need be. A call that raises, or is cancelled, reserves none.

        What it has read, or will have, is kept for a while, so that the writer that comes back goes on where
        it stood. Raises what reading raises.
        """
        held: list[Bucket] = []
        for bucket in buckets:
            if bucket not in self._directory:
                self._loading(bucket)
        try:
            for bucket in buckets:
                # It may have been forgotten again while the others were read.
                while bucket not in self._directory:
                    await asyncio.shield(self._loading(bucket))
                self._directory.reserve((bucket,))
                held.append(bucket)
        except BaseException:
            self._directory.release(held)
            self._directory.expect(buckets)
            raise

    def _loading(self, bucket: Bucket) -> asyncio.Task[None]:
        task = self._loads.get(bucket)
        if task is None:
            task = self._loads[bucket] = asyncio.ensure_future(self._load(bucket))
            task.add_done_callback(lambda done: self._ended(bucket, done))
        return task

    def _ended(self, bucket: Bucket, task: asyncio.Task[None]) -> None:
        del self._loads[bucket]
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody may be left

    async def _load(self, bucket: Bucket) -> None:
        async with self._places:
            try:
                series = await load_bucket(self._snapshot(), bucket)
            except Corrupt as error:
                if not self._is_over(bucket):
                    raise Corrupt(f"{place_of(bucket)} cannot be read: {error}") from error
                series = BucketSeries()
            if series.damaged and self._is_over(bucket):
                series = BucketSeries()  # its time came while it was read: nobody will see what is written
            self._damage.tell(bucket, series.damaged)
            self._directory.load(bucket, series)
