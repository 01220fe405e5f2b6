"""Log records out of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.otlp.readers import AttributeReader, ValueReader, nanoseconds

if TYPE_CHECKING:
    from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs

__all__ = ["LogFiller"]

_PLAIN = (
    "severity_number",
    "severity_text",
    "event_name",
    "trace_id",
    "span_id",
    "flags",
    "dropped_attributes_count",
)


class LogFiller:
    """Puts rows of log records into the message of their scope."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._cells = {name: batch.column(name).to_pylist() for name in _PLAIN}
        self._times = nanoseconds(batch.column("time"))
        self._observed = nanoseconds(batch.column("observed_time"))
        self._bodies = ValueReader(batch.column("body_any"))
        self._attributes = AttributeReader(batch.column("attributes"))

    def add(self, row: int, scope: ScopeLogs, *, anew: bool) -> None:
        """One more log record."""
        record = scope.log_records.add()
        for name, cells in self._cells.items():
            if cells[row]:
                setattr(record, name, cells[row])
        record.time_unix_nano, record.observed_time_unix_nano = self._times[row], self._observed[row]
        if self._bodies.has(row):
            self._bodies.fill(row, record.body)
        self._attributes.fill(row, record.attributes)
