"""Taking the blocks of a bucket into the streams of its series, some series at a time.

    plan     blocks ──► the series they have samples of, in the order of their streams' keys
    step     the next series: their streams and what all blocks have of them ──► one stream for each
    last     the blocks go, with the streams of the last series

What is read does not change at any step: a sample in a block wins over the one in a stream, and until the
blocks go a stream gets nothing but what they say. So a fold may end anywhere, and one that is begun again
does the same once more.
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
"""Bytes of streams between two looks at how many samples they hold: four a byte at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """A fold under way: which blocks go, into which streams, and how many of those are done.

    `counts` says how many samples the blocks have for each stream.
    """

    bucket: Bucket
    blocks: Sequence[bytes]
    streams: Sequence[bytes]
    counts: Sequence[int]
    is_whole: bool = True
    """Whether there were no blocks besides these when it was planned."""
    done: int = 0

    def is_last(self, end: int) -> bool:
        """Whether nothing is left behind the stream at `end`."""
        return end == len(self.streams)


def plan_fold(bucket: Bucket, blocks: Sequence[KeyValue], metrics: dict[int, str]) -> Compaction:
    """The fold of these blocks, oldest first. Raises `Corrupt` if a series has no labels in `metrics`."""
    streams: list[tuple[bytes, int]] = []
    for series_id, count in zip(*_counted(blocks), strict=True):
        metric = metrics.get(series_id)
        if metric is None:
            raise Corrupt(f"labels of series {series_id} are missing or damaged, and there are samples of it")
        streams.append((SamplesKey(bucket, metric, SeriesId(series_id)).encode(), count))
    streams.sort()
    return Compaction(
        bucket, [key for key, _ in blocks], [key for key, _ in streams], [count for _, count in streams]
    )


def _counted(blocks: Sequence[KeyValue]) -> tuple[list[int], list[int]]:
    """The series that blocks have samples of, and how many of each. Ids may be few and far between."""
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


def fold_operations(
    fold: Compaction, end: int, blocks: Sequence[KeyValue], folded: Sequence[Rows], expire_at_ms: int | None
) -> list[Operation]:
    """The streams up to `end` with what the blocks have for them, `folded` being what they had before.

    They are put, not merged: an operand costs every later read a call of the merge operator.
    """
    keys = {_series_of(key): key for key in fold.streams[fold.done : end]}
    wanted: Ids = np.array(sorted(keys), np.uint32)
    added = (decode_rows(block).of(wanted) for block in blocks)
    ids, samples = Rows.joined((*folded, *added)).in_order().by_series()
    puts = [
        Put(keys[series_id], stream, expire_at_ms)
        for series_id, stream in zip(ids, encode_many(samples), strict=True)
    ]
    return [*puts, *(Delete(key) for key in fold.blocks if fold.is_last(end))]


class Compactor:
    """Plans folds of blocks of about `blocks_bytes`, and takes their steps of about `samples_max` samples.

    Works on `thread`.
    """

    def __init__(self, read: StorageRead, thread: Executor, *, blocks_bytes: int, samples_max: int) -> None:
        self._read = read
        self._thread = thread
        self._blocks_bytes = blocks_bytes
        self._samples_max = samples_max

    async def plan(self, bucket: Bucket) -> Compaction:
        """A fold of the oldest blocks: what later ones say wins anyway. Raises `Corrupt`."""
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
            with suppress(Corrupt):  # it is missed if the blocks have samples of it
                metrics[series_id] = decode_labels(series_id, value).metric
        fold = await asyncio.get_running_loop().run_in_executor(
            self._thread, plan_fold, bucket, blocks, metrics
        )
        return dataclasses.replace(fold, is_whole=is_whole)

    async def go_on(
        self, fold: Compaction, wanted: int, expire_at_ms: int | None
    ) -> tuple[list[Operation], Compaction | None]:
        """What the next steps store, and the fold as it is then, None if that was all. Raises `Corrupt`.

        There is one step, or as many as it takes to fold `wanted` samples of the blocks.
        """
        prefix = block_prefix(fold.bucket)
        stop = fold.blocks[-1][len(prefix) :] + b"\0" if fold.blocks else b""
        blocks = [block async for block in pairs(self._read.scan(prefix, stop=stop))]
        operations: list[Operation] = []
        while True:
            folded, end = await self._next_streams(fold)
            operations += await asyncio.get_running_loop().run_in_executor(
                self._thread, fold_operations, fold, end, blocks, folded, expire_at_ms
            )
            wanted -= sum(fold.counts[fold.done : end])
            if fold.is_last(end):
                return operations, None
            fold = dataclasses.replace(fold, done=end)
            if wanted <= 0:
                return operations, fold

    async def _next_streams(self, fold: Compaction) -> tuple[list[Rows], int]:
        """What the next streams hold, and where they end: one at least, if there is one."""
        prefix = record_prefix(fold.bucket, RecordType.SAMPLES)
        start = fold.streams[fold.done][len(prefix) :] if fold.streams else b""
        rows: list[Rows] = []
        waiting: list[KeyValue] = []
        waiting_bytes = sample_count = 0
        end = fold.done
        stored = pairs(self._read.scan(prefix, start=start))
        found = await anext(stored, None)
        while not fold.is_last(end) and sample_count < self._samples_max:
            key = fold.streams[end]
            while found is not None and found.key < key:
                found = await anext(stored, None)
            if found is not None and found.key == key:
                waiting.append(found)
                waiting_bytes += len(found.value)
            sample_count += fold.counts[end]
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
