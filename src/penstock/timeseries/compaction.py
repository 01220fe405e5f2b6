"""Compaction of a bucket's blocks into the streams of its series, some series at a time.

    plan     blocks ──► the series with samples in them, in the order of their streams' keys
    step     the next series: their streams and their samples in all blocks ──► one stream for each
    last     the blocks are deleted, together with the step of the last series

No step changes query results: a sample in a block overrides one in a stream, and until the blocks are
deleted, streams receive only samples from them. A compaction may therefore stop at any point, and repeating
it gives the same result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.coordinator import Delete, KeyValue, Operation, Put, StorageRead, pairs
from penstock.errors import Corrupt
from penstock.timeseries.delta import Ids, Rows
from penstock.timeseries.gorilla import decode, decode_many, encode_many
from penstock.timeseries.keys import RecordType, SamplesKey, record_prefix
from penstock.timeseries.model import Bucket, SeriesId
from penstock.timeseries.records import block_prefix, decode_labels, decode_rows

_ID: Final = struct.Struct(">I")
_Counts: TypeAlias = tuple[Ids, npt.NDArray[np.int64]]
_COUNTED_AT_ONCE: Final = 1_000_000
_DECODED_AT_ONCE: Final = 256 * 1024
"""Bytes of streams to decode together. A byte holds at most four samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """A compaction in progress: its blocks, their target streams, and the number of finished streams.

    `counts` holds the number of samples in the blocks for each stream.
    """

    bucket: Bucket
    blocks: Sequence[bytes]
    streams: Sequence[bytes]
    counts: Sequence[int]
    is_whole: bool = True
    """True if these were all blocks of the bucket when the compaction was planned."""
    done: int = 0

    def is_last(self, end: int) -> bool:
        """Return whether `end` is after the last stream."""
        return end == len(self.streams)


def plan_compaction(bucket: Bucket, blocks: Sequence[KeyValue], metrics: dict[int, str]) -> Compaction:
    """Plan the compaction of these blocks, oldest first. Raises `Corrupt` if a series is not in `metrics`."""
    streams: list[tuple[bytes, int]] = []
    for series_id, count in zip(*_counted(blocks), strict=True):
        metric = metrics.get(series_id)
        if metric is None:
            raise Corrupt(f"labels of series {series_id} are missing or damaged, but it has samples")
        streams.append((SamplesKey(bucket, metric, SeriesId(series_id)).encode(), count))
    streams.sort()
    return Compaction(
        bucket, [key for key, _ in blocks], [key for key, _ in streams], [count for _, count in streams]
    )


def _counted(blocks: Sequence[KeyValue]) -> tuple[list[int], list[int]]:
    """Return the ids of the series in the blocks and their sample counts. Ids may be sparse."""
    parts: list[_Counts] = []
    held = 0
    for block in blocks:
        parts.append(np.unique(decode_rows(block).ids, return_counts=True))
        held += len(parts[-1][0])
        if held > _COUNTED_AT_ONCE:
            parts = [_added_up(parts)]
            held = len(parts[0][0])
    ids, counts = _added_up(parts)
    return ids.tolist(), counts.tolist()


def _added_up(parts: list[_Counts]) -> _Counts:
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    ids, place = np.unique(np.concatenate([ids for ids, _ in parts]), return_inverse=True)
    counts: npt.NDArray[np.int64] = np.zeros(len(ids), np.int64)
    np.add.at(counts, place, np.concatenate([counts for _, counts in parts]))
    return ids, counts


def compaction_operations(
    compaction: Compaction,
    end: int,
    blocks: Sequence[KeyValue],
    stored: Sequence[Rows],
    expire_at_ms: int | None,
) -> list[Operation]:
    """Return operations that store the streams up to `end`, merged from `stored` and the blocks.

    They are puts, not merges, because each merge operand costs every later read a call of the merge operator.
    """
    keys = {_series_of(key): key for key in compaction.streams[compaction.done : end]}
    wanted: Ids = np.array(sorted(keys), np.uint32)
    added = (decode_rows(block).of(wanted) for block in blocks)
    ids, samples = Rows.joined((*stored, *added)).in_order().by_series()
    puts = [
        Put(keys[series_id], stream, expire_at_ms)
        for series_id, stream in zip(ids, encode_many(samples), strict=True)
    ]
    return [*puts, *(Delete(key) for key in compaction.blocks if compaction.is_last(end))]


