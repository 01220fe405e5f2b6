"""What tasks do: fetch batch objects a few ahead, decode them, and hand Arrow to Spark.

A task gets everything it needs with its partition. Handles to the store are made in the worker process that
uses them and kept for its next task; clients of object stores do not survive a fork.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

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
from penstock.objects import ObjectStore, StoreConfig, open_store
from penstock.retry import RetryPolicy, retry
from penstock.spark.sources.buffer_options import BufferOptions
from penstock.spark.sources.columns import BatchSlice, build_batch, build_hole, needs_metadata, regroup
from penstock.spark.sources.gaps import Hole, left_range
from penstock.spark.sources.offsets import check_asked, resolve
from penstock.spark.sources.prefetch import load_ahead
from penstock.spark.sources.queues import Indexes, ReadQueue, bounds_of, entries_between

_POLICY: Final = RetryPolicy(deadline_s=30.0)
_stores: dict[tuple[int, str, tuple[tuple[str, str], ...]], ObjectStore] = {}
_modules_frozen = 0


class BufferReader(DataSourceReader):
    """A batch query over whatever the queue still holds. It owns nothing and changes nothing."""

    def __init__(self, options: BufferOptions) -> None:
        if options.mode == "consume":
            raise ConfigError(
                "mode: a batch query only reads; consuming is for streams. Use readStream with "
                "trigger(availableNow=True) to consume what is there and stop"
            )
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        queue = ReadQueue.open(options, must_exist=True)
        try:
            indexes = queue.look()
        finally:
            queue.close()
        bounds = bounds_of(indexes)
        start = resolve(options.starting, bounds, "startingOffsets")
        end = resolve(options.ending, bounds, "endingOffsets")
        earlier = options.records_gaps
        check_asked(start, bounds, "startingOffsets", options.manifest_path, earlier=earlier)
        check_asked(end, bounds, "endingOffsets", options.manifest_path, earlier=earlier)
        for shard in bounds:
            if start[shard] > end[shard]:
                raise ConfigError(
                    f"startingOffsets {start[shard]} lies behind endingOffsets {end[shard]} in shard {shard}"
                )
        # For an empty list Spark would make up a partition of its own.
        slices = slices_between(indexes, start, end, options, queue.manifests)
        return list(group(slices, options.tasks) or [SlicePartition(())])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices, set_aside=False)


def slices_between(
    indexes: Indexes,
    start: Mapping[int, int],
    end: Mapping[int, int],
    options: BufferOptions,
    manifests: Mapping[int, str],
) -> list[Slice]:
    """The work between two offsets: the same for the same offsets while the queue holds them all.

    What it no longer holds is one hole in front of the rest.
    """
    slices: list[Slice] = []
    for shard, held in bounds_of(indexes).items():
        left = left_range(shard, start[shard], end[shard], held)
        slices += [left] if left is not None else []
        make = partial(
            slice_of,
            shard,
            with_metadata=needs_metadata(options.columns),
            manifest=manifests[shard] if options.records_gaps else "",
        )
        first = max(start[shard], held.first)
        slices += map(make, entries_between(indexes[shard], first, end[shard]))
    return slices


def worker_store(config: StoreConfig) -> ObjectStore:
    """This process's store for `config`."""
    key = (os.getpid(), config.url, tuple(sorted(config.options.items())))
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = open_store(config)
    return store


def read_slices(
    options: BufferOptions, slices: Sequence[Slice], *, set_aside: bool
) -> Iterator[pa.RecordBatch]:
    """Every record of the slices, in order, in record batches of the declared schema.

    Raises `BatchMissing`, `SerializationError` or another `StorageError`, naming the batch. With
    `onGap=record` the first two become rows; `set_aside` then keeps the remains beside the manifest, for a
    query that will acknowledge the batch and so have it collected.
    """
    yield from regroup(load_ahead(partial(_load, _Worker(options, set_aside=set_aside)), slices))
    freeze_modules()


class _Worker:
    """What the loads of one task share."""

    def __init__(self, options: BufferOptions, *, set_aside: bool) -> None:
        self.options = options
        self.set_aside = set_aside
        self.store = worker_store(options.store)
        self.fetcher = FetchHandle(self.store, batch_bytes_max=BATCH_BYTES_MAX, policy=_POLICY)


def _load(worker: _Worker, slice_: Slice) -> pa.RecordBatch:
    columns = worker.options.columns
    if isinstance(slice_, Hole):
        return build_hole(slice_, columns)
    descriptor = BatchDescriptor(sequence=slice_.sequence, location=slice_.location, metadata=())
    try:
        batch = loop_thread().run(worker.fetcher.fetch(descriptor))
    except (BatchMissing, SerializationError) as error:
        if worker.options.records_gaps:
            return build_hole(loop_thread().run(_record(worker, slice_, error)), columns)
        if isinstance(error, SerializationError):
            raise
        raise BatchMissing(
            f"{error}. It may have been consumed and collected since the query was planned (mode=read), "
            "or removed by hand; `penstock buffer fsck` tells what else is missing"
        ) from error
    return build_batch(slice_, batch.block, columns)


async def _record(worker: _Worker, slice_: BatchSlice, error: PenstockError) -> Hole:
    """The hole in place of a bad batch. Raises `BatchMissing` if this worker does not see the queue."""
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
    return Hole(
        shard=slice_.shard,
        first=slice_.sequence,
        last=slice_.sequence,
        reason=str(error),
        location=slice_.location,
    )


def freeze_modules() -> None:
    """Take what the imports made out of the collector's sight.

    The worker collects garbage after every task; going through all modules each time costs more than a
    small task itself. Only when modules were added, so that ordinary garbage is still collected.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


Slice: TypeAlias = BatchSlice | Hole


class SlicePartition(InputPartition):
    """The batch objects of one task, in queue order, and the holes between them."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        super().__init__(None)
        self.slices = tuple(slices)


def slice_of(shard: int, entry: Entry, *, with_metadata: bool, manifest: str = "") -> BatchSlice:
    """An entry of the queue, with what the producers said of it only if a column shows that."""
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


def group(slices: Sequence[Slice], partitions: int) -> list[SlicePartition]:
    """At most `partitions` runs of neighbours, none empty, whose lengths differ by one at most."""
    count = min(partitions, len(slices))
    edges = [len(slices) * number // count for number in range(count + 1)] if count else [0]
    return [SlicePartition(slices[a:b]) for a, b in itertools.pairwise(edges)]
