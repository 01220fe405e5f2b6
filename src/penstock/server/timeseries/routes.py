"""What stands at each path of Prometheus' HTTP API, and at those of writers and operators."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from penstock import __version__
from penstock.clock import Clock
from penstock.coordinator import Durability
from penstock.errors import InvalidInput, LimitExceeded, Unavailable
from penstock.http.message import Request, Response
from penstock.http.routes import Router
from penstock.metrics import Registry
from penstock.server.auth import Scope
from penstock.server.errors import UnsupportedMediaType
from penstock.server.timeseries.app import Call, Route, TimeSeriesApp, response_of
from penstock.server.timeseries.settings import TimeSeriesSettings
from penstock.timeseries import TimeSeries
from penstock.timeseries.api import (
    Answer,
    federation_answer,
    instant_request,
    labels_request,
    metadata_answer,
    metadata_request,
    names_answer,
    query_answer,
    range_request,
    series_answer,
    series_request,
)
from penstock.timeseries.otlp import OtlpSeries, series_of_metrics
from penstock.timeseries.remote_write import decode_remote_write

__all__ = ["TimeSeriesApi", "timeseries_app"]

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_PROTOBUF: Final = b"application/x-protobuf"
_INLINE_BYTES: Final = 16 * 1024
"""Below this, reading a body costs less than a hop to a thread."""
_MEMBERS_MAX: Final = 100
"""Each member of a gzip body costs a copy of what is behind it."""


class TimeSeriesApi:
    """The handlers. `database` is None until it is open."""

    def __init__(self, settings: TimeSeriesSettings, *, clock: Clock, registry: Registry) -> None:
        self.database: TimeSeries | None = None
        self.draining = False
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._skipped = registry.counter(
            "timeseries.histograms_skipped", "Native histograms of remote writes, which are not kept."
        )
        self._rejected = registry.counter(
            "timeseries.points_rejected", "Points of OTLP records for which there is no series."
        )

    def check_ready(self) -> None:
        """Raises `Unavailable` while requests cannot be served."""
        if self.database is None:
            raise Unavailable("the database is being opened")
        if self.database.failed is not None:
            raise Unavailable(f"the database has stopped: {self.database.failed}")
        if self.draining:
            raise Unavailable("the server is shutting down")

    @property
    def _db(self) -> TimeSeries:
        self.check_ready()
        assert self.database is not None
        return self.database

    # Readers

    async def query(self, call: Call) -> Response:
        asked = instant_request(call.parameters(), self._clock.now_ms())
        return response_of(
            query_answer(await self._db.query(asked.query, asked.at_ms, timeout_s=asked.timeout_s))
        )

    async def query_range(self, call: Call) -> Response:
        asked = range_request(call.parameters())
        result = await self._db.query_range(
            asked.query, asked.start_ms, asked.end_ms, asked.step_ms, timeout_s=asked.timeout_s
        )
        return response_of(await asyncio.to_thread(query_answer, result))

    async def series(self, call: Call) -> Response:
        asked = series_request(call.parameters())
        found = await self._db.series(asked.selectors, start_ms=asked.start_ms, end_ms=asked.end_ms)
        return response_of(series_answer(found, asked.limit))

    async def labels(self, call: Call) -> Response:
        asked = labels_request(call.parameters())
        found = await self._db.label_names(asked.selectors, start_ms=asked.start_ms, end_ms=asked.end_ms)
        return response_of(names_answer(found, asked.limit))

    async def label_values(self, call: Call) -> Response:
        asked = labels_request(call.parameters())
        found = await self._db.label_values(
            call.name, asked.selectors, start_ms=asked.start_ms, end_ms=asked.end_ms
        )
        return response_of(names_answer(found, asked.limit))

    async def metadata(self, call: Call) -> Response:
        asked = metadata_request(call.parameters())
        return response_of(
            metadata_answer(self._db.metadata(asked.metric), asked.limit, asked.limit_per_metric)
        )

    async def federate(self, call: Call) -> Response:
        asked = series_request(call.parameters())
        newest = await self._db.newest(asked.selectors, self._clock.now_ms())
        return response_of(federation_answer(newest))

    async def build_info(self, call: Call) -> Response:
        """What Grafana asks first, to know which features there are."""
        body = f'{{"status":"success","data":{{"version":"{__version__}","application":"penstock"}}}}'
        return response_of(Answer(200, body.encode()))

    # Writers

    async def remote_write(self, call: Call) -> Response:
        if b"io.prometheus.write.v2" in call.request.headers.get(b"content-type", b""):
            raise UnsupportedMediaType("remote write 2.0 is not supported: send 1.0, prometheus.WriteRequest")
        body, cap = call.request.body, self._settings.body_bytes_max
        if len(body) < _INLINE_BYTES:
            request = decode_remote_write(body, bytes_max=cap)
        else:
            request = await asyncio.to_thread(decode_remote_write, body, bytes_max=cap)
        handle = await self._db.write(
            request.series, families=request.metadata, timeout=self._settings.write_timeout_s
        )
        await handle.wait(self._settings.acknowledge.level)
        self._skipped.inc(request.histograms_skipped)
        return Response(204)

    async def otlp(self, call: Call) -> Response:
        found = await asyncio.to_thread(_otlp_series, call.request, self._settings.body_bytes_max)
        handle = await self._db.write(found.series, timeout=self._settings.write_timeout_s)
        await handle.wait(self._settings.acknowledge.level)
        answer = ExportMetricsServiceResponse()
        if found.rejected_points:
            self._rejected.inc(found.rejected_points)
            answer.partial_success.rejected_data_points = found.rejected_points
            answer.partial_success.error_message = "; ".join(found.reasons)
        return Response(200, answer.SerializeToString(), content_type=_PROTOBUF)

    # Operators

    async def flush(self, call: Call) -> Response:
        handle = await self._db.flush(durable=True)
        await handle.wait(Durability.DURABLE)
        return Response(204)

    async def metrics(self, call: Call) -> Response:
        return Response(200, self._registry.prometheus_text().encode(), content_type=_TEXT)

    async def healthy(self, call: Call) -> Response:
        return Response(200, b"Penstock is healthy.\n", content_type=b"text/plain")

    async def ready(self, call: Call) -> Response:
        self.check_ready()
        return Response(200, b"Penstock is ready.\n", content_type=b"text/plain")


def timeseries_app(api: TimeSeriesApi, settings: TimeSeriesSettings) -> TimeSeriesApp:
    """Every route of the API."""
    router: Router[Route] = Router()
    for path, handler in (
        (b"/api/v1/query", api.query),
        (b"/api/v1/query_range", api.query_range),
        (b"/api/v1/series", api.series),
        (b"/api/v1/labels", api.labels),
    ):
        for method in (b"GET", b"POST"):
            router.add(method, path, Route(handler=handler))
    for path, handler in (
        (b"/api/v1/label/{name}/values", api.label_values),
        (b"/api/v1/metadata", api.metadata),
        (b"/api/v1/status/buildinfo", api.build_info),
        (b"/federate", api.federate),
    ):
        router.add(b"GET", path, Route(handler=handler))
    router.add(b"POST", b"/api/v1/write", Route(handler=api.remote_write, scope=Scope.WRITE))
    router.add(b"POST", b"/v1/metrics", Route(handler=api.otlp, scope=Scope.WRITE))
    router.add(b"POST", b"/-/flush", Route(handler=api.flush, scope=Scope.ADMIN))
    router.add(b"GET", b"/metrics", Route(handler=api.metrics, at_any_time=True))
    router.add(b"GET", b"/-/healthy", Route(handler=api.healthy, is_probe=True))
    router.add(b"GET", b"/-/ready", Route(handler=api.ready, is_probe=True))
    return TimeSeriesApp(
        router, settings.keys, check_ready=api.check_ready, requests_max=settings.requests_max
    )


def _otlp_series(request: Request, bytes_max: int) -> OtlpSeries:
    message = ExportMetricsServiceRequest()
    try:
        message.ParseFromString(_unpacked(request, bytes_max))
    except DecodeError as error:
        raise InvalidInput(f"the body is not an OTLP metrics request: {error}") from None
    return series_of_metrics(message)


def _unpacked(request: Request, bytes_max: int) -> bytes:
    """The body of an OTLP request. Raises `InvalidInput`, `LimitExceeded` and `UnsupportedMediaType`."""
    if b"json" in request.headers.get(b"content-type", b""):
        raise UnsupportedMediaType("OTLP as JSON is not supported: send application/x-protobuf")
    encoding = request.headers.get(b"content-encoding", b"").strip().lower()
    if encoding in (b"", b"identity"):
        return request.body
    if encoding != b"gzip":
        raise UnsupportedMediaType(f"content-encoding {encoding.decode('ascii', 'replace')!r}: send gzip")
    return _gunzipped(request.body, bytes_max)


def _gunzipped(packed: bytes, bytes_max: int) -> bytes:
    """All members one behind the other. Raises `InvalidInput` and `LimitExceeded`."""
    body = b""
    for _ in range(_MEMBERS_MAX):
        unpacking = zlib.decompressobj(wbits=31)
        try:
            body += unpacking.decompress(packed, bytes_max - len(body) + 1)
        except zlib.error as error:
            raise InvalidInput(f"the body is not gzip: {error}") from None
        if len(body) > bytes_max:
            raise LimitExceeded(f"the body unpacks to more than {bytes_max:,} bytes")
        if not unpacking.eof:
            raise InvalidInput("the body is gzip that was cut short")
        packed = unpacking.unused_data
        if not packed:
            return body
    raise InvalidInput(f"the body is gzip of more than {_MEMBERS_MAX} members")
