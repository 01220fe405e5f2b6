"""What tasks do with segments: map them, bring them into the query's schema, and hand Arrow to Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, NotFound
from penstock.quiver import SegmentInfo, SegmentSource, text_view
from penstock.spark.columns import regroup
from penstock.spark.quiver_columns import arrow_target, columns_left_out, to_target
from penstock.spark.quiver_offsets import SegmentGap, absent, between, bounds_of, resolve, told_ranges
from penstock.spark.quiver_options import QuiverOptions
from penstock.spark.reader import freeze_modules

__all__ = [
    "QuiverReader",
    "SegmentPartition",
    "check_gaps",
    "list_segments",
    "partition_segments",
    "read_segments",
]

_log = logging.getLogger(__name__)


class SegmentPartition(InputPartition):
    """The segments of one task."""

    def __init__(self, infos: Sequence[SegmentInfo]) -> None:
        super().__init__(None)
        self.infos = tuple(infos)


class QuiverReader(DataSourceReader):
    """A batch query over the segments there are now, or over those that were asked for."""

    def __init__(self, options: QuiverOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        infos = list_segments(options.open())
        bounds = bounds_of(infos)
        start = resolve(options.starting, bounds, "startingOffsets")
        end = resolve(options.ending, bounds, "endingOffsets")
        for core, place in start.items():
            if place > end[core]:
                raise ConfigError(
                    f"startingOffsets {place} lies behind endingOffsets {end[core]} in core {core}"
                )
        if options.starting != "earliest":
            check_gaps(options, infos, start, end)
        wanted = [info for info in between(infos, start, end) if info.slot == options.slot]
        # For an empty list Spark would make up a partition of its own.
        return list(partition_segments(wanted, options.tasks) or [SegmentPartition(())])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SegmentPartition)
        return read_segments(self._options, partition.infos, self._schema)


def list_segments(source: SegmentSource) -> list[SegmentInfo]:
    """Every segment there is. Raises `Corrupt` if one has a sidecar that cannot be read."""
    infos = source.infos()
    for error in source.damaged.values():
        raise error
    return infos


def check_gaps(
    options: QuiverOptions, infos: Sequence[SegmentInfo], start: Mapping[int, int], end: Mapping[int, int]
) -> None:
    """Raise `SegmentGap`, or warn, if segments between two offsets are gone: nobody knows what they held."""
    missing = absent(infos, start, end)
    if missing:
        _told_gap(options, f"segments {told_ranges(missing)} are gone")


def _told_gap(options: QuiverOptions, text: str) -> None:
    if options.on_gap == "fail":
        raise SegmentGap(
            f"{text}: they were removed before they were read. Give the query a subscriber, so that they are "
            "kept for it; to go on without them, set onGap=skip"
        )
    _log.warning("%s; going on without them", text)


def partition_segments(infos: Sequence[SegmentInfo], tasks: int) -> list[SegmentPartition]:
    """At most `tasks` runs of neighbours of about the same size: the same for the same segments."""
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
    """Every row of the segments, in order, in record batches of the declared schema.

    Raises `SegmentGap` where a segment is gone, unless `onGap` says otherwise, and `Corrupt`.
    """
    yield from regroup(_batches(options, infos, arrow_target(schema)))
    freeze_modules()


def _batches(
    options: QuiverOptions, infos: Sequence[SegmentInfo], target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    source = options.open()
    told: set[str] = set()
    for info in infos:
        try:
            reader = source.reader(info)
        except NotFound:
            _told_gap(options, f"segment {info.seq} of core {info.core_id} is gone")
            continue
        if not options.view:
            _tell_columns(info, columns_left_out(reader.schema, target), told)
        for batch in reader.batches():
            yield to_target(text_view(batch, options.slot) if options.view else batch, target)


def _tell_columns(info: SegmentInfo, names: Sequence[str], told: set[str]) -> None:
    """Warn of columns that the query was started without, of each once in a task."""
    if not told.issuperset(names):
        told.update(names)
        text = ", ".join(names)
        _log.warning("segment %d of core %d has columns that are not read: %s", info.seq, info.core_id, text)
