"""From a delta to the operations that store it, and back to what the directory needs.

Besides the records of `keys` there are, in every bucket,

    06 block       number u32: the samples that one flush brought, see `rows`

and under the bucket start FFFFFFFF, which is no hour, for the whole database

    07 family      metric name: a forward record without labels, and the description behind it
    08 position    the last sequence of the queue that the database is fed from, and its name
    09 retention   see `retention`

A flush puts one block for each bucket. Folding takes the blocks of a bucket into the streams of its series
and deletes them, in one batch; so a series is one record without operands, and a flush is few records.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from pyroaring import BitMap

from penstock.coordinator import Delete, KeyValue, Merge, Operation, Put, StorageRead, pairs
from penstock.coordinator.position import Position
from penstock.errors import Corrupt
from penstock.timeseries.bucket import Bucket
from penstock.timeseries.delta import BucketDelta, SeriesDelta
from penstock.timeseries.directory import BucketSeries
from penstock.timeseries.gorilla import decode_many, encode_many, merge_streams
from penstock.timeseries.keys import (
    FAMILY_PREFIX,
    GLOBAL_PREFIX,
    SUBSYSTEM_PREFIX,
    DictionaryKey,
    ForwardKey,
    InvertedKey,
    RecordType,
    SamplesKey,
    bucket_prefix,
    record_prefix,
)
from penstock.timeseries.model import NO_LABELS, Fingerprint, Metadata, MetricType, SeriesId
from penstock.timeseries.retention import Retention
from penstock.timeseries.rows import Rows, decode_block, encode_block
from penstock.timeseries.values import (
    decode_forward,
    decode_series_id,
    encode_forward,
    encode_series_id,
    merge_series_ids,
)

__all__ = [
    "block_key",
    "block_prefix",
    "bucket_of",
    "delta_operations",
    "family_prefix",
    "fold_operations",
    "load_bucket",
    "load_families",
    "load_position",
    "merge_records",
]

_BLOCK: Final = b"\x06"
_POSITION: Final = GLOBAL_PREFIX + b"\x08"
_NUMBER: Final = struct.Struct(">I")
_BUCKET: Final = struct.Struct(">IB")
_TYPE_AT: Final = len(SUBSYSTEM_PREFIX) + _BUCKET.size


def block_prefix(bucket: Bucket) -> bytes:
    """What the keys of a bucket's blocks start with."""
    return bucket_prefix(bucket) + _BLOCK


def block_key(bucket: Bucket, number: int) -> bytes:
    return block_prefix(bucket) + _NUMBER.pack(number)


def family_prefix() -> bytes:
    return FAMILY_PREFIX


def bucket_of(key: bytes) -> Bucket | None:
    """The bucket that a key belongs to; None for what belongs to the whole database. Raises `Corrupt`."""
    if key.startswith(GLOBAL_PREFIX):
        return None
    try:
        return Bucket(*_BUCKET.unpack_from(key, len(SUBSYSTEM_PREFIX)))
    except (struct.error, ValueError) as error:
        raise Corrupt(f"{key[:32].hex()} is not a key of the time series: {error}") from None


def merge_records(key: bytes, operands: Sequence[bytes]) -> bytes:
    """The merge operator: a union of ids, samples by time with the newest operand first, else the newest.

    Operands that are damaged are kept as they are, in a form that whoever reads them notices.
    """
    try:
        if key[_TYPE_AT] == RecordType.INVERTED:
            return merge_series_ids(operands)
        if key[_TYPE_AT] == RecordType.SAMPLES:
            return merge_streams(operands)
    except Corrupt:
        return b"\xff" + b"".join(operands)
    return operands[-1]


def delta_operations(delta: SeriesDelta, retention: Retention) -> list[Operation]:
    """Everything that a delta added, as one batch."""
    operations: list[Operation] = []
    for bucket, changed in delta.buckets.items():
        operations += _bucket_operations(bucket, changed, retention.expiry_ms(bucket))
    operations += [
        Put(FAMILY_PREFIX + name.encode(), _encode_family(one)) for name, one in delta.families.items()
    ]
    if delta.position is not None:
        operations.append(Put(_POSITION, delta.position.encode()))
    return operations


def _bucket_operations(bucket: Bucket, changed: BucketDelta, expire_at_ms: int | None) -> Iterator[Operation]:
    carriers: dict[tuple[str, str], BitMap] = {}
    for series_id, labels, fingerprint, metadata in changed.new:
        own = SeriesId(series_id)
        yield Put(DictionaryKey(bucket, fingerprint).encode(), encode_series_id(own), expire_at_ms)
        yield Put(ForwardKey(bucket, own).encode(), encode_forward(labels, metadata), expire_at_ms)
        for pair in labels:
            carriers.setdefault(pair, BitMap()).add(series_id)
    for (name, value), ids in carriers.items():
        yield Merge(InvertedKey(bucket, name, value).encode(), ids.serialize(), expire_at_ms)
    block = encode_block(Rows.joined(changed.chunks).in_order())
    yield Put(block_key(bucket, changed.block), block, expire_at_ms)


