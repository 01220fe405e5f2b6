"""The readers of `penstock-topic`: batch queries, streams, and the tasks of both, which prefetch pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.spark.sources.base import SourceStreamReader, runs_of
from penstock.spark.sources.columns import regroup
from penstock.spark.sources.offsets import Bounds
from penstock.spark.sources.topic_client import RecordPage, bounds_of_topics, fetch_page, record_time
from penstock.spark.sources.topic_columns import build_gap, build_records, empty_batch
from penstock.spark.sources.topic_offsets import TopicGap, TopicOffsets, TopicRange, cut, ranges_between
from penstock.spark.sources.topic_options import TopicOptions
from penstock.spark.worker import freeze_modules, load_ahead
from penstock.topics import DIFF_LIMIT_MAX

_log = logging.getLogger(__name__)

PAGE_SEQS: Final = DIFF_LIMIT_MAX
"""The most sequences of one request, so that their records fit into one page."""


class RangePartition(InputPartition):
    """The ranges of one task."""

    def __init__(self, ranges: Sequence[TopicRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)


class TopicReader(DataSourceReader):
    """The reader of a batch query over the current records of the topics, or over a range of them."""

    def __init__(self, options: TopicOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        bounds = bounds_of_topics(options.address, options.topics)
        start, end = TopicOffsets(options.topics).resolve_range(options.starting, options.ending, bounds)
        # For an empty list Spark would create a partition itself.
        return list(
            partition_ranges(ranges_between(start, end, bounds), options.tasks) or [RangePartition(())]
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_ranges(self._options, partition.ranges)


class TopicStreamReader(SourceStreamReader[str, int]):
    """The stream reader of topics. Reading does not remove records from a topic."""

    _offsets: TopicOffsets

    def __init__(self, options: TopicOptions) -> None:
        offsets = TopicOffsets(options.topics)
        super().__init__(offsets, options.starting, options.records_per_trigger, "records", (options,))
        self._options = options

    def _look(self) -> Mapping[str, Bounds]:
        return bounds_of_topics(self._options.address, self._options.topics)

    def _accept(self, numbers: dict[str, int], marks: Mapping[str, int]) -> dict[str, int]:
        self._offsets.check_reached(numbers, self._seen)
        return numbers

    def _mark(self, key: str, number: int) -> int | None:
        return record_time(self._options.address, key, number - 1)

    def _plan(
        self, start: dict[str, int], end: dict[str, int], marks: Mapping[str, int]
    ) -> list[InputPartition]:
        for topic, known_ms in marks.items():
            found_ms = self._mark(topic, start[topic])
            if found_ms is not None:
                self._offsets.check_time(topic, start[topic] - 1, known_ms, found_ms)
        return list(partition_ranges(ranges_between(start, end, self._seen), self._options.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_ranges(self._options, partition.ranges)


def partition_ranges(ranges: Sequence[TopicRange], tasks: int) -> list[RangePartition]:
    """Split ranges into at most `tasks` contiguous partitions. The same ranges give the same partitions."""
    return [RangePartition(run) for run in runs_of(cut(ranges, PAGE_SEQS), tasks)]


def read_ranges(options: TopicOptions, ranges: Sequence[TopicRange]) -> Iterator[pa.RecordBatch]:
    """Yield the records of the ranges, in order, in record batches of the declared schema.

    Raise `TopicGap` for records that are gone, unless `onGap` is `skip` or `record`, and the client's errors.
    """
    yield from regroup(load_ahead(partial(_load, options, _EmptyRanges()), cut(ranges, PAGE_SEQS)))
    freeze_modules()


class _EmptyRanges:
    """A cache of ranges without records, so that a long deleted range is not requested page by page.

    Without it, each of those requests would return the records after the range. A sequence before the head
    that has no record never gets one, so the result of a request stays valid.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}

    def cover(self, wanted: TopicRange) -> bool:
        first, last = self._known.get(wanted.topic, (0, -1))
        return first <= wanted.first and wanted.last <= last

    def learn(self, wanted: TopicRange, page: RecordPage) -> None:
        """Record the sequences after `wanted` that have no record, according to its page."""
        if page.tombstone is not None:
            return  # every piece of a lost range must be requested and reported
        following = next((record.seq for record in page.records if record.seq > wanted.last), None)
        last = page.next_from_seq if following is None else following - 1
        if last > wanted.last:
            self._known[wanted.topic] = (wanted.last + 1, last)


def _load(options: TopicOptions, empty: _EmptyRanges, wanted: TopicRange) -> pa.RecordBatch:
    """Load a range, with several requests if one response cannot hold it."""
    if empty.cover(wanted):
        return empty_batch(options.columns)
    batches: list[pa.RecordBatch] = []
    reached = wanted.first - 1
    while reached < wanted.last:
        limit = 1 if wanted.gone else min(wanted.last - reached, DIFF_LIMIT_MAX)
        page = fetch_page(options.address, wanted.topic, reached, limit, with_meta="meta" in options.columns)
        batches += _gaps(options, wanted, reached, page)
        empty.learn(wanted, page)
        records = page.records
        while records and records[-1].seq > wanted.last:  # the page continued past deleted records
            records.pop()
        if records:
            batches.append(build_records(wanted.topic, records, options.columns))
        if page.next_from_seq <= reached:
            raise TopicGap(f"{wanted.topic} ends at {page.head_seq}, before {wanted.last}: it was set back")
        reached = page.next_from_seq
    return pa.concat_batches(batches) if batches else empty_batch(options.columns)


def _gaps(options: TopicOptions, wanted: TopicRange, reached: int, page: RecordPage) -> list[pa.RecordBatch]:
    """Return a row for the records that are gone from the rest of the range, if `onGap` is `record`.

    Raise `TopicGap` if `onGap` is `fail` or the topic was created again.
    """
    gone = page.tombstone
    if gone is None:
        return []
    if gone.reason == "recreated":
        raise TopicGap(
            f"{wanted.topic} ends at {page.head_seq}, before {wanted.last}: it was deleted and created "
            "again, or set back. Start with a new checkpoint"
        )
    first, last = max(gone.gap_from, reached + 1), min(gone.gap_to, wanted.last)
    text = f"records {first} to {last} of {wanted.topic} are gone ({gone.reason})"
    if options.on_gap == "fail":
        raise TopicGap(
            f"{text}. Keep them longer, or read sooner; to continue, set onGap=record to get a row that "
            "describes the gap, or onGap=skip"
        )
    if options.on_gap == "skip":
        _log.warning("%s", text)
        return []
    return [build_gap(wanted.topic, first, last, gone.reason, options.columns)]
