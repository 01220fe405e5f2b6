"""The content of a request, independent of how its items are grouped. It defines "lossless"."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.otlp import Signal
from penstock.otlp.messages import parse

NAMES = {
    Signal.TRACES: ("spans", "spans"),
    Signal.LOGS: ("logs", "log_records"),
    Signal.METRICS: ("metrics", "metrics"),
}


def items(data: bytes, signal: Signal) -> list[tuple[bytes, ...]]:
    """Return every item with its resource, its scope and, for a point, its metric, in order and
    serialized."""
    group, inner = NAMES[signal]
    found: list[tuple[bytes, ...]] = []
    for resource in getattr(parse(data, signal), f"resource_{group}"):
        for scope in getattr(resource, f"scope_{group}"):
            context = (
                presence(resource, "resource"),
                resource.schema_url.encode(),
                presence(scope, "scope"),
                scope.schema_url.encode(),
            )
            for item in getattr(scope, inner):
                told = points(item) if signal is Signal.METRICS else [(item.SerializeToString(),)]
                found += [(*context, *parts) for parts in told]
    return found


def presence(message, field: str) -> bytes:  # type: ignore[no-untyped-def]
    """Return a field's bytes, and whether the field is present."""
    return b"+" + getattr(message, field).SerializeToString() if message.HasField(field) else b"-"


def points(metric) -> Iterator[tuple[bytes, ...]]:  # type: ignore[no-untyped-def]
    kind = metric.WhichOneof("data")
    if kind is None:
        return
    inner = [point.SerializeToString() for point in getattr(metric, kind).data_points]
    head = type(metric)()
    head.CopyFrom(metric)
    getattr(head, kind).ClearField("data_points")
    for point in inner:
        yield head.SerializeToString(), point
