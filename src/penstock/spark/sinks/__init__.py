"""The sinks that append records: to queues, to topics, and to the queues that feed databases.

A task turns the rows of an Arrow batch into records, a column at a time, and stores them as batch objects;
the driver appends all of them in one step. Nothing of the databases themselves is imported, so executors need
no more than Spark's own part of Penstock.
"""

from __future__ import annotations

from penstock.spark.sinks.series import SeriesColumns
from penstock.spark.sinks.vectors import VectorColumns

__all__ = ["SeriesColumns", "VectorColumns"]
