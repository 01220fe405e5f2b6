"""The formats `penstock-timeseries` and `penstock-vector`, for `write` and `writeStream`."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from penstock.errors import Unsupported
from penstock.spark.databases.options import split_options
from penstock.spark.databases.series_columns import SERIES_FORMAT, SERIES_OPTIONS, SeriesColumns
from penstock.spark.databases.vector_columns import VECTOR_FORMAT, VECTOR_OPTIONS, VectorColumns
from penstock.spark.databases.writers import (
    SeriesStreamWriter,
    SeriesWriter,
    VectorStreamWriter,
    VectorWriter,
)

__all__ = ["TimeSeriesFormat", "VectorFormat"]


class TimeSeriesFormat(DataSource):
    """Points for a time series database, into the queue that feeds it. See `SeriesColumns`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        own, self._queue = split_options(options, SERIES_OPTIONS, SERIES_FORMAT)
        self._columns = SeriesColumns.parse(own)

    @classmethod
    def name(cls) -> str:
        return SERIES_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> SeriesWriter:
        _refuse_overwriting(self.name(), overwrite)
        return SeriesWriter(self._queue, self._columns, self._columns.layout(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SeriesStreamWriter:
        _refuse_overwriting(self.name(), overwrite)
        return SeriesStreamWriter(self._queue, self._columns, self._columns.layout(schema))


class VectorFormat(DataSource):
    """Vectors and deletions for a collection, into the queue that feeds it. See `VectorColumns`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        own, self._queue = split_options(options, VECTOR_OPTIONS, VECTOR_FORMAT)
        self._columns = VectorColumns.parse(own)

    @classmethod
    def name(cls) -> str:
        return VECTOR_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> VectorWriter:
        _refuse_overwriting(self.name(), overwrite)
        return VectorWriter(self._queue, self._columns, self._columns.attribute_columns(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> VectorStreamWriter:
        _refuse_overwriting(self.name(), overwrite)
        return VectorStreamWriter(self._queue, self._columns, self._columns.attribute_columns(schema))


def _refuse_overwriting(name: str, overwrite: bool) -> None:
    if overwrite:
        raise Unsupported(
            f"{name} only appends to the queue of a database: use mode('append'), or "
            "outputMode('append') in a stream"
        )
