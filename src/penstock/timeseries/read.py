"""Readers of buckets, for the series that writers need and the data that queries select."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Final

import numpy as np
from pyroaring import BitMap

from penstock.coordinator import KeyValue, StorageRead
from penstock.errors import Corrupt
from penstock.timeseries.delta import Ids, Rows
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
from penstock.timeseries.matchers import Matcher, MatchOp, select_labels
from penstock.timeseries.model import Bucket, Labels, Samples, SeriesId
from penstock.timeseries.promql import Budget, SelectedSeries, Selection
from penstock.timeseries.promql.limits import labels_cost
from penstock.timeseries.records import (
    DamageLog,
    add_warning,
    block_prefix,
    decode_labels,
    decode_rows,
    decode_series_ids,
    load_bucket,
    place_of,
)
from penstock.timeseries.series_index import BucketSeries, SeriesIndex

_AT_ONCE: Final = 16
"""Number of buckets read in parallel. Each takes several round trips to the store."""


class BucketLoader:
    """Loader of buckets into a series index. Each bucket is loaded once.

    A load continues if its writer is cancelled, because others may need it.
    """

    def __init__(
        self,
        directory: SeriesIndex,
        *,
        snapshot: Callable[[], StorageRead],
        is_expired: Callable[[Bucket], bool],
        damage: DamageLog,
    ) -> None:
        self._directory = directory
        self._snapshot = snapshot
        self._is_expired = is_expired
        self._damage = damage
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._loads: dict[Bucket, asyncio.Task[None]] = {}

    def try_hold(self, buckets: Collection[Bucket]) -> bool:
        """Reserve these buckets if all of them are in memory."""
        if any(bucket not in self._directory for bucket in buckets):
            return False
        self._directory.reserve(buckets)
        return True

    async def hold(self, buckets: Collection[Bucket]) -> None:
        """Reserve these buckets, reading them first if necessary. A failed or cancelled call reserves none.

        Buckets that it has read or is reading stay in memory for a while, so that a retry continues from
        there. Raises the errors of reading.
        """
        held: list[Bucket] = []
        for bucket in buckets:
            if bucket not in self._directory:
                self._loading(bucket)
        try:
            for bucket in buckets:
                # It may have been dropped again while other buckets were read.
                while bucket not in self._directory:
                    await asyncio.shield(self._loading(bucket))
                self._directory.reserve((bucket,))
                held.append(bucket)
        except BaseException:
            self._directory.release(held)
            self._directory.expect(buckets)
            raise

    def _loading(self, bucket: Bucket) -> asyncio.Task[None]:
        task = self._loads.get(bucket)
        if task is None:
            task = self._loads[bucket] = asyncio.ensure_future(self._load(bucket))
            task.add_done_callback(lambda done: self._ended(bucket, done))
        return task

    def _ended(self, bucket: Bucket, task: asyncio.Task[None]) -> None:
        del self._loads[bucket]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: there may be no waiter left to raise it

    async def _load(self, bucket: Bucket) -> None:
        async with self._places:
            try:
                series = await load_bucket(self._snapshot(), bucket)
            except Corrupt as error:
                if not self._is_expired(bucket):
                    raise Corrupt(f"{place_of(bucket)} cannot be read: {error}") from error
                series = BucketSeries()
            if series.damaged and self._is_expired(bucket):
                series = BucketSeries()  # it expired while it was read, so its content is irrelevant
            self._damage.report(bucket, series.damaged)
            self._directory.load(bucket, series)


_GETS_MAX = 64
"""Maximum number of streams read by key. More are read by a scan of their metric."""
_GET_COST = 4
"""Cost of a read by key, in scanned records."""
_GETS_AT_ONCE = 256
_STREAM_BYTES_MAX = 1024 * 1024
"""Bytes of streams to decode together: usually half a million samples, at most four million."""
_LABELS_COST = 10
"""Minimum cost of the labels of a series, in samples. Long values cost more."""
_LIMITED_AT_ONCE = 1000
_CACHED_BYTES_MAX = 512 * 1024 * 1024
"""Limit of labels cached between queries. It is enough for about half a million series."""
_CACHED_COST, _CACHED_PAIR_COST = 200, 150
"""Memory overhead of a series and of each label, excluding their texts."""


@dataclass(slots=True)
class LabelCache:
    """Cache of labels by bucket and id. Stored labels never change, so they are read once."""

    buckets: dict[Bucket, dict[int, Labels]] = field(default_factory=dict)
    size_bytes: int = 0
    live: Callable[[Bucket], Mapping[int, Labels]] = lambda bucket: {}
    """Callable that returns labels by id that are in memory for writes, possibly more than the snapshot
    has."""
    expires: bool = False
    """True if records expire. A series without labels may then have expired between two reads and is not
    damaged."""
    report: Callable[[Bucket, Sequence[str]], None] = lambda bucket, records: None
    """Called with descriptions of damaged records, each a name and a reason."""

    def of(self, bucket: Bucket) -> dict[int, Labels]:
        return self.buckets.setdefault(bucket, {})

    def note(self, added: Iterable[Labels]) -> None:
        """Count added labels, and clear the cache if it is too large."""
        for labels in added:
            texts = sum(len(name) + len(value) for name, value in labels)
            self.size_bytes += _CACHED_COST + _CACHED_PAIR_COST * len(labels) + texts
        if self.size_bytes > _CACHED_BYTES_MAX:
            self.buckets.clear()
            self.size_bytes = 0


class BucketReader:
    """Reader of one bucket of one snapshot. Every method may raise `TooManySamples` and `QueryTimeout`."""

    def __init__(
        self,
        read: StorageRead,
        bucket: Bucket,
        budget: Budget,
        cache: LabelCache | None = None,
        warnings: list[str] | None = None,
    ) -> None:
        self._read = read
        self._bucket = bucket
        self._budget = budget
        self._cache = cache or LabelCache()
        self._expires = self._cache.expires
        self._warnings = warnings

    async def series(self, matchers: Sequence[Matcher], limit: int | None = None) -> dict[int, Labels]:
        """Return every series that satisfies all matchers, by id. With `limit`, stop after at least that
        many."""
        found: dict[int, Labels] = {}
        async for labels in self._candidate_labels(matchers, limit):
            found |= _matching(labels, matchers, self._budget)
            if limit is not None and len(found) >= limit:
                break
        return found

    async def rows(self, series: dict[int, Labels], start_ms: int, end_ms: int) -> Rows:
        """Return the samples of these series within the times, in order. Charge them piece by piece."""
        wanted: Ids = np.array(sorted(series), np.uint32)
        within = partial(_within, start_ms=start_ms, end_ms=end_ms, budget=self._budget)
        parts: list[Rows] = []
        async for ids, streams in self._streams(series):
            parts += await asyncio.to_thread(within, self._of_streams(ids, streams))
        async for page in self._pages(block_prefix(self._bucket)):
            parts += await asyncio.to_thread(within, self._of_blocks(page, wanted))
        # The order of writing: blocks override compacted samples, and later blocks override earlier ones.
        return await asyncio.to_thread(_in_order, parts)

    async def add_values(self, found: set[str], label: str, limit: int | None) -> None:
        """Add the values of a label, or the first `limit` in order. New ones are charged."""
        prefix = inverted_prefix(self._bucket, label)
        wanted = limit
        async for page in self._pages(prefix):
            new = {_text(key[len(prefix) :]) for key, _ in page[:wanted]} - found
            self._budget.charge(sum(labels_cost(Labels(((label, value),))) for value in new))
            found |= new
            if wanted is not None:
                wanted -= len(page)
                if wanted <= 0:
                    break

    async def names(self, limit: int | None) -> list[str]:
        """Return the names of labels in order, at most `limit` if it is given, with one read for each."""
        prefix = record_prefix(self._bucket, RecordType.INVERTED)
        found: list[str] = []
        start = b""
        while limit is None or len(found) < limit:
            self._budget.charge(1)
            page = await anext(self._read.scan(prefix, start=start), None)
            if page is None:
                break
            name, _ = unterminated(page[0].key[len(prefix) :])
            found.append(_text(name))
            start = terminated(name)[:-1] + b"\x01"  # after all values of this name, before any longer name
        return found

    async def _candidate_labels(
        self, matchers: Sequence[Matcher], limit: int | None
    ) -> AsyncIterator[dict[int, Labels]]:
        """Yield the labels of candidates, in pages if they are scanned or limited, otherwise together."""
        candidates = await self._candidates(matchers)
        if candidates is None:
            async for labels in self._label_pages():
                yield _present(labels)
            return
        size = len(candidates) if limit is None else max(limit, _LIMITED_AT_ONCE)
        for at in range(0, len(candidates), max(size, 1)):
            yield await self._labels(candidates[at : at + size])

    async def _candidates(self, matchers: Sequence[Matcher]) -> BitMap | None:
        """Return the ids that may match according to the inverted index, or None if any id may match."""
        indexed = [one for one in matchers if not one.negative and not one.accepts_missing]
        if not indexed:
            return None
        found: BitMap | None = None
        for matcher in sorted(indexed, key=lambda one: one.op is not MatchOp.EQUAL):
            try:
                ids = await self._carriers(matcher)
            except Corrupt as error:
                self._cache.report(self._bucket, [str(error)])
                continue  # fall back to the labels, which takes longer
            found = ids if found is None else found & ids
            if not found:
                break
        return found

    async def _carriers(self, matcher: Matcher) -> BitMap:
        """Return the ids of series with a value that the matcher accepts. Raises `Corrupt`."""
        if matcher.op is MatchOp.EQUAL:
            value = await self._read.get(InvertedKey(self._bucket, matcher.name, matcher.value).encode())
            return BitMap() if value is None else _decode_ids(matcher.name, matcher.value, value)
        prefix = inverted_prefix(self._bucket, matcher.name)
        ids = BitMap()
        async for page in self._pages(prefix):
            values = [_text(key[len(prefix) :]) for key, _ in page]
            fitting = zip(values, page, matcher.accepts(values, self._budget.check), strict=True)
            maps = [_decode_ids(matcher.name, value, row.value) for value, row, fits in fitting if fits]
            ids = reduce(BitMap.__or__, maps, ids)
        return ids

    async def _labels(self, candidates: BitMap) -> dict[int, Labels]:
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
        self._cache.note(added.values())
        return found

    async def _get_labels(self, wanted: list[int]) -> dict[int, Labels]:
        found: dict[int, Labels] = {}
        for at in range(0, len(wanted), _GETS_AT_ONCE):
            self._budget.check()
            some = wanted[at : at + _GETS_AT_ONCE]
            values = await asyncio.gather(*map(self._forward, some))
            found |= {one: value for one, value in zip(some, values, strict=True) if value is not None}
        return found

    async def _forward(self, series_id: int) -> Labels | None:
        value = await self._read.get(ForwardKey(self._bucket, SeriesId(series_id)).encode())
        if value is not None:
            return self._decoded(series_id, value)
        if not self._expires:
            self._leave_out(Corrupt(f"labels of series {series_id}: the record is missing"))
        return None

    def _decoded(self, series_id: int, value: bytes) -> Labels | None:
        """Return the labels in a record, or None if the record is damaged and left out."""
        try:
            return decode_labels(series_id, value)
        except Corrupt as error:
            self._leave_out(error)
            return None

    def _leave_out(self, damage: Corrupt) -> None:
        """Report a damaged record that is left out of the result.

        Raise `damage` if there is no list of warnings.
        """
        self._cache.report(self._bucket, [str(damage)])
        if self._warnings is None:
            raise damage
        add_warning(self._warnings, self._bucket, str(damage))

    async def _scan_labels(self, wanted: list[int]) -> dict[int, Labels]:
        among = set(wanted)
        found: dict[int, Labels | None] = {}
        async for labels in self._label_pages(wanted[0].to_bytes(4), wanted[-1].to_bytes(4) + b"\0", among):
            found |= labels
        if len(found) != len(among) and not self._expires:
            for one in sorted(among - found.keys()):
                self._leave_out(Corrupt(f"labels of series {one}: the record is missing"))
        return _present(found)

    async def _label_pages(
        self, start: bytes = b"", stop: bytes | None = None, among: set[int] | None = None
    ) -> AsyncIterator[dict[int, Labels | None]]:
        """Yield the labels of all series, or of those in `among`, page by page, with None for damaged
        ones."""
        prefix = record_prefix(self._bucket, RecordType.FORWARD)
        async for page in self._pages(prefix, start=start, stop=stop):
            ids = ((int.from_bytes(key[len(prefix) :]), value) for key, value in page)
            yield {one: self._decoded(one, value) for one, value in ids if among is None or one in among}

    async def _streams(self, series: dict[int, Labels]) -> AsyncIterator[tuple[list[int], list[bytes]]]:
        """Yield ids and compacted streams, in pieces of bounded size."""
        metrics: dict[str, list[int]] = {}
        for series_id, labels in series.items():
            metrics.setdefault(labels.metric, []).append(series_id)
        ids: list[int] = []
        streams: list[bytes] = []
        size = 0
        for metric, members in metrics.items():
            async for series_id, stream in self._metric_streams(metric, members):
                ids.append(series_id)
                streams.append(stream)
                size += len(stream)
                if size > _STREAM_BYTES_MAX:
                    yield ids, streams
                    ids, streams, size = [], [], 0
        if ids:
            yield ids, streams

    async def _metric_streams(self, metric: str, members: list[int]) -> AsyncIterator[tuple[int, bytes]]:
        if len(members) <= _GETS_MAX:
            self._budget.check()
            keys = [SamplesKey(self._bucket, metric, SeriesId(one)).encode() for one in members]
            values = await asyncio.gather(*map(self._read.get, keys))
            for one, value in zip(members, values, strict=True):
                if value:
                    yield one, value
            return
        prefix = record_prefix(self._bucket, RecordType.SAMPLES) + terminated(metric.encode())
        wanted = set(members)
        async for page in self._pages(prefix):
            for key, value in page:
                if (series_id := int.from_bytes(key[len(prefix) :])) in wanted:
                    yield series_id, value

    def _of_streams(self, ids: list[int], streams: list[bytes]) -> Iterator[Rows]:
        try:
            yield Rows.of_series(ids, decode_many(streams))
        except Corrupt:
            for series_id, stream in zip(ids, streams, strict=True):
                try:
                    samples = decode_many([stream])
                except Corrupt as error:
                    self._leave_out(Corrupt(f"samples of series {series_id}: {error}"))
                else:
                    yield Rows.of_series([series_id], samples)

    def _of_blocks(self, page: Sequence[KeyValue], wanted: Ids) -> Iterator[Rows]:
        for block in page:
            try:
                rows = decode_rows(block)
            except Corrupt as error:
                self._leave_out(error)
            else:
                yield rows.of(wanted)

    async def _pages(
        self, prefix: bytes, *, start: bytes = b"", stop: bytes | None = None
    ) -> AsyncIterator[list[KeyValue]]:
        """Yield the pages of a scan, and check the time before each."""
        async for page in self._read.scan(prefix, start=start, stop=stop):
            self._budget.check()
            yield page


def _matching(labels: dict[int, Labels], matchers: Sequence[Matcher], budget: Budget) -> dict[int, Labels]:
    ids = list(labels)
    rows = select_labels(matchers, [labels[one] for one in ids], budget.check)
    return {ids[row]: labels[ids[row]] for row in rows}


def _present(labels: dict[int, Labels | None]) -> dict[int, Labels]:
    return {series_id: one for series_id, one in labels.items() if one is not None}


def _within(parts: Iterator[Rows], *, start_ms: int, end_ms: int, budget: Budget) -> list[Rows]:
    """Return the rows of each part within the times. Charge each part before decoding the next one."""
    kept: list[Rows] = []
    for part in parts:
        kept.append(part.between(start_ms, end_ms))
        budget.charge(len(kept[-1]))
    return kept


def _in_order(parts: list[Rows]) -> Rows:
    return Rows.joined(parts).in_order()


def _decode_ids(name: str, value: str, data: bytes) -> BitMap:
    try:
        return decode_series_ids(data)
    except Corrupt as error:
        raise Corrupt(f"inverted record of {name[:80]}={value[:80]!r}: {error}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a label in a key is not UTF-8: {error}") from None


@contextmanager
def _naming(bucket: Bucket) -> Iterator[None]:
    """Add the hour to the message of `Corrupt`."""
    try:
        yield
    except Corrupt as error:
        raise Corrupt(f"{place_of(bucket)} has damage: {error}") from error


async def select(
    read: StorageRead,
    buckets: Iterable[Bucket],
    selection: Selection,
    cache: LabelCache,
    budget: Budget,
    warnings: list[str] | None = None,
) -> list[SelectedSeries]:
    """Return the series that a selector finds in a snapshot, each once, with its samples in order.

    Labels and samples are charged as they are read, so memory stays within the budget. Raises
    `TooManySamples`, `QueryTimeout` and, for damage without a list of `warnings`, `Corrupt`.
    """
    parts: dict[Labels, list[Samples]] = {}
    for bucket in buckets:
        if bucket.end_ms <= selection.start_ms or bucket.start_ms > selection.end_ms:
            continue
        with _naming(bucket):
            reader = BucketReader(read, bucket, budget, cache, warnings)
            series = await reader.series(selection.matchers)
            new = (labels for labels in series.values() if labels not in parts)
            budget.charge(sum(labels_cost(labels, _LABELS_COST) for labels in new))
            if not series:
                continue
            rows = await reader.rows(series, selection.start_ms, selection.end_ms)
        for series_id, samples in zip(*_one_id_each(rows, series).by_series(), strict=True):
            parts.setdefault(series[series_id], []).append(samples)
    joined = ((labels, Samples.joined(samples)) for labels, samples in parts.items())
    return [(labels, samples.timestamps, samples.values) for labels, samples in joined]


def _one_id_each(rows: Rows, series: dict[int, Labels]) -> Rows:
    """Return rows in order with one id for each label set, the last one.

    A series has several ids if it got a new one when its labels could not be read.
    """
    if len(set(series.values())) == len(series):
        return rows
    last = {labels: series_id for series_id, labels in sorted(series.items())}
    ids = rows.ids.copy()
    for series_id, labels in series.items():
        ids[rows.ids == series_id] = last[labels]
    return Rows(ids, rows.timestamps, rows.values).in_order()


async def matching_series(
    read: StorageRead,
    buckets: Iterable[Bucket],
    selectors: Sequence[Sequence[Matcher]],
    cache: LabelCache,
    budget: Budget,
    limit: int | None = None,
    warnings: list[str] | None = None,
) -> set[Labels]:
    """Return the series of these buckets that satisfy any selector, or all series without selectors.

    Reading stops after `limit` series. Raises the same errors as `select`.
    """
    found: set[Labels] = set()
    for bucket in buckets:
        reader = BucketReader(read, bucket, budget, cache, warnings)
        for matchers in selectors or ((),):
            with _naming(bucket):
                new = set((await reader.series(matchers, limit)).values()) - found
            budget.charge(sum(labels_cost(labels, _LABELS_COST) for labels in new))
            found |= new
            if limit is not None and len(found) >= limit:
                return found
    return found


async def label_names(
    read: StorageRead, buckets: Iterable[Bucket], budget: Budget, limit: int | None = None
) -> set[str]:
    """Return all names of labels, or at least the first `limit` in order."""
    found: set[str] = set()
    for bucket in buckets:
        with _naming(bucket):
            found.update(await BucketReader(read, bucket, budget).names(limit))
    return found


async def label_values(
    read: StorageRead, buckets: Iterable[Bucket], label: str, budget: Budget, limit: int | None = None
) -> set[str]:
    """Return all values of one label, or at least the first `limit` in order."""
    found: set[str] = set()
    for bucket in buckets:
        with _naming(bucket):
            await BucketReader(read, bucket, budget).add_values(found, label, limit)
    return found
