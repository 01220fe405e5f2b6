"""Blocking form of the time-series database, with the same names, for scripts and Spark tasks.

with TimeSeries.open("file:///var/metrics") as database:
    database.write([series]).wait(Durability.DURABLE)
    database.query("sum(up)")
"""

from __future__ import annotations

from penstock.blocking import blocking, blocking_call, blocking_open
from penstock.coordinator import BlockingDatabase
from penstock.coordinator import BlockingFlushHandle as FlushHandle
from penstock.coordinator import BlockingWriteHandle as WriteHandle
from penstock.timeseries import database as _database
from penstock.timeseries.model import Bucket

__all__ = ["TimeSeries"]


class TimeSeries(BlockingDatabase[_database.TimeSeries]):
    """Blocking form of `penstock.timeseries.TimeSeries`; threads may share it."""

    open = blocking_open(_database.TimeSeries.open)

    write = blocking(_database.TimeSeries.write, WriteHandle)
    flush = blocking(_database.TimeSeries.flush, FlushHandle)
    sync = blocking(_database.TimeSeries.sync)
    stored_sequence = blocking(_database.TimeSeries.stored_sequence)
    stored_position = blocking(_database.TimeSeries.stored_position)

    query = blocking(_database.TimeSeries.query)
    query_range = blocking(_database.TimeSeries.query_range)
    newest = blocking(_database.TimeSeries.newest)
    series = blocking(_database.TimeSeries.series)
    label_names = blocking(_database.TimeSeries.label_names)
    label_values = blocking(_database.TimeSeries.label_values)
    metadata = blocking_call(_database.TimeSeries.metadata)

    @property
    def buckets(self) -> list[Bucket]:
        """The hours with flushed samples that retention still keeps, oldest first."""

        async def read() -> list[Bucket]:
            return self._inner.buckets

        return self._loop.run(read())
