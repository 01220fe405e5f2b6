"""The sinks that append records: to queues, to topics, and to the queues that feed databases.

For a queue, tasks convert the rows of an Arrow batch into records column by column and store them as batch
objects. The driver appends all of them in one step. The database packages are not imported, so executors
need only the `spark` extra.
"""

from __future__ import annotations

from penstock.spark.sinks.series import SeriesColumns
from penstock.spark.sinks.vectors import VectorColumns

__all__ = ["SeriesColumns", "VectorColumns"]
