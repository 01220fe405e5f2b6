"""Conversion of a serialized request to a batch of rows.

protobuf decides whether a request is valid, because ptars takes some corrupt bytes for unknown fields. Then
ptars converts the request to nested Arrow in one call, and whole columns become rows. Each of the five point
types has separate columns, which are joined in the order of the message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, LimitExceeded
from penstock.otlp.columns import (
    RewriteNeeded,
    any_values,
    attributes,
    duration_of,
    ids,
    list_of,
    parents,
    text_of,
    times,
)
from penstock.otlp.messages import handler_of, items_in, parse, remove_refused
from penstock.otlp.schema import (
    BUCKETS,
    ENTITY_REFS,
    EVENTS,
    EXEMPLARS,
    LINKS,
    METRICS,
    NUMBER_COLUMNS,
    POINT_TYPES,
    QUANTILES,
    SPAN_ID,
    STR,
    TRACE_ID,
    Signal,
    schema_of,
)

REPEATED_BYTES_MAX: Final = 256 << 20
"""The limit for repeated attributes. A small request can repeat a large resource a million times."""

_ENTRY_BYTES: Final = 48
"""The size of an attribute without its text: offsets, kind, numbers."""

Places = npt.NDArray[np.int64]
"""The resource, scope or metric index of each row."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The rows of one request."""

    batch: pa.RecordBatch
    items: int
    """The number of items kept, which is the number of rows."""
    rejected: int
    """The number of items refused because an id has a wrong length."""
    message: str
    """The reason for the sender, or an empty string if no item was refused."""


def decode(data: bytes, signal: Signal) -> Decoded:
    """Convert a request to rows, without the items that have an id of a wrong length.

    Raise `InvalidInput` for bytes that are not a request. Raise `LimitExceeded` for more than `ITEMS_MAX`
    items, or if the rows would repeat more of their resources than a bundle may hold. Raise `Unsupported` if
    the extra `collector` is not installed.
    """
    request = parse(data, signal)
    items = items_in(request, signal)
    try:
        batch = proto_to_arrow(data, signal)
        if batch.num_rows == items:
            return Decoded(batch, items, 0, "")
    except RewriteNeeded:
        pass
    refusals = remove_refused(request, signal)
    request.DiscardUnknownFields()
    try:
        batch = proto_to_arrow(request.SerializeToString(), signal)
    except RewriteNeeded as error:
        raise InvalidInput(f"the request cannot be converted to columns: {error}") from error
    if batch.num_rows != items - refusals.count:
        raise InvalidInput(
            f"only {batch.num_rows} of {items} items of the request can be converted to columns"
        )
    return Decoded(batch, batch.num_rows, refusals.count, refusals.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The resources and scopes of one request as columns, and the resource index of each scope."""

    resources: dict[str, pa.Array]
    scopes: dict[str, pa.Array]
    resource_of_scope: Places

    def columns(self, scope_of_row: Places) -> dict[str, pa.Array]:
        """Return the resource and scope columns of every row. Raise `LimitExceeded` if they are too large."""
        resource_of_row = self.resource_of_scope[scope_of_row]
        self._check_size(resource_of_row, scope_of_row)
        by_resource, by_scope = pa.array(resource_of_row), pa.array(scope_of_row)
        names = lift(self.resources["resource_attributes"], "service.name").dictionary_encode()
        found = {"service_name": names.take(by_resource)}
        found |= {name: column.take(by_resource) for name, column in self.resources.items()}
        return found | {name: column.take(by_scope) for name, column in self.scopes.items()}

    def _check_size(self, resource_of_row: Places, scope_of_row: Places) -> None:
        repeated = _row_bytes(self.resources["resource_attributes"])[resource_of_row].sum()
        repeated += _row_bytes(self.scopes["scope_attributes"])[scope_of_row].sum()
        if repeated > REPEATED_BYTES_MAX:
            raise LimitExceeded(
                f"the attributes of resources and scopes would take {repeated} bytes, repeated in "
                f"{len(scope_of_row)} rows; the limit is {REPEATED_BYTES_MAX}: send fewer items per request"
            )


def _row_bytes(attributes: pa.MapArray) -> Places:
    """Estimate the size of each row's attributes."""
    offsets = np.asarray(attributes.offsets, np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    per_entry = np.full(end - start, _ENTRY_BYTES, np.int64)
    values = attributes.items.slice(start, end - start)
    texts = [
        attributes.keys.slice(start, end - start),
        *(values.field(name) for name in ("str", "bytes", "ser")),
    ]
    for text in texts:
        per_entry += np.asarray(pc.fill_null(pc.binary_length(text), 0), np.int64)
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_entry)])
    found: Places = running[offsets[1:] - start] - running[offsets[:-1] - start]
    return found


