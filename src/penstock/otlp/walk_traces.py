"""Spans, one after the other, into columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.otlp.builders import Attributes, Lists, columns_of
from penstock.otlp.derived import duration_of
from penstock.otlp.refusal import SPAN_ID_BYTES, TRACE_ID_BYTES, Refusals, id_fault
from penstock.otlp.schema import EVENTS, LINKS, SPANS

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["SpanRows"]

_PLAIN = (
    "trace_id",
    "span_id",
    "parent_span_id",
    "trace_state",
    "flags",
    "name",
    "kind",
    "start_time",
    "end_time",
    "status_code",
    "status_message",
    "dropped_events_count",
    "dropped_links_count",
    "dropped_attributes_count",
)


class SpanRows:
    """The columns of spans that do not come from their resource or scope."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._cells: list[tuple[object, ...]] = []
        self._attributes = Attributes()
        self._events, self._event_attributes = Lists(EVENTS), Attributes()
        self._links, self._link_attributes = Lists(LINKS), Attributes()

    def add(self, span: Span) -> int:
        """One more span; how many rows it became, which is 0 when it is refused."""
        if self._refusals.refuse(_faults(span)):
            return 0
        has_status = span.HasField("status")
        self._cells.append(
            (
                span.trace_id or None,
                span.span_id or None,
                span.parent_span_id or None,
                span.trace_state,
                span.flags,
                span.name,
                span.kind,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code if has_status else None,
                span.status.message if has_status else None,
                span.dropped_events_count,
                span.dropped_links_count,
                span.dropped_attributes_count,
            )
        )
        self._attributes.add(span.attributes)
        self._add_events(span)
        self._add_links(span)
        return 1

    def _add_events(self, span: Span) -> None:
        for event in span.events:
            self._events.cells.append((event.time_unix_nano, event.name, event.dropped_attributes_count))
            self._event_attributes.add(event.attributes)
        self._events.end_row()

    def _add_links(self, span: Span) -> None:
        for link in span.links:
            self._links.cells.append(
                (
                    link.trace_id or None,
                    link.span_id or None,
                    link.trace_state,
                    link.flags,
                    link.dropped_attributes_count,
                )
            )
            self._link_attributes.add(link.attributes)
        self._links.end_row()

    def finish(self) -> dict[str, pa.Array]:
        """The columns by name."""
        columns = columns_of(SPANS, _PLAIN, self._cells)
        return columns | {
            "duration_ns": duration_of(columns["start_time"], columns["end_time"]),
            "attributes": self._attributes.finish(),
            "events": self._events.finish(attributes=self._event_attributes.finish()),
            "links": self._links.finish(attributes=self._link_attributes.finish()),
        }


def _faults(span: Span) -> Iterator[str | None]:
    yield id_fault("trace_id", span.trace_id, TRACE_ID_BYTES)
    yield id_fault("span_id", span.span_id, SPAN_ID_BYTES)
    yield id_fault("parent_span_id", span.parent_span_id, SPAN_ID_BYTES)
    for link in span.links:
        yield id_fault("trace_id of a link", link.trace_id, TRACE_ID_BYTES)
        yield id_fault("span_id of a link", link.span_id, SPAN_ID_BYTES)
