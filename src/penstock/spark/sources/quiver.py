"""The format `penstock-quiver`: batch queries, streams, and the tasks of both, which map segments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, NotFound
from penstock.quiver import (
    ExternalAck,
    SegmentInfo,
    SegmentSource,
    commit_offset,
    core_directory,
    known_schema,
    text_view,
)
from penstock.spark.sources.base import SourceStreamReader
from penstock.spark.sources.columns import regroup
from penstock.spark.sources.offsets import Bounds, Offset, StoredOffset
from penstock.spark.sources.quiver_columns import arrow_target, columns_left_out, spark_struct, to_target
from penstock.spark.sources.quiver_offsets import (
    SegmentGap,
    SegmentOffsets,
    bounds_of,
    marks_at,
    missing_segments,
    segment_ranges,
    segments_between,
)
from penstock.spark.sources.quiver_options import QUIVER_FORMAT, QuiverOptions
from penstock.spark.worker import freeze_modules
from penstock.storage import OsFileSystem

_log = logging.getLogger(__name__)


class QuiverFormat(DataSource):
    """A data source for the rows of one signal. `QuiverOptions` describes the options.

    The columns are the union over all segments. Spans, logs and metrics have columns even before the first
    segment exists. You may give another schema; columns are matched by name.
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
                "subscriber: a batch query only reads the current segments and acknowledges nothing; use "
                "readStream"
            )
        return QuiverReader(options, schema)

    def streamReader(self, schema: StructType) -> QuiverStreamReader:
        return QuiverStreamReader(self._parsed, schema)


class SegmentPartition(InputPartition):
    """The segments of one task."""

    def __init__(self, infos: Sequence[SegmentInfo]) -> None:
        super().__init__(None)
        self.infos = tuple(infos)


class QuiverReader(DataSourceReader):
    """The reader of a batch query over the current segments, or over a range of them."""

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        infos = list_segments(options.open())
        start, end = SegmentOffsets().resolve_range(options.starting, options.ending, bounds_of(infos))
        if options.starting != "earliest":
            check_gaps(options, infos, start, end)
        # For an empty list Spark would create a partition itself.
        return list(plan_segments(options, infos, start, end) or [SegmentPartition(())])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentPartition)
        return read_segments(self._options, partition.infos, self._schema)


