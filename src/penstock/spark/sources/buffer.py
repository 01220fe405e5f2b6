"""The readers of `penstock-buffer`: batch queries, streams, and the tasks of both.

The driver plans slices, one for each batch object. A task prefetches a few of its objects, decodes them and
passes Arrow data to Spark. Its partition contains everything that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxFiles

from penstock.blocking import loop_thread
from penstock.buffer import (
    BatchDescriptor,
    BatchMissing,
    Entry,
    FetchHandle,
    SerializationError,
    storage_error,
    store_dead_letter,
)
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.ids import SYSTEM_RNG
from penstock.limits import BATCH_BYTES_MAX
from penstock.retry import RetryPolicy, retry
from penstock.spark.sources.base import SourceStreamReader, runs_of
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.columns import (
    BatchSlice,
    Gap,
    acknowledged_gap,
    build_batch,
    build_gap,
    needs_metadata,
    regroup,
)
from penstock.spark.sources.offsets import (
    Bounds,
    Offset,
    QueueOffsets,
    StoredOffset,
    admit_bytes,
    backlog,
    spread_start,
)
from penstock.spark.sources.queues import (
    ConsumedQueue,
    Indexes,
    ObjectSizes,
    Queue,
    ReadQueue,
    bounds_of,
    entries_between,
    location_at,
)
from penstock.spark.worker import freeze_modules, load_ahead, worker_store

_log = logging.getLogger(__name__)
_POLICY: Final = RetryPolicy(deadline_s=30.0)

Slice: TypeAlias = BatchSlice | Gap


class SlicePartition(InputPartition):
    """The slices of one task: batch objects in queue order, and gaps."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        super().__init__(None)
        self.slices = tuple(slices)


class BufferReader(DataSourceReader):
    """The reader of a batch query over the batches in the queue. It neither fences nor acknowledges."""

    def __init__(self, options: BufferOptions) -> None:
        if options.mode == "consume":
            raise ConfigError(
                "mode: a batch query only reads; consuming is for streams. To consume the current records "
                "and stop, use readStream with trigger(availableNow=True)"
            )
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        queue = ReadQueue.open(options, must_exist=True)
        try:
            indexes = queue.look()
        finally:
            queue.close()
        start, end = QueueOffsets(options.manifest_path).resolve_range(
            options.starting, options.ending, bounds_of(indexes), earlier=options.records_gaps
        )
        slices = slices_between(indexes, start, end, options, queue.manifests)
        # For an empty list Spark would create a partition itself.
        return list(partition_slices(slices, options.tasks) or [SlicePartition(())])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices, set_aside=False)


class BufferStreamReader(SourceStreamReader[int, str]):
    """The stream reader of a queue. It consumes the queue unless `mode` is `read`.

    The first call that needs the queue opens it, because Spark creates some instances only to pickle them.
    """

    _offsets: QueueOffsets

    def __init__(self, options: BufferOptions) -> None:
        offsets = QueueOffsets(options.manifest_path)
        super().__init__(offsets, options.starting, options.batches_per_trigger, "batches", (options,))
        self._options = options
        self._opened: Queue | None = None
        self._sizes: ObjectSizes | None = None
        self._indexes: Indexes = {}

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            options = self._options
            if options.mode == "read":
                self._opened = ReadQueue.open(options, must_exist=False)
            else:
                self._opened = ConsumedQueue.open(options)
        return self._opened

    def _look(self) -> Mapping[int, Bounds]:
        self._indexes = self._queue.look()
        return bounds_of(self._indexes)

    def _start(self, bounds: Mapping[int, Bounds]) -> Offset:
        position = spread_start(self._options.starting, bounds)
        start = self._offsets.resolve(position, bounds, "startingOffsets")
        self._offsets.check_requested(start, bounds, "startingOffsets", earlier=self._options.records_gaps)
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return `maxBatchesPerTrigger`. `maxBytesPerTrigger` applies in addition."""
        return ReadMaxFiles(self._per_trigger)

    def _accept(self, numbers: Offset, marks: Mapping[int, str]) -> Offset:
        offset = self._offsets.fit(numbers, marks, list(self._indexes))
        self._offsets.check_reached(offset, self._seen)
        self._offsets.check_identity(offset, marks, self._location)
        return offset

    def _admit(self, start: Offset, end: Offset, limit: int) -> Offset:
        reached = super()._admit(start, end, limit)
        bytes_max = self._options.bytes_per_trigger
        if bytes_max is None:
            return reached
        sizes = self._sizes = self._sizes or ObjectSizes(self._queue.store)
        sizes.forget_below(start)
        return admit_bytes(
            start, reached, bytes_max, lambda shard, n: sizes.size(self._indexes[shard], shard, n)
        )

    def _check_gaps(self, start: Offset, end: Offset) -> None:
        if not self._options.records_gaps:
            self._offsets.check_held(start, self._seen)
        lost = backlog(start, {shard: min(held.first, end[shard]) for shard, held in self._seen.items()})
        if lost:
            _log.warning("%d batches have left the queue unread; the next micro-batch records the gap", lost)

    def _mark(self, key: int, number: int) -> str | None:
        return self._location(key, number - 1) if number else None

    def _location(self, shard: int, sequence: int) -> str | None:
        held = location_at(self._indexes[shard], sequence)
        return held if held is not None else self._queue.dequeued(shard).get(sequence)

    def _plan(self, start: Offset, end: Offset, marks: Mapping[int, str]) -> list[InputPartition]:
        """Return the tasks for the range between two offsets.

        With `onGap=record`, a restart may find a wider gap at the start; see `acknowledged_gap`.
        """
        slices = slices_between(self._indexes, start, end, self._options, self._queue.manifests)
        return list(partition_slices(slices, self._options.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices, set_aside=self._options.mode != "read")

    def commit(self, end: StoredOffset) -> None:
        """Acknowledge everything before `end`, in one manifest write per shard.

        Raise `QueueGap` if `end` belongs to another queue.
        """
        if not self._indexes:
            self._refresh()
        self._queue.ack(self._accept(*self._offsets.read(end)))


def slices_between(
    indexes: Indexes,
    start: Mapping[int, int],
    end: Mapping[int, int],
    options: BufferOptions,
    manifests: Mapping[int, str],
) -> list[Slice]:
    """Return the slices between two offsets.

    The same offsets give the same slices while the queue holds all of their batches. In each shard, the
    batches that have left the queue become one gap before the others.
    """
    slices: list[Slice] = []
    for shard, held in bounds_of(indexes).items():
        gap = acknowledged_gap(shard, start[shard], end[shard], held)
        slices += [gap] if gap is not None else []
        make = partial(
            slice_of,
            shard,
            with_metadata=needs_metadata(options.columns),
            manifest=manifests[shard] if options.records_gaps else "",
        )
        first = max(start[shard], held.first)
        slices += map(make, entries_between(indexes[shard], first, end[shard]))
    return slices


def slice_of(shard: int, entry: Entry, *, with_metadata: bool, manifest: str = "") -> BatchSlice:
    """Return the slice of an entry. Include the producers' metadata only if a column needs it."""
    if not with_metadata:
        return BatchSlice(shard=shard, sequence=entry.sequence, location=entry.location, manifest=manifest)
    payloads = tuple(meta.payload for meta in entry.metadata)
    return BatchSlice(
        shard=shard,
        sequence=entry.sequence,
        location=entry.location,
        starts=np.array([meta.start_index for meta in entry.metadata], "<u4").tobytes(),
        times_ms=np.array([meta.ingestion_time_ms for meta in entry.metadata], "<i8").tobytes(),
        payloads=payloads if any(payloads) else None,
        manifest=manifest,
    )


