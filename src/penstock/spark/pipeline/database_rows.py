"""The rows of a database's sink, as its section asks for them: without nulls, and each id once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.spark.pipeline.sink_spec import SinkSpec, TimeSeriesSinkSpec, VectorSinkSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["check_database_columns", "leaves_rows_out", "rows_to_write", "written_columns"]

_RANK = "_penstock_rank"


def leaves_rows_out(sink: SinkSpec) -> bool:
    """Whether `rows_to_write` may give fewer rows than it was given."""
    points, vectors = sink.timeseries, sink.vector
    drops = points is not None and points.on_null == "drop"
    return drops or (vectors is not None and bool(vectors.order_by))


def rows_to_write(sink: SinkSpec, rows: DataFrame) -> DataFrame:
    """What is left of the rows of a transform. For any other sink than a database's: all of them."""
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
    """The columns that are written: not those that only tell the order."""
    kept = {target.id, target.vector, target.delete, *(target.attributes or ())}
    return [name for name in names if name in kept or name not in target.order_by]


def check_database_columns(sink: SinkSpec, schema: StructType) -> None:
    """Raise `ConfigError` unless rows with these columns can be written."""
    target = sink.target
    if isinstance(target, TimeSeriesSinkSpec):
        target.columns.layout(schema)
    elif isinstance(target, VectorSinkSpec):
        names = schema.fieldNames()
        lacking = [name for name in target.order_by if name not in names]
        if lacking:
            held = ", ".join(names)
            raise ConfigError(f"order_by: the rows have no column {lacking[0]!r}; they have {held}")
        kept = written_columns(target, names)
        target.columns.attribute_columns(type(schema)([one for one in schema.fields if one.name in kept]))
