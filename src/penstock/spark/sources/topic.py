"""The format `penstock-topic`: the records of topics as rows, to read and to write."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, Unsupported
from penstock.spark.sinks.topic import TopicStreamWriter, TopicWriter, check_topic_columns
from penstock.spark.sinks.topic_options import TopicSinkOptions
from penstock.spark.sources.offsets import Bounds
from penstock.spark.sources.topic_columns import TOPIC_COLUMNS, topic_schema
from penstock.spark.sources.topic_offsets import (
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
from penstock.spark.sources.topic_options import TOPIC_FORMAT, TopicOptions
from penstock.spark.sources.topic_reader import (
    RangePartition,
    TopicReader,
    bounds_of_topics,
    partition_ranges,
    read_ranges,
    record_time,
)


class TopicSource(DataSource):
    """Records of topics. `TopicOptions` describes the options of reading, `TopicSinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | topic | string | |
    | seq | bigint | the record's number in its topic |
    | ts | timestamp | when the server took it |
    | node | string | who wrote it, if that was said |
    | tag | string | |
    | data | string | JSON text; null only in a row that tells of a gap |
    | meta | string | JSON text |

    To write, the rows have `data` (JSON text, never null) and perhaps `tag`, `node` and `meta`.
    """

    @property
    def _parsed(self) -> TopicOptions:
        return TopicOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return TOPIC_FORMAT

    def schema(self) -> str:
        return topic_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> TopicReader:
        self._check(schema)
        return TopicReader(self._parsed)

    def streamReader(self, schema: StructType) -> TopicStreamReader:
        self._check(schema)
        return TopicStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        return TopicWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:
        return TopicStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> TopicSinkOptions:
        if overwrite:
            raise Unsupported(
                f"{TOPIC_FORMAT} only appends: a topic is a log. Use mode('append') or outputMode('append'), "
                "and for a result that changes a table"
            )
        check_topic_columns(schema)
        return TopicSinkOptions.parse(self.options)

    def _check(self, schema: StructType) -> None:
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if given != [(name, TOPIC_COLUMNS[name][0]) for name in self._parsed.columns]:
            raise ConfigError(
                f"{TOPIC_FORMAT} has the schema {self.schema()!r}; choose columns with the option 'columns' "
                "and take `data` apart in the query, instead of giving another schema"
            )


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
