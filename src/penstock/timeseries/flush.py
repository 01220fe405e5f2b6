"""Stores deltas of series, folds blocks and drops buckets, each time in one batch."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from penstock.clock import Clock, SteadyClock
from penstock.coordinator import Delete, Flusher, Operation, Storage, StorageRead, pairs
from penstock.errors import Corrupt
from penstock.metrics import Registry
from penstock.timeseries.compaction import Compaction, Compactor
from penstock.timeseries.config import TimeSeriesConfig
from penstock.timeseries.delta import SeriesDelta
from penstock.timeseries.keys import SUBSYSTEM_PREFIX, bucket_prefix
from penstock.timeseries.model import Bucket
from penstock.timeseries.records import DamageLog, block_prefix, bucket_of, delta_operations, place_of
from penstock.timeseries.retention import Retention, load_retention

_LOG = logging.getLogger(__name__)
_DROPS_MAX = 20_000
"""Keys of an expired bucket deleted with one flush, so that none takes long."""
_AFTER_BUCKET = b"\xff"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Blocks:
    """How much of a bucket waits to be folded, and since when nothing was added."""

    count: int = 0
    size_bytes: int = 0
    added_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """What one flush does of a fold."""

    operations: Sequence[Operation] = ()
    begun: Compaction | None = None
    """The fold that begins with it."""
    left: Compaction | None = None
    """What is left of the fold then."""


async def find_buckets(read: StorageRead) -> list[Bucket]:
    """Every bucket that holds anything, oldest first: one look for each. Raises `Corrupt`."""
    found: list[Bucket] = []
    start = b""
    while True:
        pages = read.scan(SUBSYSTEM_PREFIX, start=start)
        page = await anext(pages, None)
        bucket = bucket_of(page[0].key) if page else None
        if bucket is None:
            return found
        found.append(bucket)
        start = bucket_prefix(bucket)[len(SUBSYSTEM_PREFIX) :] + _AFTER_BUCKET


class SeriesFlusher(Flusher[SeriesDelta, StorageRead]):
    """One delta, one batch. What it knows of blocks and buckets changes after the storage has answered."""

    def __init__(self, storage: Storage, config: TimeSeriesConfig, clock: Clock, registry: Registry) -> None:
        self._storage = storage
        self._config = config
        self._clock = SteadyClock(clock)
        self.retention = Retention()
        self.blocks: dict[Bucket, Blocks] = {}
        self.buckets: set[Bucket] = set()
        self.damage = DamageLog(registry)
        self._damaged: set[Bucket] = set()
        self._undropped: set[Bucket] = set()
        self._given_up = registry.counter(
            "timeseries.folds_given_up", "Buckets whose blocks stay as they are because records are missing."
        )

        # Not one that queries and decoding share: writers wait for flushes, and readers may be many.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeseries-flush")
        self._folder = Compactor(
            storage, self._thread, blocks_bytes=config.fold_bytes, samples_max=config.fold_samples
        )
        self._fold: Compaction | None = None

    async def load(self) -> None:
        """Find every bucket, and what of it is to be folded; store the retention if it is another one."""
        self.buckets = set(await find_buckets(self._storage))
        now_ms = self._now_ms()
        await self._take_retention(now_ms)
        for bucket in self.buckets:
            if self.retention.is_over(bucket, now_ms):
                continue
            try:
                blocks = await self._counted(bucket)
            except Corrupt as damage:
                self.damage.tell(bucket, [f"its blocks, which are not folded: {damage}"])
                self._damaged.add(bucket)
                continue
            if blocks.count:
                self.blocks[bucket] = blocks

    def is_kept(self, bucket: Bucket) -> bool:
        """Whether the retention keeps this hour. No step of the wall clock ends it early."""
        return not self.retention.is_over(bucket, self._now_ms())

    def _now_ms(self) -> int:
        """The time by which the retention judges hours."""
        return self._clock.cautious_ms(self.retention.longest_ms)

    async def _counted(self, bucket: Bucket) -> Blocks:
        blocks = Blocks()
        async for _, value in pairs(self._storage.scan(block_prefix(bucket))):
            blocks.count += 1
            blocks.size_bytes += len(value)
        return blocks

    async def _take_retention(self, now_ms: int) -> None:
        """Before anything is written that expires by it."""
        stored = await load_retention(self._storage) or Retention()
        before = stored.encode()
        self.retention = stored.changed_to(self._config.retention_ms, self.buckets, now_ms)
        if self.retention.encode() != before:
            await self._storage.apply([self.retention.put()])
            await self._storage.flush()
        if (earlier := self.retention.earlier) is not None:
            last = datetime.fromtimestamp(earlier.last_minutes * 60, UTC)
            _LOG.info("hours up to %s keep the shorter retention they were written with", last.isoformat())

    async def flush(self, delta: SeriesDelta) -> StorageRead:
        now_ms = self._now_ms()
        operations = await self._aside(delta_operations, delta, self.retention)
        expired = self._expired(now_ms)
        drops = await self._drops(expired) if expired is not None else []
        due = self._due(now_ms)
        step = await self._folds(due, self._wanted(delta, now_ms)) if due is not None else _Step()
        if expired is not None:
            # With the first of its records that goes: what is left of it must never count again.
            operations.insert(0, self.retention.put())
        await self._storage.apply([*drops, *step.operations, *operations])
        snapshot = await self._storage.snapshot()
        if expired is not None and expired not in self._undropped and len(drops) < _DROPS_MAX:
            self.buckets.discard(expired)
            self.blocks.pop(expired, None)
        if step.begun is not None:
            self._take_out(step.begun)
        self._fold = step.left
        self._note(delta, now_ms)
        return snapshot

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Let the thread end; nothing is flushed any more."""
        self._thread.shutdown(wait=False)

    async def sync(self) -> None:
        await self._storage.flush()

    def _note(self, delta: SeriesDelta, now_ms: int) -> None:
        for bucket, changed in delta.buckets.items():
            self.buckets.add(bucket)
            blocks = self.blocks.setdefault(bucket, Blocks())
            blocks.count += 1
            blocks.size_bytes += 8 * sum(map(len, changed.chunks))  # about what a sample takes in a block
            blocks.added_ms = now_ms

    def _take_out(self, fold: Compaction) -> None:
        """Let the blocks of a fold wait no more. What is left waits behind other buckets."""
        blocks = self.blocks.pop(fold.bucket)
        if not fold.is_whole:
            left = max(1, blocks.count - len(fold.blocks))
            size_bytes = blocks.size_bytes * left // blocks.count
            self.blocks[fold.bucket] = Blocks(count=left, size_bytes=size_bytes, added_ms=blocks.added_ms)

    def _expired(self, now_ms: int) -> Bucket | None:
        """The oldest bucket, if its time is over, of those that can be read."""
        oldest = min(self.buckets - self._undropped, default=None)
        return oldest if oldest is not None and self.retention.is_over(oldest, now_ms) else None

    def _due(self, now_ms: int) -> Bucket | None:
        """A bucket to fold now, if any; not one whose time is over, which would bring it back."""
        if self._fold is not None and not self.retention.is_over(self._fold.bucket, now_ms):
            return self._fold.bucket
        return next((bucket for bucket in self.blocks if self._is_due(bucket, now_ms)), None)

    def _is_due(self, bucket: Bucket, now_ms: int) -> bool:
        config, blocks = self._config, self.blocks[bucket]
        if bucket in self._damaged or self.retention.is_over(bucket, now_ms):
            return False
        quiet = now_ms - max(bucket.end_ms, blocks.added_ms) >= config.fold_after_ms
        return quiet or blocks.size_bytes >= config.fold_bytes or blocks.count >= config.fold_blocks

    def _wanted(self, delta: SeriesDelta, now_ms: int) -> int:
        """How many samples of blocks to fold beyond the usual share: twice what comes in if, besides the fold
        under way, so much is due that another one is full. Blocks of a long load would pile up otherwise.
        """
        due = sum(one.size_bytes for bucket, one in self.blocks.items() if self._is_due(bucket, now_ms))
        is_new = self._fold is None
        return 2 * delta.samples if due >= self._config.fold_bytes * (2 if is_new else 1) else 0

    def _fold_of(self, bucket: Bucket) -> Compaction | None:
        """The fold under way, if it is one of this bucket."""
        return self._fold if self._fold is not None and self._fold.bucket == bucket else None

    async def _drops(self, bucket: Bucket) -> list[Operation]:
        """Nothing of a bucket that cannot be read: it is over all the same, and writes are stored."""
        drops: list[Operation] = []
        try:
            async for page in self._storage.scan(bucket_prefix(bucket)):
                drops += [Delete(key) for key, _ in page]
                if len(drops) >= _DROPS_MAX:
                    return drops[:_DROPS_MAX]
        except Corrupt as damage:
            self.damage.tell(bucket, [f"it is over, and is not deleted: {damage}"])
            self._undropped.add(bucket)
            return []
        return drops

    async def _folds(self, bucket: Bucket, wanted: int) -> _Step:
        """The next part of a fold, with `wanted` samples of blocks or the usual share.

        Nothing for a bucket that is damaged: it is left as it is, and what was written is stored.
        """
        under_way = self._fold_of(bucket)
        try:
            fold = under_way or await self._folder.plan(bucket)
            operations, left = await self._folder.go_on(fold, wanted, self.retention.expiry_ms(bucket))
            return _Step(operations, None if under_way else fold, left)
        except Corrupt as error:
            if self.retention.is_over(bucket, self._now_ms()):
                return _Step()  # its time came while it was read, which is no damage
            _LOG.warning("%s is not folded: %s", place_of(bucket), error)
            self._damaged.add(bucket)
            self._given_up.inc(1)
            return _Step()
