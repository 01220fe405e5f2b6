"""A stream over topics: on the driver only numbers, in the tasks the records.

A topic is not consumed by reading it, so nothing is acknowledged and any number of queries may read the same
one. A micro-batch that is run again asks for the same sequences; what was deleted or evicted in between is
missing then, and what was evicted is told as a gap.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.spark.offsets import Bounds
from penstock.spark.topic_offsets import (
    StoredOffset,
    TopicOffset,
    admit,
    check_asked,
    check_order,
    check_reached,
    check_time,
    ranges_between,
    read_offset,
    resolve,
    write_offset,
)
from penstock.spark.topic_options import TopicOptions
from penstock.spark.topic_pages import bounds_of_topics, record_time
from penstock.spark.topic_reader import RangePartition, partition_ranges, read_ranges

__all__ = ["TopicStreamReader"]

_log = logging.getLogger(__name__)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a process of its own; copies of it go to the tasks."""

    def __init__(self, options: TopicOptions) -> None:
        self._options = options
        self._seen: dict[str, Bounds] = {}
        self._target: TopicOffset | None = None

    def __reduce__(self) -> tuple[type[TopicStreamReader], tuple[TopicOptions]]:
        return TopicStreamReader, (self._options,)

    def _look(self) -> dict[str, Bounds]:
        self._seen = bounds_of_topics(self._options.address, self._options.topics)
        return self._seen

    def initialOffset(self) -> StoredOffset:
        """Where `startingOffsets` points now. Asked at every start until the first micro-batch is done."""
        bounds = self._look()
        start = resolve(self._options.starting, bounds, "startingOffsets")
        check_asked(start, bounds, "startingOffsets")
        return write_offset(start, self._times(start))

    def getDefaultReadLimit(self) -> ReadLimit:
        """At most `maxRecordsPerTrigger`, counted by sequences."""
        return ReadMaxRows(self._options.records_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is written from now on is for the next run."""
        self._target = _following(self._look())

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """How far the next micro-batch goes, or `start` itself. Raises `TopicGap`."""
        here, known = read_offset(start, self._options.topics)
        bounds = self._look()
        check_reached(here, bounds)
        end = _following(bounds)
        if self._target is not None:
            end = {topic: max(here[topic], min(end[topic], self._target[topic])) for topic in end}
        if not isinstance(limit, ReadAllAvailable):
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.records_per_trigger
            # What is gone counts for nothing and is passed in one step.
            begin = {topic: min(max(here[topic], bounds[topic].first), end[topic]) for topic in end}
            end = admit(begin, end, most)
        if end == here:
            return start
        moved = {topic: place for topic, place in end.items() if place != here[topic]}
        unmoved = {topic: ts for topic, ts in known.items() if topic not in moved}
        return write_offset(end, self._times(moved) | unmoved)

    def reportLatestOffset(self) -> StoredOffset | None:
        """The ends of the topics, for the query's progress: less `endOffset` it is the backlog."""
        return write_offset(_following(self._seen)) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """The tasks between two offsets: the same after every restart. Raises `TopicGap`."""
        begin, known = read_offset(start, self._options.topics)
        until, _ = read_offset(end, self._options.topics)
        check_order(begin, until)
        bounds = self._look()
        check_reached(until, bounds)
        for topic, known_ms in known.items():
            found_ms = record_time(self._options.address, topic, begin[topic] - 1)
            if found_ms is not None:
                check_time(topic, begin[topic] - 1, known_ms, found_ms)
        return list(partition_ranges(ranges_between(begin, until, bounds), self._options.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangePartition)
        return read_ranges(self._options, partition.ranges)

    def commit(self, end: StoredOffset) -> None:
        """Nothing: reading a topic takes nothing out of it."""

    def _times(self, places: TopicOffset) -> dict[str, int]:
        found = {
            topic: record_time(self._options.address, topic, place - 1) for topic, place in places.items()
        }
        return {topic: ts for topic, ts in found.items() if ts is not None}


def _following(bounds: dict[str, Bounds]) -> TopicOffset:
    return {topic: held.following for topic, held in bounds.items()}