def lift(attributes: pa.MapArray, key: str) -> pa.StringArray:
    """Return the text of the first attribute `key` of every row, or null if it is missing or not text."""
    offsets = np.asarray(attributes.offsets, np.int64)
    start, end = int(offsets[0]), int(offsets[-1])
    values = attributes.items.slice(start, end - start)
    texts = values.field("str")
    matches = np.asarray(
        pc.and_(
            pc.equal(attributes.keys.slice(start, end - start), key),
            pc.fill_null(pc.equal(values.field("type"), STR), False),
        )
    )
    hits = np.flatnonzero(matches)
    first = np.searchsorted(hits, offsets[:-1] - start)
    inside = np.searchsorted(hits, offsets[1:] - start) > first
    places = np.zeros(len(attributes), np.int64)
    places[inside] = hits[first[inside]]
    return texts.take(pa.array(places, mask=~inside))


_OF_METRIC: Final = ("name", "description", "unit")
_OF_POINT: Final = (
    "start_time",
    "time",
    "flags",
    "value_int",
    "value_double",
    *NUMBER_COLUMNS,
    "positive",
    "negative",
    "quantiles",
    "exemplars",
    "attributes",
    "temporality",
    "is_monotonic",
    "type",
)


_ZERO_BY_DEFAULT: Final = {"summary": ("sum",), "exponential_histogram": ("zero_threshold",)}
"""The numbers that a message omits when they are 0.0, by the type of the metric."""


def points(metrics: pa.StructArray) -> tuple[dict[str, pa.Array], Places]:
    """Return the columns of all points, and the metric index of each point."""
    parts: list[dict[str, pa.Array]] = []
    owners: list[Places] = []
    for kind in POINT_TYPES:
        data = metrics.field(kind)
        if data.null_count == len(data):
            continue
        lists = data.flatten()[data.type.get_field_index("data_points")]
        owner = _owners(lists)
        parts.append(_columns(kind, data, lists, owner))
        owners.append(owner)
    metric_of_row = np.concatenate(owners) if owners else np.zeros(0, np.int64)
    order = np.argsort(metric_of_row, kind="stable")
    columns = {name: _join(name, parts, order) for name in _OF_POINT}
    metric_of_row = metric_of_row[order]
    by_metric = pa.array(metric_of_row)
    columns |= {name: metrics.field(name).take(by_metric) for name in _OF_METRIC}
    columns["metadata"] = attributes(metrics.field("metadata")).take(by_metric)
    columns["dropped_attributes_count"] = pa.nulls(len(metric_of_row), pa.uint32())
    return columns, metric_of_row


def _owners(lists: pa.ListArray) -> Places:
    """Return the metric index of every point. A metric of another type has no list."""
    lengths = np.asarray(lists.value_lengths().fill_null(0), np.int64)
    return np.repeat(np.arange(len(lists), dtype=np.int64), lengths)


def _join(name: str, parts: list[dict[str, pa.Array]], order: Places) -> pa.Array:
    kind = METRICS.field(name).type
    if not any(name in part for part in parts):
        return pa.nulls(len(order), kind)
    if len(parts) == 1:
        return parts[0][name]
    pieces = [part[name] if name in part else pa.nulls(len(part["type"]), kind) for part in parts]
    return pa.concat_arrays(pieces).take(pa.array(order))


