"""The rows for database sinks, filtered as configured: without nulls, and with each id once.

Also the decoding of OTLP records into rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.pipeline.sink_spec import SinkSpec, TimeSeriesSinkSpec, VectorSinkSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from penstock.otlp import Signal

_RANK = "_penstock_rank"


def leaves_rows_out(sink: SinkSpec) -> bool:
    """Return whether `rows_to_write` may drop rows."""
    points, vectors = sink.timeseries, sink.vector
    drops = points is not None and points.on_null == "drop"
    return drops or (vectors is not None and bool(vectors.order_by))


def rows_to_write(sink: SinkSpec, rows: DataFrame) -> DataFrame:
    """Return the rows without those that a database sink drops. Other sinks write all rows."""
    if sink.timeseries is not None and sink.timeseries.on_null == "drop":
        value, timestamp = _column(sink.timeseries.value), _column(sink.timeseries.timestamp)
        return rows.filter(value.isNotNull() & timestamp.isNotNull())  # NaN is a value
    if sink.vector is not None and sink.vector.order_by:
        return _last_of_each_id(sink.vector, rows)
    return rows


def _last_of_each_id(target: VectorSinkSpec, rows: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    order = [_column(name).desc_nulls_last() for name in target.order_by]
    of_each_id = Window.partitionBy(_column(target.id)).orderBy(*order)
    ranked = rows.withColumn(_RANK, F.row_number().over(of_each_id))
    return ranked.filter(F.col(_RANK) == 1).select(*map(_column, written_columns(target, rows.columns)))


def _column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col("`" + name.replace("`", "``") + "`")


def written_columns(target: VectorSinkSpec, names: list[str]) -> list[str]:
    """Return the columns to write, without those that are used only for ordering."""
    kept = {target.id, target.vector, target.delete, *(target.attributes or ())}
    return [name for name in names if name in kept or name not in target.order_by]


def check_database_columns(sink: SinkSpec, schema: StructType) -> None:
    """Raise `ConfigError` unless rows with this schema can be written to a database sink."""
    target = sink.target
    if isinstance(target, TimeSeriesSinkSpec):
        target.columns.layout(schema)
    elif isinstance(target, VectorSinkSpec):
        names = schema.fieldNames()
        missing = [name for name in target.order_by if name not in names]
        if missing:
            held = ", ".join(names)
            raise ConfigError(f"order_by: the rows have no column {missing[0]!r}; they have {held}")
        kept = written_columns(target, names)
        target.columns.attribute_columns(type(schema)([one for one in schema.fields if one.name in kept]))


_STREAM: Final = b"\xff\xff\xff\xff"


def otlp_columns(signal: str) -> StructType:
    """Return the columns of `signal`, as `penstock.otlp.view` defines them.

    Raise `Unsupported` if the extra `collector`, which decodes the records, is not installed.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from penstock.otlp import Signal, check_installed, view_schema

    check_installed()
    columns: StructType = from_arrow_schema(view_schema(Signal(signal)))
    return columns


def otlp_table(record: pa.Buffer, signal: str) -> pa.Table:
    """Return the rows of a record.

    Raise `InvalidInput` if the record is not telemetry of `signal` or has an invalid item. The whole record
    is then a bad record.
    """
    from penstock.otlp import Signal, view

    data, kind = record.to_pybytes(), Signal(signal)
    batches = _from_stream(record, kind) if data.startswith(_STREAM) else [_from_request(data, kind)]
    return pa.Table.from_batches([view(batch) for batch in batches])


def _from_request(data: bytes, signal: Signal) -> pa.RecordBatch:
    from penstock.otlp import decode

    decoded = decode(data, signal)
    if decoded.rejected:
        raise InvalidInput(decoded.message)
    return decoded.batch


def _from_stream(record: pa.Buffer, signal: Signal) -> list[pa.RecordBatch]:
    from penstock.otlp import schema_of

    with pa.ipc.open_stream(record) as stream:
        batches = list(stream)
        wanted = schema_of(signal)
        if not wanted.equals(stream.schema.remove_metadata()):
            missing = [name for name in wanted.names if name not in stream.schema.names]
            raise InvalidInput(
                f"the columns are not those of {signal}: "
                + (f"there is no {missing[0]}" if missing else "their types differ")
            )
    return batches or [pa.RecordBatch.from_pylist([], schema=wanted)]
