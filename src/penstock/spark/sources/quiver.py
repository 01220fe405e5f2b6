"""The format `penstock-quiver`: the segments of a telemetry buffer as rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, NotFound
from penstock.quiver import (
    ExternalAck,
    SegmentInfo,
    SegmentSource,
    commit_offset,
    core_directory,
    known_schema,
)
from penstock.spark.sources.quiver_offsets import (
    SegmentOffset,
    StoredOffset,
    admit,
    between,
    bounds_of,
    check_identity,
    check_order,
    marks_at,
    read_offset,
    resolve,
    write_offset,
)
from penstock.spark.sources.quiver_options import QUIVER_FORMAT, QuiverOptions
from penstock.spark.sources.quiver_reader import (
    QuiverReader,
    SegmentPartition,
    check_gaps,
    list_segments,
    partition_segments,
    read_segments,
    spark_struct,
)
from penstock.storage import OsFileSystem


class QuiverSource(DataSource):
    """Rows of one signal. `QuiverOptions` describes the options.

    The columns are those of the segments, all of them together; spans, logs and metrics have theirs even
    before the first segment. Another schema may be given: columns are found by name.
    """

    @property
    def _parsed(self) -> QuiverOptions:
        return QuiverOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        return QUIVER_FORMAT

    def schema(self) -> StructType:
        options = self._parsed
        source = options.open()
        schemas = {}
        for info in list_segments(source):
            if info.slot == options.slot and info.schema_hash not in schemas:
                try:
                    schemas[info.schema_hash] = source.reader(info).schema
                except NotFound:
                    continue
        known = known_schema(options.slot)
        return spark_struct([*([known] if known else []), *schemas.values()], options.slot, view=options.view)

    def reader(self, schema: StructType) -> QuiverReader:
        options = self._parsed
        if options.subscriber is not None:
            raise ConfigError(
                "subscriber: a batch query reads what is there and keeps nothing; use readStream"
            )
        return QuiverReader(options, schema)

    def streamReader(self, schema: StructType) -> QuiverStreamReader:
        return QuiverStreamReader(self._parsed, schema)


_log = logging.getLogger(__name__)


class QuiverStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a process of its own; copies of it go to the tasks."""

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._source: SegmentSource | None = None
        self._seen: SegmentOffset = {}
        self._target: SegmentOffset | None = None
        self._announced: set[int] = set()

    def __reduce__(self) -> tuple[type[QuiverStreamReader], tuple[QuiverOptions, StructType]]:
        return QuiverStreamReader, (self._options, self._schema)

    def _look(self) -> list[SegmentInfo]:
        if self._source is None:
            self._source = self._options.open()
        infos = list_segments(self._source)
        self._seen = _following(infos)
        self._announce(self._seen)
        return infos

    def initialOffset(self) -> StoredOffset:
        """Where `startingOffsets` points now. Asked at every start until the first micro-batch is done."""
        infos = self._look()
        start = resolve(self._options.starting, bounds_of(infos), "startingOffsets")
        return write_offset(start, marks_at(infos, start, {}))

    def getDefaultReadLimit(self) -> ReadLimit:
        """At most `maxSegmentsPerTrigger`, whatever they hold."""
        return ReadMaxRows(self._options.segments_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end: what is committed from now on is for the next run."""
        self._target = _following(self._look())

    def latestOffset(self, start: StoredOffset, limit: ReadLimit) -> StoredOffset:
        """How far the next micro-batch goes, or `start` itself. Raises `SegmentGap`."""
        here, known = read_offset(start)
        infos = self._look()
        check_identity(infos, here, known)
        end = self._end(here, infos)
        if not isinstance(limit, ReadAllAvailable):
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.segments_per_trigger
            # What is gone counts for nothing and is passed in one step.
            first = {core: held.first for core, held in bounds_of(infos).items()}
            begin = {core: min(max(place, first.get(core, place)), end[core]) for core, place in here.items()}
            end = end | admit(begin, {core: end[core] for core in begin}, most)
        if end == here:
            return start
        check_gaps(self._options, infos, here, end)
        return write_offset(end, marks_at(infos, end, known))

    def _end(self, here: SegmentOffset, infos: Sequence[SegmentInfo]) -> SegmentOffset:
        """The end of every core; a core that is new enters at its first segment."""
        ends = dict(self._seen)
        if self._target is not None:
            ends = {
                core: min(place, self._target[core]) for core, place in ends.items() if core in self._target
            }
        entering = {
            core: held.first for core, held in bounds_of(infos).items() if core not in here and core in ends
        }
        return {core: max(place, ends.get(core, place)) for core, place in here.items()} | entering

    def reportLatestOffset(self) -> StoredOffset | None:
        """The ends of the cores, for the query's progress: less `endOffset` it is the backlog."""
        return write_offset(self._seen) if self._seen else None

    def partitions(self, start: StoredOffset, end: StoredOffset) -> list[InputPartition]:
        """The tasks between two offsets: the same after every restart. Raises `SegmentGap`."""
        begin, known = read_offset(start)
        until, _ = read_offset(end)
        check_order(begin, until)
        infos = self._look()
        check_identity(infos, begin, known)
        check_gaps(self._options, infos, begin, until)
        wanted = [info for info in between(infos, begin, until) if info.slot == self._options.slot]
        return list(partition_segments(wanted, self._options.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentPartition)
        return read_segments(self._options, partition.infos, self._schema)

    def commit(self, end: StoredOffset) -> None:
        """Tell the directory that everything before `end` is done, if the query is a subscriber."""
        places, _ = read_offset(end)
        self._leave({core: place - 1 for core, place in places.items()})

    def _announce(self, cores: SegmentOffset) -> None:
        """The first word to a core: from now on it keeps what this query has not read."""
        new = {core: 0 for core in cores if core not in self._announced}
        self._announced.update(new)
        self._leave(new)

    def _leave(self, through: SegmentOffset) -> None:
        if self._options.subscriber is None:
            return
        for core, seq in through.items():
            note = ExternalAck(subscriber=self._options.subscriber, through=seq)
            commit_offset(OsFileSystem(), core_directory(self._options.path, core), note)


def _following(infos: Sequence[SegmentInfo]) -> SegmentOffset:
    return {core: held.following for core, held in bounds_of(infos).items()}
