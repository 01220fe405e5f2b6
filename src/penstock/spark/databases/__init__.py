"""Rows as the records that databases are fed with: the formats `penstock-timeseries` and `penstock-vector`.

A task turns the rows of an Arrow batch into protobuf, a column at a time, and stores the records in the
queue's batch objects as `penstock.spark.sink` does. Nothing of the databases themselves is imported, so
executors need no more than Spark's own part of Penstock.
"""

from __future__ import annotations

from penstock.spark.databases.series_columns import SeriesColumns
from penstock.spark.databases.vector_columns import VectorColumns

__all__ = ["SeriesColumns", "VectorColumns"]
