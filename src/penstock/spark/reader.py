"""What tasks do: fetch batch objects a few ahead, decode them, and hand Arrow to Spark.

A task gets everything it needs with its partition. Handles to the store are made in the worker process that
uses them and kept for its next task; clients of object stores do not survive a fork.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.blocking import loop_thread
from penstock.buffer import BatchDescriptor, BatchMissing, FetchHandle
from penstock.errors import ConfigError
from penstock.limits import BATCH_BYTES_MAX
from penstock.objects import ObjectStore, StoreConfig, open_store
from penstock.retry import RetryPolicy
from penstock.spark.columns import build_batch, needs_metadata, regroup
from penstock.spark.offsets import check_asked, resolve
from penstock.spark.options import BufferOptions
from penstock.spark.plan import BatchSlice, SlicePartition, group, slice_of
from penstock.spark.queues import Indexes, ReadQueue, bounds_of, entries_between

__all__ = ["BufferReader", "partitions_between", "read_slices", "worker_store"]

FETCH_AHEAD: Final = 4
FETCH_AHEAD_BYTES: Final = 128 << 20
"""Stop fetching ahead while this much waits for Spark to take it."""

_Fetch: TypeAlias = "Future[pa.RecordBatch]"
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
        check_asked(start, bounds, "startingOffsets", options.manifest_path)
        check_asked(end, bounds, "endingOffsets", options.manifest_path)
        for shard in bounds:
            if start[shard] > end[shard]:
                raise ConfigError(
                    f"startingOffsets {start[shard]} lies behind endingOffsets {end[shard]} in shard {shard}"
                )
        # For an empty list Spark would make up a partition of its own.
        return list(partitions_between(indexes, start, end, options) or [SlicePartition(())])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices)


def partitions_between(
    indexes: Indexes, start: dict[int, int], end: dict[int, int], options: BufferOptions
) -> list[SlicePartition]:
    """The work between two offsets, divided into tasks. The same for the same offsets, always."""
    with_metadata = needs_metadata(options.columns)
    slices = [
        slice_of(shard, entry, with_metadata=with_metadata)
        for shard, index in sorted(indexes.items())
        for entry in entries_between(index, start[shard], end[shard])
    ]
    return group(slices, options.tasks)


def worker_store(config: StoreConfig) -> ObjectStore:
    """This process's store for `config`."""
    key = (os.getpid(), config.url, tuple(sorted(config.options.items())))
    store = _stores.get(key)
    if store is None:
        store = _stores[key] = open_store(config)
    return store


def read_slices(options: BufferOptions, slices: Sequence[BatchSlice]) -> Iterator[pa.RecordBatch]:
    """Every record of the slices, in order, in record batches of the declared schema.

    Raises `BatchMissing`, `SerializationError` or another `StorageError`, naming the batch.
    """
    fetcher = FetchHandle(
        worker_store(options.store), batch_bytes_max=BATCH_BYTES_MAX, policy=RetryPolicy(deadline_s=30.0)
    )

    def load(slice_: BatchSlice) -> pa.RecordBatch:
        descriptor = BatchDescriptor(sequence=slice_.sequence, location=slice_.location, metadata=())
        try:
            batch = loop_thread().run(fetcher.fetch(descriptor))
        except BatchMissing as error:
            raise BatchMissing(
                f"{error}. It may have been consumed and collected since the query was planned (mode=read), "
                "or removed by hand; `penstock buffer fsck` tells what else is missing"
            ) from error
        return build_batch(slice_, batch.block, options.columns)

    with ThreadPoolExecutor(FETCH_AHEAD, thread_name_prefix="penstock-fetch") as pool:
        waiting: deque[_Fetch] = deque()
        try:
            yield from regroup(_in_order(pool, load, slices, waiting))
        finally:
            for fetch in waiting:
                fetch.cancel()
    _freeze_modules()


def _in_order(
    pool: ThreadPoolExecutor,
    load: Callable[[BatchSlice], pa.RecordBatch],
    slices: Sequence[BatchSlice],
    waiting: deque[_Fetch],
) -> Iterator[pa.RecordBatch]:
    todo = deque(slices)
    while todo or waiting:
        while todo and len(waiting) < FETCH_AHEAD and (not waiting or _held(waiting) < FETCH_AHEAD_BYTES):
            waiting.append(pool.submit(load, todo.popleft()))
        yield waiting.popleft().result()


def _held(waiting: deque[_Fetch]) -> int:
    return sum(f.result().nbytes for f in waiting if f.done() and not f.cancelled() and not f.exception())


def _freeze_modules() -> None:
    """Take what the imports made out of the collector's sight.

    The worker collects garbage after every task; going through all modules each time costs more than a
    small task itself. Only when modules were added, so that ordinary garbage is still collected.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
