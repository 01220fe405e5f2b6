"""From a parsed request to columns, message by message: always there, and what the quick way must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from penstock.otlp.builders import Attributes
from penstock.otlp.context import Context
from penstock.otlp.messages import ITEM_NAMES
from penstock.otlp.refusal import Refusals
from penstock.otlp.schema import ENTITY_REFS, schema_of
from penstock.otlp.signal import Signal
from penstock.otlp.walk_logs import LogRows
from penstock.otlp.walk_metrics import PointRows
from penstock.otlp.walk_traces import SpanRows

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    from penstock.otlp.messages import Request

__all__ = ["Walked", "walk"]


class Rows(Protocol):
    """The columns of a signal that do not come from resource or scope."""

    def add(self, item: Any, /) -> int:
        """One more message; how many rows it became."""

    def finish(self) -> dict[str, pa.Array]:
        """The columns by name."""


@dataclass(frozen=True, slots=True)
class Walked:
    """The rows of a request, and what was refused."""

    batch: pa.RecordBatch
    refusals: Refusals


def walk(request: Request, signal: Signal) -> Walked:
    """The rows of `request`. Raises `LimitExceeded` when resources would repeat too much."""
    refusals = Refusals(ITEM_NAMES[signal])
    rows = _ROWS[signal](refusals)
    resources, scopes = _Resources(), _Scopes()
    scope_of_row: list[int] = []
    for resource in getattr(request, f"resource_{_NAMES[signal][0]}"):
        resources.add(resource.resource if resource.HasField("resource") else None, resource.schema_url)
        for scope in getattr(resource, f"scope_{_NAMES[signal][0]}"):
            scopes.add(
                scope.scope if scope.HasField("scope") else None, scope.schema_url, resources.count - 1
            )
            added = sum(rows.add(item) for item in getattr(scope, _NAMES[signal][1]))
            scope_of_row += [scopes.count - 1] * added
    context = Context(
        resources=resources.finish(),
        scopes=scopes.finish(),
        resource_of_scope=np.array(scopes.resource_of, np.int64),
    )
    columns = context.columns(np.array(scope_of_row, np.int64)) | rows.finish()
    schema = schema_of(signal)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    return Walked(batch, refusals)


_ROWS: Final[dict[Signal, Callable[[Refusals], Rows]]] = {
    Signal.TRACES: SpanRows,
    Signal.LOGS: LogRows,
    Signal.METRICS: PointRows,
}
_NAMES: Final = {
    Signal.TRACES: ("spans", "spans"),
    Signal.LOGS: ("logs", "log_records"),
    Signal.METRICS: ("metrics", "metrics"),
}


class _Resources:
    def __init__(self) -> None:
        self.count = 0
        self._attributes = Attributes()
        self._refs: list[list[dict[str, object]] | None] = []
        self._dropped: list[int | None] = []
        self._schema_urls: list[str] = []

    def add(self, resource: Resource | None, schema_url: str) -> None:
        self.count += 1
        self._schema_urls.append(schema_url)
        self._attributes.add(None if resource is None else resource.attributes)
        self._dropped.append(None if resource is None else resource.dropped_attributes_count)
        self._refs.append(
            None
            if resource is None
            else [
                {
                    "schema_url": ref.schema_url,
                    "type": ref.type,
                    "id_keys": list(ref.id_keys),
                    "description_keys": list(ref.description_keys),
                }
                for ref in resource.entity_refs
            ]
        )

    def finish(self) -> dict[str, pa.Array]:
        return {
            "resource_attributes": self._attributes.finish(),
            "resource_dropped_attributes_count": pa.array(self._dropped, pa.uint32()),
            "resource_entity_refs": pa.array(self._refs, ENTITY_REFS),
            "resource_schema_url": pa.array(self._schema_urls, pa.string()),
        }


class _Scopes:
    def __init__(self) -> None:
        self.resource_of: list[int] = []
        self._attributes = Attributes()
        self._cells: list[tuple[str | None, str | None, int | None, str]] = []

    @property
    def count(self) -> int:
        return len(self.resource_of)

    def add(self, scope: InstrumentationScope | None, schema_url: str, resource: int) -> None:
        self.resource_of.append(resource)
        if scope is None:
            self._attributes.add(None)
            self._cells.append((None, None, None, schema_url))
            return
        self._attributes.add(scope.attributes)
        self._cells.append((scope.name, scope.version, scope.dropped_attributes_count, schema_url))

    def finish(self) -> dict[str, pa.Array]:
        names, versions, dropped, urls = zip(*self._cells, strict=True) if self._cells else ((),) * 4
        return {
            "scope_name": pa.array(names, pa.string()),
            "scope_version": pa.array(versions, pa.string()),
            "scope_attributes": self._attributes.finish(),
            "scope_dropped_attributes_count": pa.array(dropped, pa.uint32()),
            "scope_schema_url": pa.array(urls, pa.string()),
        }
