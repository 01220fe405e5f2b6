"""Encoding of records: deltas to operations that store them, and records back to the series index.

In addition to the records in `keys`, every bucket has

    06 block       number u32: the samples of one flush, see `rows`

and the whole database has, under the bucket start FFFFFFFF, which is not an hour,

    07 family      metric name: a forward record without labels, then the description
    08 position    the last sequence of the feeding queue, and its name
    09 retention   see `retention`

A flush puts one block for each bucket. `compaction` moves the blocks of a bucket into the streams of its
series and deletes them. Therefore a series is one record without operands, and a flush is a few records.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from pyroaring import BitMap

from penstock.coordinator import KeyValue, Merge, Operation, Position, Put, StorageRead, pairs
from penstock.errors import Corrupt, InvalidInput
from penstock.metrics import Registry
from penstock.timeseries.delta import BucketDelta, Rows, SeriesDelta, decode_block, encode_block
from penstock.timeseries.gorilla import merge_streams
from penstock.timeseries.keys import (
    FAMILY_PREFIX,
    GLOBAL_PREFIX,
    SUBSYSTEM_PREFIX,
    DictionaryKey,
    ForwardKey,
    InvertedKey,
    RecordType,
    bucket_prefix,
    record_prefix,
)
from penstock.timeseries.model import (
    NO_LABELS,
    Bucket,
    Fingerprint,
    Labels,
    Metadata,
    MetricType,
    SeriesId,
    Temporality,
)
from penstock.timeseries.retention import Retention
from penstock.timeseries.series_index import BucketSeries

_ID: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<H")
_COUNT_MAX: Final = 2**16 - 1
_TEMPORALITY_BITS: Final = 0b011
_MONOTONIC_BIT: Final = 0b100


def encode_series_id(series_id: SeriesId) -> bytes:
    """Encode a series id. Raises `InvalidInput` if it does not fit four bytes."""
    try:
        return _ID.pack(series_id)
    except struct.error:
        raise InvalidInput(f"series id {series_id} does not fit four bytes") from None


def decode_series_id(value: bytes) -> SeriesId:
    """Decode a series id. Raises `Corrupt` if it is not four bytes."""
    if len(value) != _ID.size:
        raise Corrupt(f"a series id is {_ID.size} bytes, not {len(value)}")
    return SeriesId(*_ID.unpack(value))


def encode_forward(labels: Labels, metadata: Metadata) -> bytes:
    """Encode the labels and metadata of one series. The description is not stored with the series.

    Raises `InvalidInput` if a text is longer than 65,535 bytes.
    """
    flags = metadata.temporality | (_MONOTONIC_BIT if metadata.monotonic else 0)
    parts = [_text(metadata.unit.encode()), bytes((metadata.metric_type, flags))]
    count = _count(len(labels), "labels")
    parts += [count, count]
    for name, value in labels.encoded():
        parts += [_text(name), _text(value)]
    return b"".join(parts)


def decode_forward(value: bytes) -> tuple[Labels, Metadata]:
    """Decode a forward record.

    Raises `Corrupt` if the bytes break the format or the labels are not sorted.
    """
    try:
        unit, at = _read_text(value, 0)
        metric_type, flags = MetricType(value[at]), value[at + 1]
        label_count, pair_count = struct.unpack_from("<HH", value, at + 2)
        pairs, at = _read_pairs(value, at + 6, pair_count)
        metadata = Metadata(
            unit=unit,
            metric_type=metric_type,
            temporality=Temporality(flags & _TEMPORALITY_BITS),
            monotonic=bool(flags & _MONOTONIC_BIT),
        )
    except (IndexError, ValueError, struct.error) as error:
        raise Corrupt(f"a forward record breaks its format: {error}") from None
    names = [name for name, _ in pairs]
    if at != len(value) or label_count != pair_count or names != sorted(set(names)):
        raise Corrupt("a forward record breaks its format: its labels do not match its counts")
    return Labels(pairs), metadata


def decode_series_ids(value: bytes) -> BitMap:
    """Decode a set of ids. Raises `Corrupt` if the bytes are not a bitmap."""
    try:
        return BitMap.deserialize(value)
    except (IndexError, ValueError) as error:
        raise Corrupt(f"an inverted record is not a bitmap: {error}") from None


def merge_series_ids(operands: Sequence[bytes]) -> bytes:
    """Return the union of sets of ids, in any order. Raises `Corrupt` if an operand is not a bitmap."""
    if len(operands) == 1:
        return operands[0]
    return BitMap.union(BitMap(), *map(decode_series_ids, operands)).serialize()


def _text(text: bytes) -> bytes:
    return _count(len(text), "bytes of a text") + text


def _count(count: int, what: str) -> bytes:
    if count > _COUNT_MAX:
        raise InvalidInput(f"{count} {what} exceed the limit of {_COUNT_MAX}")
    return _COUNT.pack(count)


def _read_text(value: bytes, at: int) -> tuple[str, int]:
    (size,) = _COUNT.unpack_from(value, at)
    start = at + _COUNT.size
    if start + size > len(value):
        raise ValueError("a text is truncated")
    return value[start : start + size].decode(), start + size


def _read_pairs(value: bytes, at: int, count: int) -> tuple[list[tuple[str, str]], int]:
    pairs = []
    for _ in range(count):
        name, at = _read_text(value, at)
        text, at = _read_text(value, at)
        pairs.append((name, text))
    return pairs, at


_LOG = logging.getLogger(__name__)
_SHOWN_MAX: Final = 5
"""Number of records named in one log line. Others are only counted in it."""
_LINES_MAX: Final = 20
"""Number of log lines for one hour. Later damage is only counted."""
_REMEMBERED_MAX: Final = 100_000
_WARNINGS_MAX: Final = 20
_MORE: Final = "more records are damaged; see the log and the metrics of the server"


def place_of(bucket: Bucket | None) -> str:
    """Return the location of a record as a phrase. None means the whole database."""
    return "the database" if bucket is None else f"the hour {bucket.start_text}"


def add_warning(warnings: list[str], bucket: Bucket, record: str) -> None:
    """Add a warning for a record that is left out, unless it is a duplicate or there are too many."""
    warning = f"{place_of(bucket)} has damage, which is left out: {record}"
    if warning not in warnings and len(warnings) <= _WARNINGS_MAX:
        warnings.append(warning if len(warnings) < _WARNINGS_MAX else _MORE)


class DamageLog:
    """Log of damage found since the database was opened. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._reported: set[tuple[Bucket | None, str]] = set()
        self._lines: Counter[Bucket | None] = Counter()
        self._records = registry.counter(
            "timeseries.records_damaged", "Stored records left out because they do not decode or are missing."
        )

    def report(self, bucket: Bucket | None, records: Sequence[str]) -> None:
        """Log and count the records, each a name and a reason, that have not been reported before."""
        new = [one for one in dict.fromkeys(records) if (bucket, one) not in self._reported]
        if not new:
            return
        if len(self._reported) > _REMEMBERED_MAX:
            self._reported.clear()
            self._lines.clear()
        self._reported.update((bucket, one) for one in new)
        self._records.inc(len(new))
        self._lines[bucket] += 1
        if self._lines[bucket] > _LINES_MAX:
            return
        more = f"; and {len(new) - _SHOWN_MAX} more" if len(new) > _SHOWN_MAX else ""
        _LOG.warning("%s has damage: %s%s", place_of(bucket), "; ".join(new[:_SHOWN_MAX]), more)


