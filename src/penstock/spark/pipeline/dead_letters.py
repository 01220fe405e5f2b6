"""The dead-letter table: every record that did not decode, with its bytes, its place and the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.spark.pipeline.decode import REASON, VALUE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["LETTER_COLUMNS", "letters_of"]

LETTER_COLUMNS: Final = (
    "pipeline string, batch bigint, shard int, sequence bigint, index int, ingestion_time timestamp, "
    "metadata binary, value binary, reason string, at timestamp"
)
"""`index` is -1 and `value` null for a hole in the queue; `metadata` then tells its range."""


def letters_of(decoded: DataFrame, pipeline: str, batch: int, *, gaps_only: bool = False) -> DataFrame:
    """The bad records and the holes of a decoded frame, or the holes alone, as rows of the table."""
    from pyspark.sql import functions as F

    bad = decoded.filter(F.col("_index") < 0 if gaps_only else F.col(REASON).isNotNull())
    return bad.select(
        F.lit(pipeline).alias("pipeline"),
        F.lit(batch).cast("bigint").alias("batch"),
        F.col("_shard").alias("shard"),
        F.col("_sequence").alias("sequence"),
        F.col("_index").alias("index"),
        F.col("_ingestion_time").alias("ingestion_time"),
        F.col("_metadata").alias("metadata"),
        F.col(VALUE).alias("value"),
        F.col(REASON).alias("reason"),
        F.current_timestamp().alias("at"),
    )