def partition_slices(slices: Sequence[Slice], tasks: int) -> list[SlicePartition]:
    """Split slices into at most `tasks` contiguous partitions."""
    return [SlicePartition(run) for run in runs_of(slices, tasks)]


def read_slices(
    options: BufferOptions, slices: Sequence[Slice], *, set_aside: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the records of the slices, in order, in record batches of the declared schema.

    Raise `BatchMissing`, `SerializationError` or another `StorageError`, naming the batch. With
    `onGap=record` the first two become rows. With `set_aside`, a dead letter next to the manifest keeps the
    damaged data, because a query that acknowledges the batch causes its deletion.
    """
    yield from regroup(load_ahead(partial(_load, _Worker(options, set_aside=set_aside)), slices))
    freeze_modules()


class _Worker:
    """The store and the fetcher that all loads of one task share."""

    def __init__(self, options: BufferOptions, *, set_aside: bool) -> None:
        self.options = options
        self.set_aside = set_aside
        self.store = worker_store(options.store)
        self.fetcher = FetchHandle(self.store, batch_bytes_max=BATCH_BYTES_MAX, policy=_POLICY)


def _load(worker: _Worker, slice_: Slice) -> pa.RecordBatch:
    columns = worker.options.columns
    if isinstance(slice_, Gap):
        return build_gap(slice_, columns)
    descriptor = BatchDescriptor(sequence=slice_.sequence, location=slice_.location, metadata=())
    try:
        batch = loop_thread().run(worker.fetcher.fetch(descriptor))
    except (BatchMissing, SerializationError) as error:
        if worker.options.records_gaps:
            return build_gap(loop_thread().run(_recorded_gap(worker, slice_, error)), columns)
        if isinstance(error, SerializationError):
            raise
        raise BatchMissing(
            f"{error}. It may have been consumed and collected since the query was planned (mode=read), "
            "or removed by hand; `penstock buffer fsck` reports what else is missing"
        ) from error
    return build_batch(slice_, batch.block, columns)


async def _recorded_gap(worker: _Worker, slice_: BatchSlice, error: PenstockError) -> Gap:
    """Store a dead letter for an unreadable batch if the query consumes, and return its gap.

    Raise `BatchMissing` if this worker cannot see the queue's manifest.
    """
    store, retrying = worker.store, partial(retry, policy=_POLICY, clock=SYSTEM_CLOCK, rng=SYSTEM_RNG)
    descriptor = BatchDescriptor(sequence=slice_.sequence, location=slice_.location, metadata=())
    try:
        await retrying(lambda: store.head(slice_.manifest))
        if worker.set_aside:
            data = None if isinstance(error, BatchMissing) else await worker.fetcher.raw(descriptor)
            await retrying(
                lambda: store_dead_letter(
                    store,
                    slice_.manifest,
                    sequence=slice_.sequence,
                    location=slice_.location,
                    reason=str(error),
                    data=data,
                    now_ms=SYSTEM_CLOCK.now_ms(),
                )
            )
    except NotFound as unseen:
        raise BatchMissing(
            f"{error}, and neither is {slice_.manifest}: this worker does not see the queue in {store.url}. "
            "Every worker needs the same directory mounted, or the same bucket"
        ) from unseen
    except PenstockError as failure:
        raise storage_error(failure, f"recording that {error}") from failure
    return Gap(
        shard=slice_.shard,
        first=slice_.sequence,
        last=slice_.sequence,
        reason=str(error),
        location=slice_.location,
    )