_BLOCK: Final = b"\x06"
_POSITION: Final = GLOBAL_PREFIX + b"\x08"
_NUMBER: Final = struct.Struct(">I")
_BUCKET: Final = struct.Struct(">IB")
_TYPE_AT: Final = len(SUBSYSTEM_PREFIX) + _BUCKET.size


def block_prefix(bucket: Bucket) -> bytes:
    """Return the prefix of the keys of a bucket's blocks."""
    return bucket_prefix(bucket) + _BLOCK


def block_key(bucket: Bucket, number: int) -> bytes:
    return block_prefix(bucket) + _NUMBER.pack(number)


def bucket_of(key: bytes) -> Bucket | None:
    """Return the bucket of a key, or None for a record of the whole database. Raises `Corrupt`."""
    if key.startswith(GLOBAL_PREFIX):
        return None
    try:
        return Bucket(*_BUCKET.unpack_from(key, len(SUBSYSTEM_PREFIX)))
    except (struct.error, ValueError) as error:
        raise Corrupt(f"{key[:32].hex()} is not a key of the time series: {error}") from None


def decode_labels(series_id: int, value: bytes) -> Labels:
    """Return the labels of a forward record. Raises `Corrupt`, which names the series."""
    try:
        return decode_forward(value)[0]
    except Corrupt as error:
        raise Corrupt(f"labels of series {series_id}: {error}") from None


def decode_rows(block: KeyValue) -> Rows:
    """Return the samples of a block. Raises `Corrupt`, which names the block."""
    try:
        return decode_block(block.value)
    except Corrupt as error:
        raise Corrupt(f"block {_block_number(block)}: {error}") from None


def _block_number(block: KeyValue) -> int:
    return int.from_bytes(block.key[_TYPE_AT + 1 :])


