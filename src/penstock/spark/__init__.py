"""Records in Spark: sessions, a source and exactly-once sinks by their format names, and pipelines.

    spark = build_session("clicks")
    stream = spark.readStream.format("penstock-buffer").option("store", "s3://ingest").load()

    Pipeline.from_yaml("clicks.yaml").start(spark).wait()

Importing this package starts nothing and needs neither Java nor PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.spark.formats import register
from penstock.spark.java import JavaHome, ensure_java
from penstock.spark.session import build_session

if TYPE_CHECKING:
    from penstock.spark.pipeline import Pipeline, PipelineStatus, RunningPipeline

__all__ = [
    "JavaHome",
    "Pipeline",
    "PipelineStatus",
    "RunningPipeline",
    "build_session",
    "ensure_java",
    "register",
]


def __getattr__(name: str) -> object:
    """Pipelines need PySpark, so they are imported by the first who asks for one."""
    if name in ("Pipeline", "PipelineStatus", "RunningPipeline"):
        from penstock.spark import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
