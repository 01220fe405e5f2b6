"""From columns back to one OTLP request: rows of one resource and scope that follow each other share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.otlp.arrow_to_proto import changes, nest
from penstock.otlp.arrow_to_proto_py import AttributeReader, LogFiller, PointFiller, SpanFiller
from penstock.otlp.columns import Unflattenable
from penstock.otlp.messages import available, messages_of
from penstock.otlp.schema import RESOURCE_COLUMNS, SCOPE_COLUMNS, Signal, schema_of

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from penstock.otlp.messages import Request

__all__ = ["encode", "fill", "split"]

_FEW: Final = 150
"""Up to so many rows filling messages one by one is quicker than setting up native columns."""


def encode(batch: pa.RecordBatch, signal: Signal) -> bytes:
    """The request that `batch` is the rows of. Raises `InvalidInput` for columns of another schema."""
    _check_schema(batch, signal)
    if batch.num_rows > _FEW and available():
        try:
            return nest(batch, signal)
        except Unflattenable:
            pass
    return bytes(fill(batch, signal).SerializeToString())


def _check_schema(batch: pa.RecordBatch, signal: Signal) -> None:
    for field in schema_of(signal):
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            raise InvalidInput(f"the batch has no column {field.name}, which {signal} have")
        if batch.schema.field(place).type != field.type and not pa.types.is_dictionary(field.type):
            raise InvalidInput(
                f"column {field.name} is {batch.schema.field(place).type}, expected {field.type}"
            )


def split(batch: pa.RecordBatch, signal: Signal, limit_bytes: int) -> list[bytes]:
    """Requests of at most `limit_bytes` that together hold `batch`, in its order.

    A single item that is larger comes alone, over the limit: whoever sends it decides.
    """
    data = encode(batch, signal)
    if len(data) <= limit_bytes or batch.num_rows < 2:
        return [data]
    parts = max(2, min(batch.num_rows, -(-len(data) // max(1, limit_bytes))))
    rows = -(-batch.num_rows // parts)
    found: list[bytes] = []
    for start in range(0, batch.num_rows, rows):
        found += split(batch.slice(start, rows), signal, limit_bytes)
    return found


_NAMES: Final = {Signal.TRACES: "spans", Signal.LOGS: "logs", Signal.METRICS: "metrics"}


class Filler(Protocol):
    """Puts the rows of one scope into its message."""

    def add(self, row: int, scope: Message, *, anew: bool) -> None:
        """One more row; `anew` when it is the first of its scope."""


_FILLERS: Final[dict[Signal, Callable[[pa.RecordBatch], Filler]]] = {
    Signal.TRACES: SpanFiller,
    Signal.LOGS: LogFiller,
    Signal.METRICS: PointFiller,
}


def fill(batch: pa.RecordBatch, signal: Signal) -> Request:
    """The request as a message, row by row: always there, and what the quick way must equal."""
    request = messages_of(signal).request()
    filler = _FILLERS[signal](batch)
    resources, scopes = _ResourceFiller(batch), _ScopeFiller(batch)
    new_resource = changes([batch.column(name) for name in RESOURCE_COLUMNS]).tolist()
    new_scope = changes([batch.column(name) for name in SCOPE_COLUMNS]).tolist()
    under_request = getattr(request, f"resource_{_NAMES[signal]}")
    group = scope = None
    for row in range(batch.num_rows):
        if new_resource[row]:
            group = under_request.add()
            resources.fill(row, group)
        anew = new_resource[row] or new_scope[row]
        if anew:
            scope = getattr(group, f"scope_{_NAMES[signal]}").add()
            scopes.fill(row, scope)
        filler.add(row, scope, anew=anew)
    return request


class _ResourceFiller:
    def __init__(self, batch: pa.RecordBatch) -> None:
        column = batch.column("resource_attributes")
        self._there = column.is_valid().to_pylist()
        self._attributes = AttributeReader(column)
        self._dropped = batch.column("resource_dropped_attributes_count")
        self._refs = batch.column("resource_entity_refs")
        self._urls = batch.column("resource_schema_url")

    def fill(self, row: int, group: Message) -> None:
        group.schema_url = self._urls[row].as_py() or ""
        if not self._there[row]:
            return
        resource: Resource = group.resource
        resource.SetInParent()
        self._attributes.fill(row, resource.attributes)
        resource.dropped_attributes_count = self._dropped[row].as_py() or 0
        for ref in self._refs[row].as_py() or ():
            resource.entity_refs.add(**ref)


class _ScopeFiller:
    def __init__(self, batch: pa.RecordBatch) -> None:
        column = batch.column("scope_attributes")
        self._there = column.is_valid().to_pylist()
        self._attributes = AttributeReader(column)
        self._names, self._versions = batch.column("scope_name"), batch.column("scope_version")
        self._dropped = batch.column("scope_dropped_attributes_count")
        self._urls = batch.column("scope_schema_url")

    def fill(self, row: int, group: Message) -> None:
        group.schema_url = self._urls[row].as_py() or ""
        if not self._there[row]:
            return
        scope: InstrumentationScope = group.scope
        scope.SetInParent()
        scope.name, scope.version = self._names[row].as_py() or "", self._versions[row].as_py() or ""
        self._attributes.fill(row, scope.attributes)
        scope.dropped_attributes_count = self._dropped[row].as_py() or 0
