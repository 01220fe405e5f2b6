"""Records from the buffer in Spark: sessions, and the format `penstock-buffer` for `read` and `readStream`.

spark = build_session("clicks")
stream = spark.readStream.format("penstock-buffer").option("store", "s3://ingest").load()

Importing this package starts nothing and needs neither Java nor PySpark.
"""

from __future__ import annotations

from penstock.spark.java import JavaHome, ensure_java
from penstock.spark.register import register
from penstock.spark.session import build_session

__all__ = ["JavaHome", "build_session", "ensure_java", "register"]
