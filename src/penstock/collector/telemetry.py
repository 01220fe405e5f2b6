"""The state of the collector: `/metrics` for Prometheus, `/health`, `/ready`, and metrics sent as OTLP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
)

from penstock import __version__
from penstock.clock import Clock
from penstock.collector.export_worker import SparseLog
from penstock.collector.outcome import Verdict
from penstock.collector.payload import Exporter, RawPayload
from penstock.collector.settings import Address
from penstock.errors import Unavailable
from penstock.http import (
    App,
    Call,
    Fault,
    HeaderList,
    HttpLimits,
    Listener,
    MethodNotAllowed,
    Policy,
    Request,
    Response,
    Route,
    Scope,
    Sites,
    TransportFault,
    UnknownPath,
)
from penstock.metrics import Kind, Registry, Sample
from penstock.otlp import Signal

_LOG = logging.getLogger(__name__)
_READS: Final = (b"GET", b"HEAD")
_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_LIMITS: Final = HttpLimits(body_bytes_max=1024, body_screened_bytes=1024, connections_max=64)
_STATUS: Final = {
    Fault.MALFORMED: 400,
    Fault.TOO_LARGE: 413,
    Fault.OVERLOADED: 503,
    Fault.FORBIDDEN: 403,
}


class _AdminApp(App[Call]):
    """The HTTP application for operators. It needs no token."""

    def __init__(self, registry: Registry, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._is_ready = is_ready
        handlers = ((b"/metrics", self._metrics), (b"/health", self._health), (b"/ready", self._ready))
        routes = [
            (method, path, Route(handler=handler, scope=Scope.NONE))
            for path, handler in handlers
            for method in _READS
        ]
        super().__init__(routes, Policy(call=Call, missed=_missed), _refusal)

    async def _metrics(self, call: Call) -> Response:
        return _text(200, self._registry.prometheus_text())

    async def _health(self, call: Call) -> Response:
        return _text(200, "ok\n")

    async def _ready(self, call: Call) -> Response:
        return _text(200, "ready\n") if self._is_ready() else _text(503, "not ready\n")


def _missed(request: Request, allowed: bytes | None) -> Exception:
    if request.method not in _READS:
        return MethodNotAllowed("use GET\n", headers=[(b"allow", b"GET")])
    return UnknownPath("the paths are /metrics, /health and /ready\n")


def _refusal(error: Exception, request: Request | None) -> Response:
    if isinstance(error, TransportFault):
        return _text(_STATUS[error.fault], str(error))
    if isinstance(error, MethodNotAllowed):
        return _text(405, str(error), error.headers)
    if isinstance(error, UnknownPath):
        return _text(404, str(error))
    _LOG.error("a request of an operator failed", exc_info=error)
    return _text(500, "the collector failed; its log says why\n")


def _text(status: int, text: str, headers: HeaderList = ()) -> Response:
    return Response(status, text.encode(), content_type=_TEXT, headers=headers)


class AdminServer:
    """The HTTP server for operators, on one port."""

    def __init__(self, registry: Registry, is_ready: Callable[[], bool], sites: Sites | None = None) -> None:
        self._listener = Listener(_AdminApp(registry, is_ready), _LIMITS, sites=sites)

    async def bind(self, address: Address) -> Address:
        """Start listening and return the address. Raise `Unavailable` if the port is taken."""
        try:
            host, port = await self._listener.bind(address.host, address.port)
        except OSError as error:
            raise Unavailable(f"cannot listen on {address}: {error.strerror or error}") from error
        return Address(host, port)

    async def close(self) -> None:
        await self._listener.drain(timeout_s=0.5)


_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def metrics_request(
    samples: Mapping[str, Sequence[Sample]],
    kinds: Mapping[str, Kind],
    *,
    start_ns: int,
    now_ns: int,
    core_id: int = 0,
) -> bytes:
    """Return a registry snapshot as a request, with counters as sums since `start_ns`. It does no I/O."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(
        _attributes({"service.name": "penstock-collector", "service.instance.id": f"core-{core_id}"})
    )
    scope = group.scope_metrics.add()
    scope.scope.name, scope.scope.version = "penstock.collector", __version__
    for name, series in samples.items():
        metric = scope.metrics.add(name=name)
        for sample in series:
            _add_point(metric, kinds[name], sample, start_ns, now_ns)
    return bytes(request.SerializeToString())


def _add_point(metric: Metric, kind: Kind, sample: Sample, start_ns: int, now_ns: int) -> None:
    labels, value = sample["labels"], sample["value"]
    assert isinstance(labels, dict)
    attributes = _attributes({key: str(text) for key, text in labels.items()})
    if kind == "histogram":
        assert isinstance(value, dict)
        metric.histogram.aggregation_temporality = _CUMULATIVE
        metric.histogram.data_points.append(_histogram(value, attributes, start_ns, now_ns))
        return
    assert isinstance(value, int | float)
    point = NumberDataPoint(
        attributes=attributes, start_time_unix_nano=start_ns, time_unix_nano=now_ns, as_double=float(value)
    )
    if kind == "counter":
        metric.sum.aggregation_temporality = _CUMULATIVE
        metric.sum.is_monotonic = True
        metric.sum.data_points.append(point)
    else:
        metric.gauge.data_points.append(point)


def _histogram(
    value: Mapping[str, object], attributes: list[KeyValue], start_ns: int, now_ns: int
) -> HistogramDataPoint:
    buckets, total, count = value["buckets"], value["sum"], value["count"]
    assert isinstance(buckets, dict)
    assert isinstance(total, int | float)
    assert isinstance(count, int | float)
    bounds = [float(bound) for bound in buckets]
    cumulative = list(buckets.values())
    counts = [int(after - before) for before, after in zip([0, *cumulative], cumulative, strict=False)]
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=int(count),
        sum=float(total),
        explicit_bounds=[bound for bound in bounds if not math.isinf(bound)],
        bucket_counts=counts,
    )


def _attributes(labels: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in labels.items()]


class SelfMetrics:
    """Sends a registry every interval. A failed send is not repeated: the next one has all values again."""

    def __init__(
        self, registry: Registry, exporter: Exporter, *, interval_s: float, core_id: int, clock: Clock
    ) -> None:
        self._registry = registry
        self._exporter = exporter
        self._interval_s = interval_s
        self._core_id = core_id
        self._clock = clock
        self._start_ns = clock.now_ms() * 1_000_000
        self._log = SparseLog(_LOG, clock)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._exporter.start()
        self._task = asyncio.create_task(self._run(), name="own metrics")

    async def stop(self) -> None:
        """Stop the task and send the final state, so that no values are missing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._send()
        await self._exporter.close()

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self._send()

    async def _send(self) -> None:
        data = metrics_request(
            self._registry.snapshot(),
            self._registry.kinds(),
            start_ns=self._start_ns,
            now_ns=self._clock.now_ms() * 1_000_000,
            core_id=self._core_id,
        )
        outcome = await self._exporter.send(RawPayload(data, Signal.METRICS))
        if outcome.verdict is not Verdict.ACK:
            self._log.warning("telemetry", f"the collector's own metrics were not accepted: {outcome.reason}")
