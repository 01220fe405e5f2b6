"""The quick way from the bytes of a request to its rows: one native call, then columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from penstock.otlp.context import Context, Places
from penstock.otlp.derived import duration_of, text_of
from penstock.otlp.errors import Unflattenable
from penstock.otlp.flatten_metrics import points
from penstock.otlp.nested import (
    any_values,
    attributes,
    ids,
    list_of,
    parents,
    times,
)
from penstock.otlp.schema import (
    ENTITY_REFS,
    EVENTS,
    LINKS,
    SPAN_ID,
    TRACE_ID,
    schema_of,
)
from penstock.otlp.signal import Signal
from penstock.otlp.slim import handler_of

__all__ = ["flatten"]


def flatten(data: bytes, signal: Signal) -> pa.RecordBatch:
    """The rows of a request.

    Raises `Unflattenable` when the messages must be walked: ids of a wrong length, bytes that do not parse
    here. Raises `LimitExceeded` as `Context.columns` does. Some bytes that are no request parse here; ask
    `messages.parse` before.
    """
    try:
        nested = handler_of(signal).list_to_record_batch([data])
    except ValueError as error:
        raise Unflattenable(str(error)) from error
    by_resource = nested.column(0).flatten()
    scopes = by_resource.field(1)
    by_scope = scopes.flatten()
    items = by_scope.field(1)
    rows = items.flatten()
    columns, item_of_row = _FLATTEN[signal](rows)
    scope_of_row = parents(items) if item_of_row is None else parents(items)[item_of_row]
    columns |= _context(by_resource, by_scope, parents(scopes)).columns(scope_of_row)
    schema = schema_of(signal)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _context(by_resource: pa.StructArray, by_scope: pa.StructArray, resource_of_scope: Places) -> Context:
    resource, scope = by_resource.field("resource"), by_scope.field("scope")
    no_resource, no_scope = resource.is_null(), scope.is_null()
    return Context(
        resources={
            "resource_attributes": attributes(resource.field("attributes"), no_resource),
            "resource_dropped_attributes_count": _under(resource, "dropped_attributes_count"),
            "resource_entity_refs": _under(resource, "entity_refs").cast(ENTITY_REFS),
            "resource_schema_url": by_resource.field("schema_url"),
        },
        scopes={
            "scope_name": _under(scope, "name"),
            "scope_version": _under(scope, "version"),
            "scope_attributes": attributes(scope.field("attributes"), no_scope),
            "scope_dropped_attributes_count": _under(scope, "dropped_attributes_count"),
            "scope_schema_url": by_scope.field("schema_url"),
        },
        resource_of_scope=resource_of_scope,
    )


def _under(struct: pa.StructArray, name: str) -> pa.Array:
    """A field of a struct, null where the struct is."""
    return struct.flatten()[struct.type.get_field_index(name)]


def _spans(rows: pa.StructArray) -> tuple[dict[str, pa.Array], None]:
    start, end = times(rows.field("start_time_unix_nano")), times(rows.field("end_time_unix_nano"))
    status = rows.field("status")
    columns = {
        name: rows.field(name)
        for name in (
            "trace_state",
            "flags",
            "name",
            "kind",
            "dropped_attributes_count",
            "dropped_events_count",
            "dropped_links_count",
        )
    }
    return columns | {
        "trace_id": ids(rows.field("trace_id"), TRACE_ID),
        "span_id": ids(rows.field("span_id"), SPAN_ID),
        "parent_span_id": ids(rows.field("parent_span_id"), SPAN_ID),
        "start_time": start,
        "end_time": end,
        "duration_ns": duration_of(start, end),
        "status_code": _under(status, "code"),
        "status_message": _under(status, "message"),
        "attributes": attributes(rows.field("attributes")),
        "events": _events(rows.field("events")),
        "links": _links(rows.field("links")),
    }, None


def _events(lists: pa.ListArray) -> pa.ListArray:
    events = lists.flatten()
    fields = {
        "time": times(events.field("time_unix_nano")),
        "name": events.field("name"),
        "attributes": attributes(events.field("attributes")),
        "dropped": events.field("dropped_attributes_count"),
    }
    return list_of(lists, EVENTS, fields)


def _links(lists: pa.ListArray) -> pa.ListArray:
    links = lists.flatten()
    fields = {
        "trace_id": ids(links.field("trace_id"), TRACE_ID),
        "span_id": ids(links.field("span_id"), SPAN_ID),
        "trace_state": links.field("trace_state"),
        "flags": links.field("flags"),
        "attributes": attributes(links.field("attributes")),
        "dropped": links.field("dropped_attributes_count"),
    }
    return list_of(lists, LINKS, fields)


def _logs(rows: pa.StructArray) -> tuple[dict[str, pa.Array], None]:
    names = ("severity_number", "severity_text", "event_name", "flags", "dropped_attributes_count")
    bodies = any_values(rows.field("body"))
    return {name: rows.field(name) for name in names} | {
        "time": times(rows.field("time_unix_nano")),
        "observed_time": times(rows.field("observed_time_unix_nano")),
        "body": text_of(bodies),
        "body_any": bodies,
        "trace_id": ids(rows.field("trace_id"), TRACE_ID),
        "span_id": ids(rows.field("span_id"), SPAN_ID),
        "attributes": attributes(rows.field("attributes")),
    }, None


_Flattened = tuple[dict[str, pa.Array], Places | None]
"""Columns, and which item each row is of; `None` where items are rows."""

_FLATTEN: Final[dict[Signal, Callable[[pa.StructArray], _Flattened]]] = {
    Signal.TRACES: _spans,
    Signal.LOGS: _logs,
    Signal.METRICS: points,
}