def _columns(kind: str, data: pa.StructArray, lists: pa.ListArray, owner: Places) -> dict[str, pa.Array]:
    """Return the columns of the points of type `kind`."""
    rows = lists.flatten()
    by_metric = pa.array(owner)
    names = {field.name for field in rows.type}
    found = {
        "type": pa.array([kind], pa.string()).take(pa.array(np.zeros(len(rows), np.int64))),
        "start_time": times(rows.field("start_time_unix_nano")),
        "time": times(rows.field("time_unix_nano")),
        "flags": rows.field("flags"),
        "attributes": attributes(rows.field("attributes")),
    }
    found |= {
        name: rows.field(name).cast(METRICS.field(name).type) for name in NUMBER_COLUMNS if name in names
    }
    for name in _ZERO_BY_DEFAULT.get(kind, ()):
        found[name] = found[name].fill_null(0.0)
    for ours, theirs in (("temporality", "aggregation_temporality"), ("is_monotonic", "is_monotonic")):
        if data.type.get_field_index(theirs) >= 0:
            found[ours] = data.field(theirs).take(by_metric)
    if "as_int" in names:
        found |= {"value_int": rows.field("as_int"), "value_double": rows.field("as_double")}
    if "exemplars" in names:
        found["exemplars"] = _exemplars(rows.field("exemplars"))
    if "positive" in names:
        found |= {name: _buckets(rows.field(name)) for name in ("positive", "negative")}
    if "quantile_values" in names:
        found["quantiles"] = _quantiles(rows.field("quantile_values"))
    return found


def _buckets(buckets: pa.StructArray) -> pa.StructArray:
    counts = buckets.field("bucket_counts").cast(BUCKETS.field("counts").type)
    return pa.StructArray.from_arrays(
        [buckets.field("offset"), counts], fields=list(BUCKETS), mask=buckets.is_null()
    )


def _quantiles(lists: pa.ListArray) -> pa.ListArray:
    values = lists.flatten()
    fields = {name: values.field(name).fill_null(0.0) for name in ("quantile", "value")}
    return list_of(lists, QUANTILES, fields)


def _exemplars(lists: pa.ListArray) -> pa.ListArray:
    values = lists.flatten()
    fields = {
        "time": times(values.field("time_unix_nano")),
        "value_int": values.field("as_int"),
        "value_double": values.field("as_double"),
        "trace_id": ids(values.field("trace_id"), TRACE_ID),
        "span_id": ids(values.field("span_id"), SPAN_ID),
        "attributes": attributes(values.field("filtered_attributes")),
    }
    return list_of(lists, EXEMPLARS, fields)


def proto_to_arrow(data: bytes, signal: Signal) -> pa.RecordBatch:
    """Convert a request that `messages.parse` has accepted to rows.

    Raise `RewriteNeeded` for ids of a wrong length, and for bytes that only protobuf parses. Raise
    `LimitExceeded` as `Context.columns` does.
    """
    try:
        nested = handler_of(signal).list_to_record_batch([data])
    except ValueError as error:
        raise RewriteNeeded(str(error)) from error
    by_resource = nested.column(0).flatten()
    scopes = by_resource.field(1)
    by_scope = scopes.flatten()
    items = by_scope.field(1)
    rows = items.flatten()
    columns, item_of_row = _CONVERTERS[signal](rows)
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
    """Return a field of a struct, with null where the struct is null."""
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


_Columns = tuple[dict[str, pa.Array], Places | None]
"""The columns, and the item index of each row, or None if items are rows."""

_CONVERTERS: Final[dict[Signal, Callable[[pa.StructArray], _Columns]]] = {
    Signal.TRACES: _spans,
    Signal.LOGS: _logs,
    Signal.METRICS: points,
}
