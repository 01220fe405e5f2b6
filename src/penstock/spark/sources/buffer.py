"""The format `penstock-buffer`: the records of a queue as rows, to read and to write."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, Unsupported
from penstock.spark.sinks.buffer import BufferStreamWriter, BufferWriter, check_columns
from penstock.spark.sinks.options import SinkOptions
from penstock.spark.sources.buffer_options import FORMAT, BufferOptions
from penstock.spark.sources.buffer_reader import (
    BufferReader,
    SlicePartition,
    group,
    read_slices,
    slices_between,
)
from penstock.spark.sources.columns import COLUMNS, spark_schema
from penstock.spark.sources.offsets import (
    After,
    Bounds,
    Offset,
    StoredOffset,
    admit_batches,
    admit_bytes,
    backlog,
    cap,
    check_asked,
    check_held,
    check_identity,
    check_order,
    check_reached,
    lift,
    read_after,
    read_offset,
    resolve,
    spread_start,
    write_offset,
)
from penstock.spark.sources.queues import (
    ConsumedQueue,
    Indexes,
    ObjectSizes,
    Queue,
    ReadQueue,
    bounds_of,
    location_at,
)


class BufferSource(DataSource):
    """The records of a queue. `BufferOptions` describes the options of reading, `SinkOptions` of writing.

    | column | type | |
    |---|---|---|
    | sequence | bigint | the batch's number in its shard |
    | index | int | the record's place in its batch |
    | value | binary | the record |
    | ingestion_time | timestamp | when the producer took it |
    | metadata | binary | what the producer said of it |
    | location | string | the batch object's key |
    | shard | int | 0 in a queue without shards |

    To write, the rows have `value` (binary or string, never null) and perhaps `metadata` (binary).
    """

    @property
    def _parsed(self) -> BufferOptions:
        return BufferOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return spark_schema(self._parsed.columns)

    def reader(self, schema: StructType) -> BufferReader:
        self._check(schema)
        return BufferReader(self._parsed)

    def streamReader(self, schema: StructType) -> BufferStreamReader:
        self._check(schema)
        return BufferStreamReader(self._parsed)

    def writer(self, schema: StructType, overwrite: bool) -> BufferWriter:
        return BufferWriter(self._sink(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> BufferStreamWriter:
        return BufferStreamWriter(self._sink(schema, overwrite))

    def _sink(self, schema: StructType, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise Unsupported(
                f"{FORMAT} only appends: what is in a queue belongs to its consumer. Use mode('append') or "
                "outputMode('append'), and for a result that changes a table"
            )
        check_columns(schema)
        return SinkOptions.parse(self.options)

    def _check(self, schema: StructType) -> None:
        given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        if given != [(name, COLUMNS[name][0]) for name in self._parsed.columns]:
            raise ConfigError(
                f"{FORMAT} has the schema {self.schema()!r}; choose columns with the option 'columns' and "
                "decode `value` in the query, instead of giving another schema"
            )


_log = logging.getLogger(__name__)


class BufferStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a process of its own. Copies of it go to the tasks, without the open queue.

    The queue is opened by the first call that needs it: Spark makes further instances only to ship them.
    """

    def __init__(self, options: BufferOptions) -> None:
        self._options = options
        self._opened: Queue | None = None
        self._sizes: ObjectSizes | None = None
        self._seen: Indexes = {}
        self._target: Offset | None = None

    def __reduce__(self) -> tuple[type[BufferStreamReader], tuple[BufferOptions]]:
        return BufferStreamReader, (self._options,)

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            options = self._options
            if options.mode == "read":
                self._opened = ReadQueue.open(options, must_exist=False)
            else:
                self._opened = ConsumedQueue.open(options)
        return self._opened

    def _look(self) -> tuple[Indexes, dict[int, Bounds]]:
        self._seen = self._queue.look()
        return self._seen, bounds_of(self._seen)

    def initialOffset(self) -> StoredOffset:
        """Where `startingOffsets` points now. Asked at every start until the first micro-batch is done."""
        indexes, bounds = self._look()
        start = resolve(spread_start(self._options.starting, bounds), bounds, "startingOffsets")
        path, earlier = self._options.manifest_path, self._options.records_gaps
        check_asked(start, bounds, "startingOffsets", path, earlier=earlier)
        return write_offset(start, self._after(start, indexes))

    def getDefaultReadLimit(self) -> ReadLimit:
        """At most `maxBatchesPerTrigger`; `maxBytesPerTrigger` is applied on top of it."""
        return ReadMaxFiles(self._options.batches_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is produced from now on is for the next run."""
        _, bounds = self._look()
        self._target = _following(bounds)

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """How far the next micro-batch goes, or `start` itself. Raises `QueueGap` or `FencedError`."""
        indexes, bounds = self._look()
        here = self._offset(start, indexes)
        self._check_held(here, bounds)
        end = _following(bounds)
        if self._target is not None:
            # A shard that came into being since then is for the next run altogether.
            end = lift(cap(end, dict.fromkeys(end, 0) | self._target), here)
        # What has left the queue is a hole: it counts for nothing and is passed in one step.
        begin = cap(lift(here, {shard: held.first for shard, held in bounds.items()}), end)
        end = self._admit(begin, end, limit, indexes)
        if end == here:
            return start
        if begin != here:
            _log.warning(
                "%d batches have left the queue unread; the next micro-batch records the hole",
                backlog(here, begin),
            )
        left = backlog(end, _following(bounds))
        _log.info("next micro-batch: %d batches, %d left", backlog(begin, end), left)
        unmoved = {shard: place for shard, place in here.items() if end[shard] == place}
        known = read_after(start, self._options.manifest_path)
        kept = {shard: known[shard] for shard in unmoved if shard in known}
        return write_offset(end, self._after(end, indexes) | kept)

    def _admit(self, start: Offset, end: Offset, limit: ReadLimit, indexes: Indexes) -> Offset:
        if isinstance(limit, ReadAllAvailable):
            return end
        most = limit.max_files if isinstance(limit, ReadMaxFiles) else self._options.batches_per_trigger
        end = admit_batches(start, end, most)
        bytes_max = self._options.bytes_per_trigger
        if bytes_max is None:
            return end
        sizes = self._sizes = self._sizes or ObjectSizes(self._queue.store)
        sizes.forget_below(start)
        return admit_bytes(
            start, end, bytes_max, lambda shard, sequence: sizes.size(indexes[shard], shard, sequence)
        )

    def reportLatestOffset(self) -> StoredOffset | None:
        """The end of the queue, for the query's progress: `latestOffset` less `endOffset` is the backlog."""
        return write_offset(_following(bounds_of(self._seen))) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """The tasks between two offsets: the same after every restart. Raises `QueueGap`, `FencedError`.

        With `onGap=record` a restart may find a wider hole in front, if somebody else has acknowledged more
        in between; see `penstock.spark.sources.gaps.left_range`.
        """
        indexes, bounds = self._look()
        begin, until = self._offset(start, indexes), self._offset(end, indexes)
        check_order(begin, until, self._options.manifest_path)
        self._check_held(begin, bounds)
        slices = slices_between(indexes, begin, until, self._options, self._queue.manifests)
        return list(group(slices, self._options.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_slices(self._options, partition.slices, set_aside=self._options.mode != "read")

    def commit(self, end: StoredOffset) -> None:
        """Acknowledge everything below `end`, in one write of the manifest. Raises `QueueGap` instead if
        `end` is not of this queue."""
        indexes = self._seen or self._look()[0]
        self._queue.ack(self._offset(end, indexes))

    def _offset(self, stored: StoredOffset, indexes: Indexes) -> Offset:
        """The numbers of an offset that is known to be of this queue."""
        path = self._options.manifest_path
        offset = read_offset(stored, list(indexes), path)
        check_reached(offset, bounds_of(indexes), path)
        check_identity(
            offset, read_after(stored, path), lambda shard, n: self._location(indexes, shard, n), path
        )
        return offset

    def _check_held(self, start: Offset, bounds: dict[int, Bounds]) -> None:
        if not self._options.records_gaps:
            check_held(start, bounds, self._options.manifest_path)

    def _after(self, offset: Offset, indexes: Indexes) -> After:
        places = {
            shard: self._location(indexes, shard, place - 1) for shard, place in offset.items() if place
        }
        return {shard: location for shard, location in places.items() if location is not None}

    def _location(self, indexes: Indexes, shard: int, sequence: int) -> str | None:
        held = location_at(indexes[shard], sequence)
        return held if held is not None else self._queue.dequeued(shard).get(sequence)


def _following(bounds: dict[int, Bounds]) -> Offset:
    return {shard: held.following for shard, held in bounds.items()}
