"""A stream from a queue into a Delta table, for the drivers that run in separate processes."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession


def stream_into_table(spark: SparkSession, root: Path) -> bool:
    """Copy the current records from `store` to `streamed`. Return whether the stream ended in time."""
    query = (
        spark.readStream.format("penstock-buffer")
        .options(store=str(root / "store"), mode="read", columns="sequence,index,value")
        .load()
        .writeStream.format("penstock-delta")
        .option("checkpointLocation", str(root / "stream-checkpoint"))
        .trigger(availableNow=True)
        .start(str(root / "streamed"))
    )
    return bool(query.awaitTermination(300))
