"""Log records, one after the other, into columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.otlp.builders import Attributes, Values, columns_of
from penstock.otlp.derived import text_of
from penstock.otlp.refusal import SPAN_ID_BYTES, TRACE_ID_BYTES, Refusals, id_fault
from penstock.otlp.schema import LOGS

if TYPE_CHECKING:
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

__all__ = ["LogRows"]

_PLAIN = (
    "time",
    "observed_time",
    "severity_number",
    "severity_text",
    "event_name",
    "trace_id",
    "span_id",
    "flags",
    "dropped_attributes_count",
)


class LogRows:
    """The columns of log records that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes = Attributes()
        self._bodies = Values()

    def add(self, record: LogRecord) -> int:
        """One more record; how many rows it became, which is 0 when it is refused."""
        faults = (
            id_fault("trace_id", record.trace_id, TRACE_ID_BYTES),
            id_fault("span_id", record.span_id, SPAN_ID_BYTES),
        )
        if self._refusals.refuse(faults):
            return 0
        self._cells.append(
            (
                record.time_unix_nano,
                record.observed_time_unix_nano,
                record.severity_number,
                record.severity_text,
                record.event_name,
                record.trace_id or None,
                record.span_id or None,
                record.flags,
                record.dropped_attributes_count,
            )
        )
        self._attributes.add(record.attributes)
        self._bodies.add(record.body if record.HasField("body") else None)
        return 1

    def finish(self) -> dict[str, pa.Array]:
        """The columns by name."""
        bodies = self._bodies.finish()
        return columns_of(LOGS, _PLAIN, self._cells) | {
            "body": text_of(bodies),
            "body_any": bodies,
            "attributes": self._attributes.finish(),
        }
