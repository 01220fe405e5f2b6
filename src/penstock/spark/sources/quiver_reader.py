"""What tasks do with segments: map them, bring them into the query's schema, and hand Arrow to Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, InvalidInput, NotFound, Unsupported
from penstock.quiver import SegmentInfo, SegmentSource, slot_name, text_view, unified_schema
from penstock.spark.sources.buffer_reader import freeze_modules
from penstock.spark.sources.columns import regroup
from penstock.spark.sources.quiver_offsets import SegmentGap, absent, between, bounds_of, resolve, told_ranges
from penstock.spark.sources.quiver_options import QuiverOptions

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


_UINTS: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_PLAIN: Final = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.null(): pa.string(),
}


def spark_struct(schemas: Sequence[pa.Schema], slot: int, *, view: bool) -> StructType:
    """The columns of all schemas, in Spark's types. Raises `InvalidInput` when there is none."""
    if not schemas:
        raise InvalidInput(
            f"there is no segment of {slot_name(slot)} to take the columns from: wait for the first, or give "
            "the columns with .schema(…)"
        )
    if view:
        schemas = [text_view(_empty(schema), slot).schema for schema in schemas]
    adapted = [_adapted(schema) for schema in schemas]
    struct: StructType = from_arrow_schema(unified_schema(adapted), prefer_timestamp_ntz=True)
    return struct


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _adapted(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, spark_arrow_type(field.type, field.name)) for field in schema])


def arrow_target(struct: StructType) -> pa.Schema:
    """The Arrow schema in which Spark takes rows of this schema."""
    schema: pa.Schema = to_arrow_schema(struct, timezone="UTC")
    return schema


def spark_arrow_type(kind: pa.DataType, name: str) -> pa.DataType:
    """The nearest type that Spark has; nothing but digits below the microsecond is lost.

    Raises `Unsupported` for unions, naming the column.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return spark_arrow_type(kind.storage_type, name)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return spark_arrow_type(kind.value_type, name)
    if pa.types.is_union(kind):
        raise Unsupported(f"column {name!r} is a union, which Spark does not have; export it as Parquet")
    if kind.num_fields:
        return _nested(kind, name)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.int64()
    return _UINTS.get(kind) or _PLAIN.get(kind) or _decimal(kind)


def _decimal(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision, 38), kind.scale)
    return kind


def _nested(kind: pa.DataType, name: str) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(spark_arrow_type(kind.key_type, name), spark_arrow_type(kind.item_type, name))
    if pa.types.is_struct(kind):
        fields = (kind.field(place) for place in range(kind.num_fields))
        return pa.struct([pa.field(each.name, spark_arrow_type(each.type, name)) for each in fields])
    return pa.list_(spark_arrow_type(kind.value_type, name))


def to_target(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of `target`: those it lacks are null, those it has beyond are left out.

    Raises `InvalidInput` when a column's values do not go into the type that is asked for.
    """
    arrays = [_column(batch, field) for field in target]
    return pa.RecordBatch.from_arrays(arrays, schema=target)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    place = batch.schema.get_field_index(field.name)
    if place < 0:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(place)
    if column.type == field.type:
        return column
    try:
        return _cast(column, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidInput(f"column {field.name!r} does not go into {field.type}: {error}") from error


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        return _cast(column.storage, kind)
    if pa.types.is_run_end_encoded(column.type):
        return _cast(pc.run_end_decode(column), kind)
    if pa.types.is_time(column.type):
        wide = pa.int32() if pa.types.is_time32(column.type) else pa.int64()
        return column.view(wide).cast(kind)
    # Only times may lose digits; a number that does not fit is an error.
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


def columns_left_out(schema: pa.Schema, target: pa.Schema) -> list[str]:
    """The columns that a segment has and a query does not."""
    return sorted(set(schema.names) - set(target.names))
