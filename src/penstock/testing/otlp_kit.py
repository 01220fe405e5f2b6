"""Telemetry for tests, demos and benchmarks: realistic requests, and random messages of every possible shape.

request = telemetry(Signal.TRACES, items=1000, seed=7)      # realistic; the same seed gives the same bytes
message = random_request(random.Random(7), Signal.METRICS)  # every field, kind of value and edge case
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.otlp import Signal, messages_of

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    Request: TypeAlias = ExportTraceServiceRequest | ExportMetricsServiceRequest | ExportLogsServiceRequest

__all__ = ["START_NS", "random_request", "telemetry"]

START_NS: Final = 1_790_000_000_000_000_000
"""The default start of realistic telemetry."""

_SERVICES: Final = (
    "cart",
    "checkout",
    "currency",
    "frontend",
    "payment",
    "quote",
    "search",
    "shipping",
    "stock",
    "users",
)
_ROUTES: Final = ("/api/cart", "/api/cart/{id}", "/api/checkout", "/api/products", "/api/search", "/health")


def telemetry(
    signal: Signal,
    *,
    items: int = 1000,
    resources: int = 10,
    seed: int = 0,
    start_ns: int = START_NS,
    span_ns: int = 1_000_000,
) -> bytes:
    """Return a realistic request: `items` of eight attributes, distributed over `resources`, `span_ns` apart.

    Three in ten spans have an event, and one in ten has a link. Metrics include all five kinds.
    """
    rng = random.Random(seed)
    request: Message = messages_of(signal).request()
    names = {Signal.TRACES: "spans", Signal.LOGS: "logs", Signal.METRICS: "metrics"}
    for number in range(min(resources, items)):
        group = getattr(request, f"resource_{names[signal]}").add()
        _fill_resource(group.resource, number)
        scope = getattr(group, f"scope_{names[signal]}").add()
        scope.scope.name, scope.scope.version = "io.example.instrumentation", "1.4.2"
        for item in range(number, items, resources):
            _FILL[signal](scope, rng, start_ns + item * span_ns, item)
    return bytes(request.SerializeToString(deterministic=True))


def _fill_resource(resource: Message, number: int) -> None:
    service = _SERVICES[number % len(_SERVICES)]
    texts = {
        "service.name": service if number < len(_SERVICES) else f"{service}-{number}",
        "service.namespace": "shop",
        "service.instance.id": f"{service}-{number:04d}",
        "service.version": "2.11.0",
        "host.name": f"node-{number % 3}",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
    }
    for key, text in texts.items():
        resource.attributes.add(key=key).value.string_value = text
    resource.attributes.add(key="process.pid").value.int_value = 1000 + number


def _fill_attributes(pairs: Message, rng: random.Random, item: int) -> None:
    """Add eight attributes: texts, numbers and a flag."""
    route = rng.choice(_ROUTES)
    pairs.add(key="http.request.method").value.string_value = rng.choice(("GET", "POST"))
    pairs.add(key="http.route").value.string_value = route
    pairs.add(key="url.path").value.string_value = route.replace("{id}", str(item))
    pairs.add(key="http.response.status_code").value.int_value = rng.choice((200, 200, 200, 404, 500))
    pairs.add(key="server.address").value.string_value = "shop.example.com"
    pairs.add(key="network.peer.port").value.int_value = 443
    pairs.add(key="sampled").value.bool_value = item % 2 == 0
    pairs.add(key="load").value.double_value = rng.random()


def _add_span(scope: Message, rng: random.Random, at_ns: int, item: int) -> None:
    span = scope.spans.add()
    span.trace_id, span.span_id = rng.randbytes(16), rng.randbytes(8)
    if item % 4:
        span.parent_span_id = rng.randbytes(8)
    span.name = f"{rng.choice(('GET', 'POST'))} {rng.choice(_ROUTES)}"
    span.kind = rng.randint(1, 5)
    span.flags = 0x101
    span.start_time_unix_nano = at_ns
    span.end_time_unix_nano = at_ns + int(rng.lognormvariate(16, 1))
    span.status.code = 2 if rng.random() < 0.05 else 0
    _fill_attributes(span.attributes, rng, item)
    if rng.random() < 0.3:
        event = span.events.add(time_unix_nano=at_ns + 1000, name="exception")
        event.attributes.add(key="exception.type").value.string_value = "TimeoutError"
        event.attributes.add(key="exception.message").value.string_value = "the peer did not answer in time"
    if rng.random() < 0.1:
        link = span.links.add(trace_id=rng.randbytes(16), span_id=rng.randbytes(8))
        link.attributes.add(key="reason").value.string_value = "retry"


def _add_log(scope: Message, rng: random.Random, at_ns: int, item: int) -> None:
    record = scope.log_records.add()
    record.time_unix_nano, record.observed_time_unix_nano = at_ns, at_ns + 50_000
    record.severity_number, record.severity_text = rng.choice(((9, "INFO"), (13, "WARN"), (17, "ERROR")))
    record.body.string_value = f"request {item} to {rng.choice(_ROUTES)} took {rng.randint(1, 900)} ms"
    if item % 2:
        record.trace_id, record.span_id, record.flags = rng.randbytes(16), rng.randbytes(8), 1
    _fill_attributes(record.attributes, rng, item)


def _add_metric(scope: Message, rng: random.Random, at_ns: int, item: int) -> None:
    kind = ("gauge", "sum", "histogram", "exponential_histogram", "summary")[len(scope.metrics) % 5]
    metric = scope.metrics.add(name=f"http.server.{kind}", unit="ms", description=f"A {kind} of requests")
    data = getattr(metric, kind)
    point = data.data_points.add(start_time_unix_nano=at_ns - 10**9, time_unix_nano=at_ns)
    _fill_attributes(point.attributes, rng, item)
    if kind == "gauge":
        point.as_double = rng.random() * 100
        return
    if kind == "summary":
        point.count, point.sum = 10, rng.random() * 1000
        for quantile in (0.5, 0.9, 0.99):
            point.quantile_values.add(quantile=quantile, value=rng.random() * 100)
        return
    data.aggregation_temporality = 2
    if kind == "sum":
        data.is_monotonic, point.as_int = True, rng.randint(0, 10**6)
        return
    counts = [rng.randint(0, 20) for _ in range(6)]
    point.count, point.sum, point.min, point.max = sum(counts), rng.random() * 1000, 0.1, 250.0
    if kind == "histogram":
        point.bucket_counts.extend(counts)
        point.explicit_bounds.extend((1, 5, 10, 50, 100))
        return
    point.scale, point.zero_count, point.positive.offset = 3, 1, -2
    point.positive.bucket_counts.extend(counts)


_FILL: Final[dict[Signal, Callable[[Message, random.Random, int, int], None]]] = {
    Signal.TRACES: _add_span,
    Signal.LOGS: _add_log,
    Signal.METRICS: _add_metric,
}

_INTS: Final = (0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
_UNSIGNED: Final = (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, START_NS)
_SMALL: Final = (0, 1, 2**31 - 1)
_DOUBLES: Final = (0.0, -0.0, 1.5, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = (
    "",
    "a",
    "service.name",
    "ü",
    "日本",
    "🚀",
    "x" * 300,
    "\x00",
    'quote" and \\',
    "line\nbreak",
)


def random_request(rng: random.Random, signal: Signal, *, size: int = 4, bad_ids: float = 0.0) -> Request:
    """Return a random request: fields set or absent, every kind of value, and the limits of every number.

    A repeated field has up to `size` values. `bad_ids` is the probability that an id has a wrong length.
    """
    request = messages_of(signal).request()
    _Random(rng, size, bad_ids).fill(request)
    return request


class _Random:
    """Fills any message of the protocol by its descriptor, so that new fields are tested automatically."""

    def __init__(self, rng: random.Random, size: int, bad_ids: float) -> None:
        self._rng, self._size, self._bad_ids = rng, size, bad_ids

    def fill(self, message: Message, depth: int = 0) -> None:
        rng = self._rng
        if message.DESCRIPTOR.name == "AnyValue":
            self._fill_value(message, depth)
            return
        one_of: dict[str, str] = {
            group.name: rng.choice([field.name for field in group.fields])
            for group in message.DESCRIPTOR.oneofs
        }
        for field in message.DESCRIPTOR.fields:
            group = field.containing_oneof
            if rng.random() < 0.25 or (group is not None and one_of[group.name] != field.name):
                continue
            self._fill_field(message, field, depth)

    def _fill_field(self, message: Message, field: object, depth: int) -> None:
        name: str = field.name  # type: ignore[attr-defined]
        if name.endswith("strindex"):
            return
        if field.is_repeated:  # type: ignore[attr-defined]
            for _ in range(self._rng.randint(0, self._size)):
                if field.message_type is not None:  # type: ignore[attr-defined]
                    self.fill(getattr(message, name).add(), depth + 1)
                else:
                    getattr(message, name).append(self._scalar(field))
        elif field.message_type is not None:  # type: ignore[attr-defined]
            getattr(message, name).SetInParent()
            self.fill(getattr(message, name), depth + 1)
        else:
            setattr(message, name, self._scalar(field))

    def _scalar(self, field: object) -> object:
        rng = self._rng
        kind: int = field.type  # type: ignore[attr-defined]
        name: str = field.name  # type: ignore[attr-defined]
        if name in ("trace_id", "span_id", "parent_span_id"):
            length = 16 if name == "trace_id" else 8
            return rng.randbytes(rng.choice((1, 7, 15, 17)) if rng.random() < self._bad_ids else length)
        if kind == field.TYPE_STRING:  # type: ignore[attr-defined]
            return rng.choice(_TEXTS)
        if kind == field.TYPE_DOUBLE:  # type: ignore[attr-defined]
            return rng.choice(_DOUBLES)
        if kind == field.TYPE_BOOL:  # type: ignore[attr-defined]
            return rng.random() < 0.5
        if kind in (field.TYPE_FIXED64, field.TYPE_UINT64):  # type: ignore[attr-defined]
            return rng.choice(_UNSIGNED)
        if kind in (field.TYPE_SFIXED64, field.TYPE_INT64):  # type: ignore[attr-defined]
            return rng.choice(_INTS)
        return rng.choice(_SMALL)

    def _fill_value(self, value: AnyValue, depth: int) -> None:
        rng = self._rng
        kinds = ["none", "string", "bool", "int", "double", "bytes"] + (
            ["array", "map"] if depth < 12 else []
        )
        kind = rng.choice(kinds)
        if kind == "string":
            value.string_value = rng.choice(_TEXTS)
        elif kind == "bool":
            value.bool_value = rng.random() < 0.5
        elif kind == "int":
            value.int_value = rng.choice(_INTS)
        elif kind == "double":
            value.double_value = rng.choice(_DOUBLES)
        elif kind == "bytes":
            value.bytes_value = rng.randbytes(rng.randint(0, 20))
        elif kind == "array":
            value.array_value.SetInParent()
            for _ in range(rng.randint(0, 2)):
                self._fill_value(value.array_value.values.add(), depth + 2)
        elif kind == "map":
            value.kvlist_value.SetInParent()
            for _ in range(rng.randint(0, 2)):
                pair = value.kvlist_value.values.add(key=rng.choice(_TEXTS))
                if rng.random() < 0.8:
                    pair.value.SetInParent()
                    self._fill_value(pair.value, depth + 2)
