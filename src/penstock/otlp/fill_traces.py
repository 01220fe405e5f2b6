"""Spans out of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.otlp.readers import AttributeReader, ListReader, nanoseconds

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

__all__ = ["SpanFiller"]

_PLAIN = ("trace_id", "span_id", "parent_span_id", "trace_state", "flags", "name", "kind")
_COUNTS = ("dropped_events_count", "dropped_links_count", "dropped_attributes_count")


class SpanFiller:
    """Puts rows of spans into the message of their scope."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._cells = {name: batch.column(name).to_pylist() for name in (*_PLAIN, *_COUNTS)}
        self._starts = nanoseconds(batch.column("start_time"))
        self._ends = nanoseconds(batch.column("end_time"))
        self._codes = batch.column("status_code").to_pylist()
        self._messages = batch.column("status_message").to_pylist()
        self._attributes = AttributeReader(batch.column("attributes"))
        self._events, self._links = _Events(batch.column("events")), _Links(batch.column("links"))

    def add(self, row: int, scope: ScopeSpans, *, anew: bool) -> None:
        """One more span."""
        span = scope.spans.add()
        for name, cells in self._cells.items():
            if cells[row]:
                setattr(span, name, cells[row])
        span.start_time_unix_nano, span.end_time_unix_nano = self._starts[row], self._ends[row]
        if self._codes[row] is not None or self._messages[row] is not None:
            span.status.SetInParent()
            span.status.code, span.status.message = self._codes[row] or 0, self._messages[row] or ""
        self._attributes.fill(row, span.attributes)
        self._events.fill(row, span)
        self._links.fill(row, span)


class _Events:
    def __init__(self, column: pa.ListArray) -> None:
        self._lists = ListReader(column)
        structs = self._lists.structs
        self._times = nanoseconds(structs.field("time"))
        self._names = structs.field("name").to_pylist()
        self._dropped = structs.field("dropped").to_pylist()
        self._attributes = AttributeReader(structs.field("attributes"))

    def fill(self, row: int, span: Span) -> None:
        for place in self._lists.places(row):
            event = span.events.add()
            event.time_unix_nano, event.name = self._times[place], self._names[place] or ""
            event.dropped_attributes_count = self._dropped[place] or 0
            self._attributes.fill(place, event.attributes)


class _Links:
    def __init__(self, column: pa.ListArray) -> None:
        self._lists = ListReader(column)
        structs = self._lists.structs
        names = ("trace_id", "span_id", "trace_state", "flags")
        self._cells = {name: structs.field(name).to_pylist() for name in names}
        self._dropped = structs.field("dropped").to_pylist()
        self._attributes = AttributeReader(structs.field("attributes"))

    def fill(self, row: int, span: Span) -> None:
        for place in self._lists.places(row):
            link = span.links.add()
            for name, cells in self._cells.items():
                if cells[place]:
                    setattr(link, name, cells[place])
            link.dropped_attributes_count = self._dropped[place] or 0
            self._attributes.fill(place, link.attributes)
