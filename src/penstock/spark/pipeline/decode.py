"""Decoding of bytes into columns. Every record either decodes or gets the reason why it does not.

A decoded frame has the position of each record (`POSITIONS`), its bytes (`_value`), the decoded columns, and
`_reason`, which is null for a good record. Decoding never drops a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.limits import JSON_NUMBER_DIGITS_MAX, JSON_STORED_DEPTH_MAX
from penstock.spark.pipeline.rows import otlp_table
from penstock.spark.pipeline.spec import DecodeSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

REASON: Final = "_reason"
VALUE: Final = "_value"
POSITIONS: Final = ("_shard", "_sequence", "_index", "_ingestion_time", "_metadata")
SOURCE_COLUMNS: Final = ("shard", "sequence", "index", "ingestion_time", "metadata", "value")
"""The required columns of the source, in the order of `POSITIONS` and `_value`."""

_CORRUPT: Final = "_penstock_malformed"
_WHOLE: Final = "_penstock_record"
_END: Final = "_penstock_end"
_RESERVED: Final = frozenset({*POSITIONS, VALUE, REASON, _CORRUPT, _END, _WHOLE})
_WRAPPED_LEVELS: Final = 2
"""The nesting levels around a JSON record when it is parsed: an object and a list."""


def parse_schema(text: str) -> StructType:
    """Parse columns in SQL's DDL notation. Raise `ConfigError` if they are invalid."""
    from pyspark.errors import ParseException, PySparkException
    from pyspark.sql.types import StructType

    try:
        schema = StructType.fromDDL(text)
        assert isinstance(schema, StructType)
    except (ParseException, PySparkException) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f'decode.schema: {text!r} is not a list of columns such as "user string, at timestamp": {first}'
        ) from error
    names = [field.name.lower() for field in schema.fields]
    for name in names:
        if name in _RESERVED:
            raise ConfigError(f"decode.schema: the name {name} is reserved; choose another one")
    if len(set(names)) < len(names):
        raise ConfigError(f"decode.schema: {text!r} names a column twice")
    if not names:
        raise ConfigError("decode.schema: expected at least one column")
    return schema


