"""Series of one snapshot: by the inverted index where a matcher names values, by labels for the rest.

The snapshot does not change, so everything that a query reads is of one instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from pyroaring import BitMap

from penstock.coordinator import StorageRead, pairs
from penstock.errors import Corrupt
from penstock.timeseries.bucket import Bucket
from penstock.timeseries.gorilla import decode_many
from penstock.timeseries.keys import (
    ForwardKey,
    InvertedKey,
    RecordType,
    SamplesKey,
    inverted_prefix,
    record_prefix,
    terminated,
    unterminated,
)
from penstock.timeseries.matcher import Matcher, MatchOp, select_labels
from penstock.timeseries.model import Labels, Samples, SeriesId
from penstock.timeseries.promql import SelectedSeries, Selection, TooManySamples
from penstock.timeseries.records import block_prefix
from penstock.timeseries.rows import Ids, Rows, decode_block
from penstock.timeseries.values import decode_forward, decode_series_ids

__all__ = ["BucketReader", "LabelCache", "label_names", "label_values", "matching_series", "select"]

_GETS_MAX = 64
"""Up to this many streams are asked for one by one; more are found by a scan of their metric."""
_GET_COST = 4
"""A record that is asked for by its key takes as long as so many that a scan passes."""
_GETS_AT_ONCE = 256
_CACHED_MAX = 500_000
"""Series whose labels are remembered between queries, about 1 KB each."""


@dataclass(slots=True)
class LabelCache:
    """Labels by bucket and id. They never change once they are stored, so they are read once."""

    buckets: dict[Bucket, dict[int, Labels]] = field(default_factory=dict)
    count: int = 0
    live: Callable[[Bucket], Mapping[int, Labels]] = lambda bucket: {}
    """Labels that somebody else holds anyway, by id; more than the snapshot has, maybe."""
    expires: bool = False
    """Whether records expire, which may come between two reads of a query: then a series without labels is
    one that is gone, and no damage."""

    def of(self, bucket: Bucket) -> dict[int, Labels]:
        return self.buckets.setdefault(bucket, {})

    def note(self, added: int) -> None:
        """Forget everything when it is too much: what is asked for again is read again."""
        self.count += added
        if self.count > _CACHED_MAX:
            self.buckets.clear()
            self.count = 0


class BucketReader:
    """One bucket of one snapshot."""

    def __init__(self, read: StorageRead, bucket: Bucket, cache: LabelCache | None = None) -> None:
        self._read = read
        self._bucket = bucket
        self._cache = cache or LabelCache()
        self._expires = self._cache.expires

    async def series(self, matchers: Sequence[Matcher]) -> dict[int, Labels]:
        """Every series that satisfies all matchers, by id."""
        labels = await self._labels(await self._candidates(matchers))
        ids = list(labels)
        return {ids[row]: labels[ids[row]] for row in select_labels(matchers, [labels[one] for one in ids])}

    async def rows(self, series: dict[int, Labels], start_ms: int, end_ms: int) -> Rows:
        """The samples of these series within the times, in order."""
        wanted: Ids = np.array(sorted(series), np.uint32)
        blocks = [value async for _, value in pairs(self._read.scan(block_prefix(self._bucket)))]
        ids, streams = await self._streams(series)
        return await asyncio.to_thread(_rows, wanted, ids, streams, blocks, start_ms, end_ms)

    async def values_of(self, label: str) -> list[str]:
        """Every value of a label."""
        prefix = inverted_prefix(self._bucket, label)
        return [_text(key[len(prefix) :]) async for key, _ in pairs(self._read.scan(prefix))]

    async def names(self) -> list[str]:
        """Every name of a label: one look for each."""
        prefix = record_prefix(self._bucket, RecordType.INVERTED)
        found: list[str] = []
        start = b""
        while (page := await anext(self._read.scan(prefix, start=start), None)) is not None:
            name, _ = unterminated(page[0].key[len(prefix) :])
            found.append(_text(name))
            start = terminated(name)[:-1] + b"\x01"  # behind every value of it, before any longer name
        return found

    async def _candidates(self, matchers: Sequence[Matcher]) -> BitMap | None:
        """Ids that may match by the inverted index; None if it cannot tell."""
        indexed = [one for one in matchers if not one.negative and not one.accepts_missing]
        if not indexed:
            return None
        found: BitMap | None = None
        for matcher in sorted(indexed, key=lambda one: one.op is not MatchOp.EQUAL):
            ids = await self._carriers(matcher)
            found = ids if found is None else found & ids
            if not found:
                break
        return found

    async def _carriers(self, matcher: Matcher) -> BitMap:
        if matcher.op is MatchOp.EQUAL:
            value = await self._read.get(InvertedKey(self._bucket, matcher.name, matcher.value).encode())
            return BitMap() if value is None else decode_series_ids(value)
        prefix = inverted_prefix(self._bucket, matcher.name)
        ids = BitMap()
        async for page in self._read.scan(prefix):
            accepted = matcher.accepts([_text(key[len(prefix) :]) for key, _ in page])
            maps = [decode_series_ids(row.value) for row, fits in zip(page, accepted, strict=True) if fits]
            ids = reduce(BitMap.__or__, maps, ids)
        return ids

    async def _labels(self, candidates: BitMap | None) -> dict[int, Labels]:
        if candidates is None:
            return await self._scan_labels(None)
        known, live = self._cache.of(self._bucket), self._cache.live(self._bucket)
        missing = [one for one in candidates if one not in live and one not in known]
        if not missing:
            added: dict[int, Labels] = {}
        elif len(missing) * _GET_COST > missing[-1] - missing[0]:
            added = await self._scan_labels(missing)
        else:
            added = await self._get_labels(missing)
        known.update(added)
        found = {one: labels for one in candidates if (labels := live.get(one) or known.get(one)) is not None}
        self._cache.note(len(added))
        return found

    async def _get_labels(self, wanted: list[int]) -> dict[int, Labels]:
        found: dict[int, Labels] = {}
        for at in range(0, len(wanted), _GETS_AT_ONCE):
            some = wanted[at : at + _GETS_AT_ONCE]
            values = await asyncio.gather(*map(self._forward, some))
            found |= {one: value for one, value in zip(some, values, strict=True) if value is not None}
        return found

    async def _forward(self, series_id: int) -> Labels | None:
        value = await self._read.get(ForwardKey(self._bucket, SeriesId(series_id)).encode())
        if value is not None:
            return decode_forward(value)[0]
        if self._expires:
            return None
        raise Corrupt(f"series {series_id} of bucket {self._bucket.start_minutes} has no labels")

    async def _scan_labels(self, wanted: list[int] | None) -> dict[int, Labels]:
        prefix = record_prefix(self._bucket, RecordType.FORWARD)
        start = b"" if wanted is None else wanted[0].to_bytes(4)
        stop = None if wanted is None else wanted[-1].to_bytes(4) + b"\0"
        among = None if wanted is None else set(wanted)
        found: dict[int, Labels] = {}
        async for key, value in pairs(self._read.scan(prefix, start=start, stop=stop)):
            series_id = int.from_bytes(key[len(prefix) :])
            if among is None or series_id in among:
                found[series_id] = decode_forward(value)[0]
        if among is not None and len(found) != len(among) and not self._expires:
            raise Corrupt(f"bucket {self._bucket.start_minutes} lacks the labels of some series")
        return found

    async def _streams(self, series: dict[int, Labels]) -> tuple[list[int], list[bytes]]:
        """Ids and streams of those that were folded, by metric."""
        metrics: dict[str, list[int]] = {}
        for series_id, labels in series.items():
            metrics.setdefault(labels.metric, []).append(series_id)
        ids: list[int] = []
        streams: list[bytes] = []
        for metric, members in metrics.items():
            for series_id, value in await self._metric_streams(metric, members):
                ids.append(series_id)
                streams.append(value)
        return ids, streams

    async def _metric_streams(self, metric: str, members: list[int]) -> list[tuple[int, bytes]]:
        if len(members) <= _GETS_MAX:
            keys = [SamplesKey(self._bucket, metric, SeriesId(one)).encode() for one in members]
            values = await asyncio.gather(*map(self._read.get, keys))
            return [(one, value) for one, value in zip(members, values, strict=True) if value]
        prefix = record_prefix(self._bucket, RecordType.SAMPLES) + terminated(metric.encode())
        wanted = set(members)
        return [
            (series_id, value)
            async for key, value in pairs(self._read.scan(prefix))
            if (series_id := int.from_bytes(key[len(prefix) :])) in wanted
        ]


def _rows(
    wanted: Ids, ids: list[int], streams: list[bytes], blocks: list[bytes], start_ms: int, end_ms: int
) -> Rows:
    folded = Rows.of_series(ids, decode_many(streams)) if ids else Rows.empty()
    parts = [folded, *(decode_block(block).of(wanted) for block in blocks)]
    return Rows.joined(part.between(start_ms, end_ms) for part in parts).in_order()


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a label in a key is not UTF-8: {error}") from None


async def select(
    read: StorageRead,
    buckets: Iterable[Bucket],
    selection: Selection,
    cache: LabelCache,
    *,
    samples_max: int,
) -> list[SelectedSeries]:
    """What a selector finds in a snapshot: each label set once, its samples in order.

    Raises `TooManySamples` as soon as there are more than allowed, and `Corrupt`.
    """
    parts: dict[Labels, list[Samples]] = {}
    total = 0
    for bucket in buckets:
        if bucket.end_ms <= selection.start_ms or bucket.start_ms > selection.end_ms:
            continue
        reader = BucketReader(read, bucket, cache)
        series = await reader.series(selection.matchers)
        if not series:
            continue
        rows = await reader.rows(series, selection.start_ms, selection.end_ms)
        total += len(rows)
        if total > samples_max:
            raise TooManySamples(f"the query reads more than {samples_max:,} samples")
        for series_id, samples in zip(*rows.by_series(), strict=True):
            parts.setdefault(series[series_id], []).append(samples)
    joined = ((labels, Samples.joined(samples)) for labels, samples in parts.items())
    return [(labels, samples.timestamps, samples.values) for labels, samples in joined]


async def matching_series(
    read: StorageRead,
    buckets: Iterable[Bucket],
    selectors: Sequence[Sequence[Matcher]],
    cache: LabelCache,
) -> set[Labels]:
    """The series of these buckets that satisfy any of the selectors, or all series if there is none."""
    found: set[Labels] = set()
    for bucket in buckets:
        reader = BucketReader(read, bucket, cache)
        for matchers in selectors or ((),):
            found.update((await reader.series(matchers)).values())
    return found


async def label_names(read: StorageRead, buckets: Iterable[Bucket]) -> set[str]:
    """The names of all labels."""
    return {name for bucket in buckets for name in await BucketReader(read, bucket).names()}


async def label_values(read: StorageRead, buckets: Iterable[Bucket], label: str) -> set[str]:
    """The values of one label."""
    return {value for bucket in buckets for value in await BucketReader(read, bucket).values_of(label)}