def fold_operations(
    bucket: Bucket,
    blocks: Sequence[KeyValue],
    streams: dict[int, bytes],
    metrics: dict[int, str],
    retention: Retention,
) -> list[Operation]:
    """The blocks (oldest first) and the streams that their series have, as one stream each; the blocks go.

    They are put, not merged: an operand costs every later read a call of the merge operator. Raises `Corrupt`
    if a series has no labels in `metrics`.
    """
    added = Rows.joined(decode_block(value) for _, value in blocks)
    known = [one for one in np.unique(added.ids).tolist() if one in streams]
    folded = Rows.of_series(known, decode_many([streams[one] for one in known]))
    ids, samples = Rows.joined((folded, added)).in_order().by_series()
    nameless = [one for one in ids if one not in metrics]
    if nameless:
        raise Corrupt(f"bucket {bucket.start_minutes} has samples of series {nameless[0]}, not its labels")
    expire_at_ms = retention.expiry_ms(bucket)
    puts = [
        Put(SamplesKey(bucket, metrics[series_id], SeriesId(series_id)).encode(), stream, expire_at_ms)
        for series_id, stream in zip(ids, encode_many(samples), strict=True)
    ]
    return [*puts, *(Delete(key) for key, _ in blocks)]


async def load_bucket(read: StorageRead, bucket: Bucket) -> BucketSeries:
    """The series of a bucket as stored. Raises `Corrupt`.

    The next id is behind the largest that anything there names, so that no samples get another owner even if
    the records that name it are lost.
    """
    series = BucketSeries()
    async for key, value in pairs(read.scan(record_prefix(bucket, RecordType.FORWARD))):
        (series_id,) = _NUMBER.unpack(key[_TYPE_AT + 1 :])
        labels, _ = decode_forward(value)
        series.ids[labels] = series_id
        series.labels[series_id] = labels
    async for key, value in pairs(read.scan(record_prefix(bucket, RecordType.DICTIONARY))):
        series.fingerprints[Fingerprint(key[_TYPE_AT + 1 :])] = decode_series_id(value)
    if len(series.ids) != len(series.fingerprints):
        raise Corrupt(
            f"bucket {bucket.start_minutes} names {len(series.ids)} series and "
            f"{len(series.fingerprints)} fingerprints"
        )
    blocks = [block async for block in pairs(read.scan(block_prefix(bucket)))]
    if blocks:
        series.next_block = _NUMBER.unpack(blocks[-1].key[_TYPE_AT + 1 :])[0] + 1
    named = max((*series.labels, *series.fingerprints.values()), default=-1)
    streamed = await _largest_streamed(read, bucket)
    in_blocks = await asyncio.to_thread(_largest_in, blocks) if blocks else -1
    series.next_id = max(named, streamed, in_blocks) + 1
    return series


async def _largest_streamed(read: StorageRead, bucket: Bucket) -> int:
    """The largest id of a stream, -1 without one."""
    largest = -1
    async for page in read.scan(record_prefix(bucket, RecordType.SAMPLES)):
        largest = max(largest, *(_NUMBER.unpack(key[-_NUMBER.size :])[0] for key, _ in page))
    return largest


def _largest_in(blocks: Sequence[KeyValue]) -> int:
    """The largest id in blocks, -1 without one: their rows are sorted by id."""
    return max((int(rows.ids[-1]) for _, value in blocks if len(rows := decode_block(value))), default=-1)


async def load_families(read: StorageRead) -> dict[str, Metadata]:
    """What is known of each metric. Raises `Corrupt`."""
    return {
        key[len(FAMILY_PREFIX) :].decode(): _decode_family(value)
        async for key, value in pairs(read.scan(FAMILY_PREFIX))
    }


async def load_position(read: StorageRead) -> Position | None:
    """How far the queue was taken that feeds the database, or None. Raises `Corrupt`."""
    value = await read.get(_POSITION)
    return None if value is None else Position.decode(value)


def _encode_family(metadata: Metadata) -> bytes:
    # A forward record without labels, and the description as its only text behind it.
    return encode_forward(NO_LABELS, metadata) + metadata.description.encode()


def _decode_family(value: bytes) -> Metadata:
    (unit_bytes,) = struct.unpack_from("<H", value) if len(value) >= 2 else (0,)
    end = 2 + unit_bytes + 6
    _, metadata = decode_forward(value[:end])
    try:
        description = value[end:].decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a description is not UTF-8: {error}") from None
    return Metadata(
        metric_type=MetricType(metadata.metric_type),
        temporality=metadata.temporality,
        monotonic=metadata.monotonic,
        unit=metadata.unit,
        description=description,
    )
