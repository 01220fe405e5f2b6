"""Flusher of deltas. Each flush is one batch, which also compacts blocks and drops expired buckets."""

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
"""Maximum number of keys of an expired bucket that one flush deletes. It bounds the time of a flush."""
_AFTER_BUCKET = b"\xff"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Blocks:
    """The uncompacted blocks of a bucket, and the time of the last addition."""

    count: int = 0
    size_bytes: int = 0
    added_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """The part of a compaction that one flush performs."""

    operations: Sequence[Operation] = ()
    begun: Compaction | None = None
    """The compaction that starts with this step."""
    left: Compaction | None = None
    """The rest of the compaction after this step."""


async def find_buckets(read: StorageRead) -> list[Bucket]:
    """Return every non-empty bucket, oldest first, with one scan for each. Raises `Corrupt`."""
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
    """Flusher that stores each delta in one batch.

    Its state of blocks and buckets changes only after the storage has confirmed the batch.
    """

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
            "timeseries.folds_given_up",
            "Buckets that are not compacted because records are missing or damaged.",
        )

        # A dedicated thread: writers wait for flushes, which must not queue after many readers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeseries-flush")
        self._compactor = Compactor(
            storage, self._thread, blocks_bytes=config.fold_bytes, samples_max=config.fold_samples
        )
        self._compaction: Compaction | None = None

    async def load(self) -> None:
        """Find every bucket and the blocks to compact. Store the retention if it has changed."""
        self.buckets = set(await find_buckets(self._storage))
        now_ms = self._now_ms()
        await self._take_retention(now_ms)
        for bucket in self.buckets:
            if self.retention.is_expired(bucket, now_ms):
                continue
            try:
                blocks = await self._counted(bucket)
            except Corrupt as damage:
                self.damage.report(bucket, [f"its blocks are not compacted: {damage}"])
                self._damaged.add(bucket)
                continue
            if blocks.count:
                self.blocks[bucket] = blocks

    def is_kept(self, bucket: Bucket) -> bool:
        """Return whether the retention keeps this hour. A jump of the wall clock never drops it early."""
        return not self.retention.is_expired(bucket, self._now_ms())

    def _now_ms(self) -> int:
        """Return the current time for comparisons with the retention."""
        return self._clock.cautious_ms(self.retention.longest_ms)

    async def _counted(self, bucket: Bucket) -> Blocks:
        blocks = Blocks()
        async for _, value in pairs(self._storage.scan(block_prefix(bucket))):
            blocks.count += 1
            blocks.size_bytes += len(value)
        return blocks

    async def _take_retention(self, now_ms: int) -> None:
        """Store the retention before any data that expires by it is written."""
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
        operations = await self._in_thread(delta_operations, delta, self.retention)
        expired = self._expired(now_ms)
        drops = await self._drops(expired) if expired is not None else []
        due = self._due(now_ms)
        step = await self._compact(due, self._wanted(delta, now_ms)) if due is not None else _Step()
        if expired is not None:
            # Store the floor in the same batch as the first deletion: the rest of the bucket must never be
            # read again.
            operations.insert(0, self.retention.put())
        await self._storage.apply([*drops, *step.operations, *operations])
        snapshot = await self._storage.snapshot()
        if expired is not None and expired not in self._undropped and len(drops) < _DROPS_MAX:
            self.buckets.discard(expired)
            self.blocks.pop(expired, None)
        if step.begun is not None:
            self._dequeue_blocks(step.begun)
        self._compaction = step.left
        self._note(delta, now_ms)
        return snapshot

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Stop the thread. Call it after the last flush."""
        self._thread.shutdown(wait=False)

    async def sync(self) -> None:
        await self._storage.flush()

    def _note(self, delta: SeriesDelta, now_ms: int) -> None:
        for bucket, changed in delta.buckets.items():
            self.buckets.add(bucket)
            blocks = self.blocks.setdefault(bucket, Blocks())
            blocks.count += 1
            blocks.size_bytes += 8 * sum(
                map(len, changed.chunks)
            )  # the approximate size of a sample in a block
            blocks.added_ms = now_ms

    def _dequeue_blocks(self, compaction: Compaction) -> None:
        """Remove the blocks of a compaction from the queue.

        Remaining blocks are queued again, after other buckets.
        """
        blocks = self.blocks.pop(compaction.bucket)
        if not compaction.is_whole:
            left = max(1, blocks.count - len(compaction.blocks))
            size_bytes = blocks.size_bytes * left // blocks.count
            self.blocks[compaction.bucket] = Blocks(
                count=left, size_bytes=size_bytes, added_ms=blocks.added_ms
            )

    def _expired(self, now_ms: int) -> Bucket | None:
        """Return the oldest readable bucket if it has expired."""
        oldest = min(self.buckets - self._undropped, default=None)
        return oldest if oldest is not None and self.retention.is_expired(oldest, now_ms) else None

    def _due(self, now_ms: int) -> Bucket | None:
        """Return a bucket to compact now, if any. It is never an expired one, because compaction would
        restore it."""
        if self._compaction is not None and not self.retention.is_expired(self._compaction.bucket, now_ms):
            return self._compaction.bucket
        return next((bucket for bucket in self.blocks if self._is_due(bucket, now_ms)), None)

    def _is_due(self, bucket: Bucket, now_ms: int) -> bool:
        config, blocks = self._config, self.blocks[bucket]
        if bucket in self._damaged or self.retention.is_expired(bucket, now_ms):
            return False
        quiet = now_ms - max(bucket.end_ms, blocks.added_ms) >= config.fold_after_ms
        return quiet or blocks.size_bytes >= config.fold_bytes or blocks.count >= config.fold_blocks

    def _wanted(self, delta: SeriesDelta, now_ms: int) -> int:
        """Return the minimum number of samples to compact in this flush.

        It is twice the incoming samples if another full compaction is due, because blocks would otherwise
        accumulate under a sustained load. Otherwise it is 0, which means one step of the usual size.
        """
        due = sum(one.size_bytes for bucket, one in self.blocks.items() if self._is_due(bucket, now_ms))
        is_new = self._compaction is None
        return 2 * delta.samples if due >= self._config.fold_bytes * (2 if is_new else 1) else 0

    def _compaction_of(self, bucket: Bucket) -> Compaction | None:
        """Return the compaction in progress if it is for this bucket."""
        compaction = self._compaction
        return compaction if compaction is not None and compaction.bucket == bucket else None

    async def _drops(self, bucket: Bucket) -> list[Operation]:
        """Return the deletions for an expired bucket, or none if it cannot be read."""
        drops: list[Operation] = []
        try:
            async for page in self._storage.scan(bucket_prefix(bucket)):
                drops += [Delete(key) for key, _ in page]
                if len(drops) >= _DROPS_MAX:
                    return drops[:_DROPS_MAX]
        except Corrupt as damage:
            self.damage.report(bucket, [f"it has expired but is not deleted: {damage}"])
            self._undropped.add(bucket)
            return []
        return drops

    async def _compact(self, bucket: Bucket, wanted: int) -> _Step:
        """Return the next step of a compaction, with at least `wanted` samples of blocks.

        The step is empty for a damaged bucket: it is left unchanged, and the flush stores its writes.
        """
        under_way = self._compaction_of(bucket)
        try:
            compaction = under_way or await self._compactor.plan(bucket)
            operations, left = await self._compactor.advance(
                compaction, wanted, self.retention.expiry_ms(bucket)
            )
            return _Step(operations, None if under_way else compaction, left)
        except Corrupt as error:
            if self.retention.is_expired(bucket, self._now_ms()):
                return _Step()  # it expired while it was read, which is not damage
            _LOG.warning("%s is not compacted: %s", place_of(bucket), error)
            self._damaged.add(bucket)
            self._given_up.inc(1)
            return _Step()
