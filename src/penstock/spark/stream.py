"""The stream: on the driver the query is the queue's consumer, position by position.

Life of a query, and why each record comes out once:

1. It opens the queue, which fences every earlier query (mode=consume).
2. `latestOffset` says how far a micro-batch goes; Spark writes that into its checkpoint.
3. `partitions` looks the batches between two offsets up in the manifest. Entries never change and are still
   there, so a micro-batch that is run again after a crash reads the same records.
4. `commit` acknowledges what an earlier micro-batch has delivered. Spark calls it when the next one is in
   the checkpoint already, and not at all when there is no next one: the last stays in the queue until then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from penstock.spark.offsets import (
    Bounds,
    Offset,
    admit_batches,
    admit_bytes,
    backlog,
    cap,
    check_asked,
    check_range,
    check_start,
    read_offset,
    resolve,
    write_offset,
)
from penstock.spark.options import BufferOptions
from penstock.spark.plan import SlicePartition
from penstock.spark.queues import ConsumedQueue, Indexes, ObjectSizes, Queue, ReadQueue, bounds_of
from penstock.spark.reader import partitions_between, read_slices

__all__ = ["BufferStreamReader"]

_log = logging.getLogger(__name__)

StoredOffset: TypeAlias = dict[str, int]


class BufferStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a process of its own. Copies of it go to the tasks, without the open queue.

    The queue is opened by the first call that needs it: Spark makes further instances only to ship them.
    """

    def __init__(self, options: BufferOptions) -> None:
        self._options = options
        self._opened: Queue | None = None
        self._sizes: ObjectSizes | None = None
        self._seen: dict[int, Bounds] = {}
        self._target: Offset | None = None

    def __reduce__(self) -> tuple[type[BufferStreamReader], tuple[BufferOptions]]:
        return BufferStreamReader, (self._options,)

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            options = self._options
            if options.mode == "read":
                self._opened = ReadQueue.open(options, must_exist=False)
            else:
                self._opened = ConsumedQueue.open(options)
        return self._opened

    def _look(self) -> tuple[Indexes, dict[int, Bounds]]:
        indexes = self._queue.look()
        self._seen = bounds_of(indexes)
        return indexes, self._seen

    def initialOffset(self) -> StoredOffset:
        """Where `startingOffsets` points now. Asked once in the life of a checkpoint."""
        _, bounds = self._look()
        start = resolve(self._options.starting, bounds, "startingOffsets")
        check_asked(start, bounds, "startingOffsets", self._options.manifest_path)
        return write_offset(start)

    def getDefaultReadLimit(self) -> ReadLimit:
        """At most `maxBatchesPerTrigger`; `maxBytesPerTrigger` is applied on top of it."""
        return ReadMaxFiles(self._options.batches_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is produced from now on is for the next run."""
        _, bounds = self._look()
        self._target = _following(bounds)

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """How far the next micro-batch goes. Raises `QueueGap` or `FencedError`."""
        indexes, bounds = self._look()
        here = self._offset(start, bounds)
        check_start(here, bounds, self._options.manifest_path)
        end = _following(bounds)
        if self._target is not None:
            end = cap(end, self._target)
        end = self._admit(here, end, limit, indexes)
        if end != here:
            left = backlog(end, _following(bounds))
            _log.info("next micro-batch: %d batches, %d left", backlog(here, end), left)
        return write_offset(end)

    def _admit(self, start: Offset, end: Offset, limit: ReadLimit, indexes: Indexes) -> Offset:
        if isinstance(limit, ReadAllAvailable):
            return end
        most = limit.max_files if isinstance(limit, ReadMaxFiles) else self._options.batches_per_trigger
        end = admit_batches(start, end, most)
        bytes_max = self._options.bytes_per_trigger
        if bytes_max is None:
            return end
        sizes = self._sizes = self._sizes or ObjectSizes(self._queue.store)
        sizes.forget_below(start)
        return admit_bytes(
            start, end, bytes_max, lambda shard, sequence: sizes.size(indexes[shard], shard, sequence)
        )

    def reportLatestOffset(self) -> StoredOffset | None:
        """The end of the queue, for the query's progress: `latestOffset` less `endOffset` is the backlog."""
        return write_offset(_following(self._seen)) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """The tasks between two offsets: the same after every restart. Raises `QueueGap`, `FencedError`."""
        indexes, bounds = self._look()
        begin, until = self._offset(start, bounds), self._offset(end, bounds)
        check_range(begin, until, bounds, self._options.manifest_path)
        return list(partitions_between(indexes, begin, until, self._options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices)

    def commit(self, end: StoredOffset) -> None:
        """Acknowledge everything below `end`, in one write of the manifest."""
        _, bounds = self._look() if not self._seen else ({}, self._seen)
        self._queue.ack(self._offset(end, bounds))

    def _offset(self, stored: StoredOffset, bounds: dict[int, Bounds]) -> Offset:
        return read_offset(stored, list(bounds), self._options.manifest_path)


def _following(bounds: dict[int, Bounds]) -> Offset:
    return {shard: held.following for shard, held in bounds.items()}
