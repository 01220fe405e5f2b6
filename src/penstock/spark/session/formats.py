"""Making Penstock's formats known to a Spark session."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Final

from penstock.errors import Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_MIN: Final = (4, 2)
"""The first release whose Python sources can limit a micro-batch."""


def check_spark(version: str | None = None) -> None:
    """Raise `Unsupported` unless PySpark is installed in a version the sources work with."""
    if version is None:
        try:
            import pyspark
        except ImportError as error:
            raise Unsupported("PySpark is not installed; run `pip install 'penstock[spark]'`") from error
        version = pyspark.__version__
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < SPARK_MIN:
        least = ".".join(map(str, SPARK_MIN))
        raise Unsupported(f"Spark {version} is too old for Penstock; install pyspark {least} or newer")


def register(spark: SparkSession) -> None:
    """Make `penstock-buffer`, `penstock-quiver`, the tables `penstock-delta`, `penstock-parquet` and
    `penstock-iceberg`, and the databases `penstock-timeseries` and `penstock-vector` known to `spark`.

    With `penstock[topics]` installed, `penstock-topic` too. Doing it again is harmless.

    Executors need Penstock in their own Python environment. Raises `Unsupported` when the session's Spark
    is too old.
    """
    check_spark()
    check_spark(spark.version)
    from penstock.spark.sinks.databases import TimeSeriesFormat, VectorFormat
    from penstock.spark.sources.buffer import BufferSource
    from penstock.spark.sources.quiver import QuiverSource
    from penstock.spark.tables.format import DeltaFormat, IcebergFormat, ParquetFormat

    tables = (DeltaFormat, ParquetFormat, IcebergFormat)
    for source in (BufferSource, QuiverSource, *tables, TimeSeriesFormat, VectorFormat):
        spark.dataSource.register(source)
    if importlib.util.find_spec("httpx") is not None:
        from penstock.spark.sources.topic import TopicSource

        spark.dataSource.register(TopicSource)