def infer_schema(spark: SparkSession, spec: DecodeSpec, sample: DataFrame) -> StructType:
    """Infer the columns from a sample of records. Raise `InvalidInput` if there are none."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    values = sample.select("value").limit(spec.sample)
    if spec.format == "arrow":
        first = values.first()
        if first is None:
            raise InvalidInput(_EMPTY_SAMPLE)
        return _arrow_record_schema(bytes(first[0]))
    lines = values.select(F.col("value").cast("string").alias("value"))
    if spec.format == "json":
        options = {**spec.options, "columnNameOfCorruptRecord": _CORRUPT, **_json_limits()}
        found = spark.read.options(**options).json(lines).schema
    else:
        options = {"inferSchema": "true", "columnNameOfCorruptRecord": _CORRUPT, **spec.options}
        found = spark.read.options(**options).csv(lines).schema
    columns = StructType([field for field in found.fields if field.name != _CORRUPT])
    if not columns.fields:
        raise InvalidInput(_EMPTY_SAMPLE)
    return columns


_EMPTY_SAMPLE: Final = (
    "decode.schema: there is no record yet to infer the columns from; produce some first, or give the schema"
)


def _arrow_record_schema(record: bytes) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        with pa.ipc.open_stream(record) as stream:
            return from_arrow_schema(stream.schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInput(
            f"decode.schema: the first record is not an Arrow IPC stream ({error}); give the schema, or "
            "another format"
        ) from error


def decode(frame: DataFrame, spec: DecodeSpec, schema: StructType | None) -> DataFrame:
    """Add the decoded columns and `_reason` to a frame with `SOURCE_COLUMNS`."""
    from pyspark.sql import functions as F

    renamed = frame.select(
        *(F.col(f"`{name}`").alias(f"_{name}") for name in SOURCE_COLUMNS),
    )
    if spec.format == "raw":
        return renamed.select("*", F.col(VALUE).alias("value"), _gap_or_null(F.lit(None)).alias(REASON))
    assert schema is not None
    if spec.format == "arrow":
        return _decode_arrow(renamed, schema, _arrow_table)
    if spec.format == "otlp":
        return _decode_arrow(renamed, schema, partial(otlp_table, signal=str(spec.signal)))
    return _decode_text(renamed, spec, schema)


def _gap_or_null(otherwise: Column) -> Column:
    from pyspark.sql import functions as F

    gap = F.concat(F.lit("gap: "), F.col("_metadata").cast("string"))
    return (
        F.when(F.col("_index") < 0, gap)
        .when(F.col(VALUE).isNull(), F.lit("the record is null"))
        .otherwise(otherwise.cast("string"))
    )


def _decode_text(frame: DataFrame, spec: DecodeSpec, schema: StructType) -> DataFrame:
    """Decode JSON and CSV with Spark's own parsers.

    JSON is wrapped in an object with a list, which must be complete and have one element. Without this,
    Spark would stop after the first value of a text and accept `{...} {...}` as its first half.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, IntegerType, StringType, StructField, StructType

    text = F.col(VALUE).cast("string")
    options = {**spec.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    nullable = StructType([StructField(field.name, field.dataType, True) for field in schema.fields])
    malformed = StructField(_CORRUPT, StringType(), True)
    if spec.format == "json":
        records, end = StructField(_WHOLE, ArrayType(nullable)), StructField(_END, IntegerType())
        wrapped = F.concat(F.lit(f'{{"{_WHOLE}":['), text, F.lit(f'],"{_END}":1}}'))
        options |= _json_limits(_WRAPPED_LEVELS)
        parsed = F.from_json(wrapped, StructType([records, end, malformed]), options)
        found = F.col(f"{_PARSED}.{_WHOLE}")
        record = F.get(found, F.lit(0))
        whole = F.col(f"{_PARSED}.{_END}").isNotNull() & (F.size(found) == 1)
        words = "does not parse as JSON of the schema"
    else:
        ddl = ", ".join(
            f"`{field.name}` {field.dataType.simpleString()}" for field in [*nullable.fields, malformed]
        )
        parsed = F.from_csv(text, ddl, options)
        record = F.col(_PARSED)
        whole = F.lit(True)
        words = "does not parse as CSV of the schema"
    # Separate branches: for a record that is not text, the parser's result is not considered.
    reason = (
        F.when(~F.is_valid_utf8(text), F.lit("is not valid UTF-8"))
        .when(F.length(text) == 0, F.lit("is empty"))
        .when(F.col(f"{_PARSED}.{_CORRUPT}").isNotNull() | ~whole | record.isNull(), F.lit(words))
    )
    for field in schema.fields:
        if not field.nullable:
            reason = reason.when(record[field.name].isNull(), F.lit(f"has no {field.name}"))
    return frame.select("*", parsed.alias(_PARSED)).select(
        *POSITIONS,
        VALUE,
        *(record[field.name].alias(field.name) for field in schema.fields),
        _gap_or_null(reason).alias(REASON),
    )


def _json_limits(levels_around: int = 0) -> dict[str, str]:
    """Return Spark's options for the limits of stored JSON.

    Spark's default limit of 1,000 levels is too high for later steps: one record with 500 levels in a column
    of type variant crashes the JVM.
    """
    return {
        "maxNestingDepth": str(JSON_STORED_DEPTH_MAX + levels_around),
        "maxNumLen": str(JSON_NUMBER_DIGITS_MAX),
    }


_PARSED: Final = "_penstock_parsed"


_Reader: TypeAlias = Callable[[pa.Buffer], pa.Table]
"""A function that returns the rows of one record.

It may raise `PenstockError`, `OSError`, `ValueError` or an Arrow error.
"""


def _arrow_table(record: pa.Buffer) -> pa.Table:
    with pa.ipc.open_stream(record) as stream:
        return stream.read_all()


def _decode_arrow(frame: DataFrame, schema: StructType, read: _Reader) -> DataFrame:
    """Decode each record with `read`. A record may have any number of rows."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StringType, StructField, StructType

    output = StructType(
        [
            *(frame.schema[name] for name in (*POSITIONS, VALUE)),
            *(StructField(field.name, field.dataType, True) for field in schema.fields),
            StructField(REASON, StringType(), True),
        ]
    )
    target = to_arrow_schema(output, timezone="UTC")
    required = [field.name for field in schema.fields if not field.nullable]

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _unpack(batch, target, required, read)

    return frame.mapInArrow(unpack, output)


def _unpack(
    batch: pa.RecordBatch, target: pa.Schema, required: Sequence[str], read: _Reader
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of every record. Yield one row with null columns and a reason if it does not decode."""
    wanted = pa.schema([target.field(place) for place in range(len(POSITIONS) + 1, len(target) - 1)])
    values = batch.column(batch.schema.get_field_index(VALUE))
    indexes = batch.column(batch.schema.get_field_index("_index"))
    for place in range(batch.num_rows):
        envelope = batch.slice(place, 1)
        reason: str | None = None
        rows = pa.table({field.name: pa.nulls(1, field.type) for field in wanted}, schema=wanted)
        if indexes[place].as_py() < 0:
            gap = envelope.column("_metadata")[0].as_py()
            reason = f"gap: {bytes(gap or b'').decode(errors='replace')}"
        elif not values[place].is_valid:
            reason = "the record is null"
        else:
            rows, reason = _rows_of(values[place].as_buffer(), read, wanted, required, rows)
        if rows.num_rows == 0:
            continue
        repeated = envelope.take(pa.array([0] * rows.num_rows, pa.int32()))
        columns = [*repeated.columns, *(column.combine_chunks() for column in rows.columns)]
        columns.append(pa.array([reason] * rows.num_rows, pa.string()))
        arrays = [
            array.cast(field.type) if array.type != field.type else array
            for array, field in zip(columns, target, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=target)


def _rows_of(
    record: pa.Buffer, read: _Reader, wanted: pa.Schema, required: Sequence[str], nothing: pa.Table
) -> tuple[pa.Table, str | None]:
    try:
        table = read(record)
        missing = [field.name for field in wanted if field.name not in table.column_names]
        if any(name in required for name in missing):
            return nothing, f"has no {missing[0]}"
        for field in wanted:
            if field.name in missing:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        rows = table.select(wanted.names).cast(wanted)
    except PenstockError as error:
        return nothing, str(error).splitlines()[0][:200]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OSError, ValueError) as error:
        return nothing, f"does not decode as Arrow of the schema: {str(error).splitlines()[0][:200]}"
    for name in required:
        if rows.column(name).null_count:
            return nothing, f"has no {name}"
    return rows, None