class QuiverStreamReader(SourceStreamReader[int, str]):
    """The stream reader of segments. With a `subscriber`, the directory keeps unread segments."""

    _offsets: SegmentOffsets

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        arguments = (options, schema)
        super().__init__(
            SegmentOffsets(), options.starting, options.segments_per_trigger, "segments", arguments
        )
        self._options = options
        self._schema = schema
        self._source: SegmentSource | None = None
        self._infos: Sequence[SegmentInfo] = ()
        self._announced: set[int] = set()

    def _look(self) -> Mapping[int, Bounds]:
        if self._source is None:
            self._source = self._options.open()
        self._infos = list_segments(self._source)
        bounds = bounds_of(self._infos)
        self._announce(bounds)
        return bounds

    def _accept(self, numbers: Offset, marks: Mapping[int, str]) -> Offset:
        self._offsets.check_identity(self._infos, numbers, marks)
        return numbers

    def _accept_end(self, numbers: Offset, marks: Mapping[int, str]) -> Offset:
        return numbers

    def _check_gaps(self, start: Offset, end: Offset) -> None:
        check_gaps(self._options, self._infos, start, end)

    def _mark(self, key: int, number: int) -> str | None:
        return marks_at(self._infos, {key: number}, {}).get(key)

    def _marks(
        self, end: Mapping[int, int], start: Mapping[int, int], known: Mapping[int, str]
    ) -> dict[int, str]:
        return marks_at(self._infos, end, known)

    def _plan(self, start: Offset, end: Offset, marks: Mapping[int, str]) -> list[InputPartition]:
        return list(plan_segments(self._options, self._infos, start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentPartition)
        return read_segments(self._options, partition.infos, self._schema)

    def commit(self, end: StoredOffset) -> None:
        """Acknowledge everything before `end` in the directory, if the query has a subscriber."""
        numbers, _ = self._offsets.read(end)
        self._store_acks({core: number - 1 for core, number in numbers.items()})

    def _announce(self, cores: Mapping[int, Bounds]) -> None:
        """Register the subscriber with new cores, which then keep the segments that it has not read."""
        new = {core: 0 for core in cores if core not in self._announced}
        self._announced.update(new)
        self._store_acks(new)

    def _store_acks(self, through: Mapping[int, int]) -> None:
        if self._options.subscriber is None:
            return
        for core, seq in through.items():
            ack = ExternalAck(subscriber=self._options.subscriber, through=seq)
            commit_offset(OsFileSystem(), core_directory(self._options.path, core), ack)


def list_segments(source: SegmentSource) -> list[SegmentInfo]:
    """Return every segment. Raise `Corrupt` if one has an unreadable sidecar."""
    infos = source.infos()
    for error in source.damaged.values():
        raise error
    return infos


def check_gaps(
    options: QuiverOptions, infos: Sequence[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> None:
    """Raise `SegmentGap`, or log a warning, if segments between two offsets are missing."""
    missing = missing_segments(infos, start, end)
    if missing:
        _report_gap(options, f"segments {segment_ranges(missing)} are gone")


def _report_gap(options: QuiverOptions, text: str) -> None:
    if options.on_gap == "fail":
        raise SegmentGap(
            f"{text}: they were removed before they were read. Give the query a subscriber, so that they are "
            "kept for it; to continue without them, set onGap=skip"
        )
    _log.warning("%s; continuing without them", text)


def plan_segments(
    options: QuiverOptions, infos: Sequence[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> list[SegmentPartition]:
    """Return the tasks for the segments of the chosen slot between two offsets."""
    chosen = [info for info in segments_between(infos, start, end) if info.slot == options.slot]
    return partition_segments(chosen, options.tasks)


def partition_segments(infos: Sequence[SegmentInfo], tasks: int) -> list[SegmentPartition]:
    """Split segments into at most `tasks` contiguous partitions of about the same size.

    The same segments give the same partitions.
    """
    total = sum(info.file_size for info in infos)
    runs: list[list[SegmentInfo]] = [[] for _ in range(max(1, min(tasks, len(infos))))]
    passed = 0
    for info in infos:
        middle = passed + info.file_size // 2
        runs[min(len(runs) - 1, middle * len(runs) // max(1, total))].append(info)
        passed += info.file_size
    return [SegmentPartition(run) for run in runs if run]


def read_segments(
    options: QuiverOptions, infos: Sequence[SegmentInfo], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the segments, in order, in record batches of the declared schema.

    Raise `SegmentGap` for a missing segment, unless `onGap` is `skip`, and `Corrupt` for a damaged one.
    """
    yield from regroup(_batches(options, infos, arrow_target(schema)))
    freeze_modules()


def _batches(
    options: QuiverOptions, infos: Sequence[SegmentInfo], target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    source = options.open()
    reported: set[str] = set()
    for info in infos:
        try:
            reader = source.reader(info)
        except NotFound:
            _report_gap(options, f"segment {info.seq} of core {info.core_id} is gone")
            continue
        if not options.view:
            _report_columns(info, columns_left_out(reader.schema, target), reported)
        for batch in reader.batches():
            yield to_target(text_view(batch, options.slot) if options.view else batch, target)


def _report_columns(info: SegmentInfo, names: Sequence[str], reported: set[str]) -> None:
    """Log a warning for columns that the query does not read, once per column and task."""
    if not reported.issuperset(names):
        reported.update(names)
        text = ", ".join(names)
        _log.warning("segment %d of core %d has columns that are not read: %s", info.seq, info.core_id, text)