class Compactor:
    """Planner of compactions of about `blocks_bytes`, in steps of about `samples_max` samples."""

    def __init__(self, read: StorageRead, thread: Executor, *, blocks_bytes: int, samples_max: int) -> None:
        self._read = read
        self._thread = thread
        self._blocks_bytes = blocks_bytes
        self._samples_max = samples_max

    async def plan(self, bucket: Bucket) -> Compaction:
        """Plan the compaction of the oldest blocks. Samples of later blocks override earlier ones. Raises
        `Corrupt`."""
        blocks: list[KeyValue] = []
        size = 0
        is_whole = True
        async for block in pairs(self._read.scan(block_prefix(bucket))):
            if size >= self._blocks_bytes:
                is_whole = False
                break
            blocks.append(block)
            size += len(block.value)
        forward = record_prefix(bucket, RecordType.FORWARD)
        metrics: dict[int, str] = {}
        async for key, value in pairs(self._read.scan(forward)):
            series_id = int.from_bytes(key[len(forward) :])
            with suppress(Corrupt):  # planning fails only if the blocks hold samples of this series
                metrics[series_id] = decode_labels(series_id, value).metric
        compaction = await asyncio.get_running_loop().run_in_executor(
            self._thread, plan_compaction, bucket, blocks, metrics
        )
        return dataclasses.replace(compaction, is_whole=is_whole)

    async def advance(
        self, compaction: Compaction, wanted: int, expire_at_ms: int | None
    ) -> tuple[list[Operation], Compaction | None]:
        """Return the operations of the next steps, and the remaining compaction or None at its end.

        Takes at least one step, and more until `wanted` samples of the blocks are compacted. Raises
        `Corrupt`.
        """
        prefix = block_prefix(compaction.bucket)
        stop = compaction.blocks[-1][len(prefix) :] + b"\0" if compaction.blocks else b""
        blocks = [block async for block in pairs(self._read.scan(prefix, stop=stop))]
        operations: list[Operation] = []
        while True:
            stored, end = await self._next_streams(compaction)
            operations += await asyncio.get_running_loop().run_in_executor(
                self._thread, compaction_operations, compaction, end, blocks, stored, expire_at_ms
            )
            wanted -= sum(compaction.counts[compaction.done : end])
            if compaction.is_last(end):
                return operations, None
            compaction = dataclasses.replace(compaction, done=end)
            if wanted <= 0:
                return operations, compaction

    async def _next_streams(self, compaction: Compaction) -> tuple[list[Rows], int]:
        """Return the samples of one or more of the next streams, and the index after them."""
        prefix = record_prefix(compaction.bucket, RecordType.SAMPLES)
        start = compaction.streams[compaction.done][len(prefix) :] if compaction.streams else b""
        rows: list[Rows] = []
        waiting: list[KeyValue] = []
        waiting_bytes = sample_count = 0
        end = compaction.done
        stored = pairs(self._read.scan(prefix, start=start))
        found = await anext(stored, None)
        while not compaction.is_last(end) and sample_count < self._samples_max:
            key = compaction.streams[end]
            while found is not None and found.key < key:
                found = await anext(stored, None)
            if found is not None and found.key == key:
                waiting.append(found)
                waiting_bytes += len(found.value)
            sample_count += compaction.counts[end]
            end += 1
            if waiting_bytes >= _DECODED_AT_ONCE:
                rows.append(await self._decoded(waiting))
                sample_count += len(rows[-1])
                waiting, waiting_bytes = [], 0
        rows.append(await self._decoded(waiting))
        return rows, end

    async def _decoded(self, streams: list[KeyValue]) -> Rows:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _decode_streams, streams)


def _decode_streams(streams: list[KeyValue]) -> Rows:
    ids = [_series_of(key) for key, _ in streams]
    try:
        return Rows.of_series(ids, decode_many([value for _, value in streams]))
    except Corrupt:
        for series_id, stream in zip(ids, streams, strict=True):
            try:
                decode(stream.value)
            except Corrupt as error:
                raise Corrupt(f"samples of series {series_id}: {error}") from None
        raise


def _series_of(stream_key: bytes) -> int:
    return int(_ID.unpack(stream_key[-_ID.size :])[0])