def merge_records(key: bytes, operands: Sequence[bytes]) -> bytes:
    """Merge operands: the union of ids, or samples by time where newer ones win, or the newest operand.

    Damaged operands are kept unchanged, in a form that decodes as `Corrupt`.
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
    """Return the operations of the batch that stores a delta."""
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


async def load_bucket(read: StorageRead, bucket: Bucket) -> BucketSeries:
    """Return the stored series of a bucket. Raises `Corrupt` if the storage cannot read them.

    Records that do not decode or are missing are left out and named in `damaged`. A series without labels is
    new when it is written to again. The next id is above the largest id in any record, damaged or not, so
    samples are never attributed to another series, even if records are lost. Blocks that do not decode
    contribute no ids. None of their samples can be read either, and their series were stored in the same
    batch or earlier.
    """
    series = BucketSeries()
    damaged: list[str] = []
    unread = await _load_labels(read, bucket, series, damaged)
    unlabelled = await _load_fingerprints(read, bucket, series, damaged)
    damaged += [f"labels of series {one}: the record is missing" for one in sorted(unlabelled - unread)]
    blocks = [block async for block in pairs(read.scan(block_prefix(bucket)))]
    if blocks:
        series.next_block = _block_number(blocks[-1]) + 1
    named = max((*series.labels, *unread, *unlabelled), default=-1)
    streamed = await _largest_streamed(read, bucket)
    in_blocks = await asyncio.to_thread(_largest_in, blocks, damaged) if blocks else -1
    series.next_id = max(named, streamed, in_blocks) + 1
    series.damaged = damaged
    return series


async def _load_labels(
    read: StorageRead, bucket: Bucket, series: BucketSeries, damaged: list[str]
) -> set[int]:
    """Load the labels of each series, and return the ids of records that do not decode."""
    unread: set[int] = set()
    async for key, value in pairs(read.scan(record_prefix(bucket, RecordType.FORWARD))):
        (series_id,) = _NUMBER.unpack(key[_TYPE_AT + 1 :])
        try:
            labels = decode_labels(series_id, value)
        except Corrupt as error:
            unread.add(series_id)
            damaged.append(str(error))
        else:
            series.ids[labels] = series_id
            series.labels[series_id] = labels
    return unread


async def _load_fingerprints(
    read: StorageRead, bucket: Bucket, series: BucketSeries, damaged: list[str]
) -> set[int]:
    """Load the fingerprints of series with labels, and return the ids of fingerprints without labels.

    The latter are left out, because a series with a known fingerprint could not be new. Damaged or missing
    fingerprints are computed again.
    """
    unlabelled: set[int] = set()
    unread: set[Fingerprint] = set()
    async for key, value in pairs(read.scan(record_prefix(bucket, RecordType.DICTIONARY))):
        fingerprint = Fingerprint(key[_TYPE_AT + 1 :])
        try:
            named = decode_series_id(value)
        except Corrupt:
            unread.add(fingerprint)
            continue
        if named in series.labels:
            series.fingerprints[fingerprint] = named
        else:
            unlabelled.add(named)
    known = set(series.fingerprints.values())
    for labels, series_id in series.ids.items():
        if series_id not in known:
            fingerprint = labels.fingerprint()
            series.fingerprints[fingerprint] = series_id
            unread.discard(fingerprint)
            damaged.append(f"dictionary record of series {series_id}: computed again from its labels")
    damaged += [
        f"dictionary record of fingerprint {one.hex()}: it is not a series id" for one in sorted(unread)
    ]
    return unlabelled


async def _largest_streamed(read: StorageRead, bucket: Bucket) -> int:
    """Return the largest id of any stream, or -1."""
    largest = -1
    async for page in read.scan(record_prefix(bucket, RecordType.SAMPLES)):
        largest = max(largest, *(_NUMBER.unpack(key[-_NUMBER.size :])[0] for key, _ in page))
    return largest


def _largest_in(blocks: Sequence[KeyValue], damaged: list[str]) -> int:
    """Return the largest id in blocks, whose rows are sorted by id, or -1."""
    largest = -1
    for block in blocks:
        try:
            rows = decode_rows(block)
        except Corrupt as error:
            damaged.append(str(error))
        else:
            largest = max(largest, int(rows.ids[-1]) if len(rows) else -1)
    return largest


async def load_families(read: StorageRead) -> tuple[dict[str, Metadata], list[str]]:
    """Return the metadata of each metric, and descriptions of damaged records, each a name and a reason."""
    families: dict[str, Metadata] = {}
    damaged: list[str] = []
    async for key, value in pairs(read.scan(FAMILY_PREFIX)):
        name = key[len(FAMILY_PREFIX) :]
        try:
            families[name.decode()] = _decode_family(value)
        except (Corrupt, UnicodeDecodeError) as error:
            damaged.append(f"metadata of {name.decode(errors='replace')!r}: {error}")
    return families, damaged


async def load_position(read: StorageRead) -> Position | None:
    """Return the position in the feeding queue, or None. Raises `Corrupt`."""
    value = await read.get(_POSITION)
    return None if value is None else Position.decode(value)


def _encode_family(metadata: Metadata) -> bytes:
    # A forward record without labels, followed by the description as its only text.
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
