"""The OpenTelemetry SDK as the client: all accepted data is delivered, whichever process dies meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from tests.collector_process import FILE, CollectorProcess, FarEnd, names_in

from penstock.collector.dead_letters import DeadLetters
from penstock.collector.status import retry_trailers
from penstock.otlp.schema import Signal

HANDLINGS = ["arrow", "pass_through"]


@pytest.fixture
def far_end() -> Iterator[FarEnd]:
    with FarEnd() as found:
        yield found


def send_all(spans: SpanExporter, logs: GrpcLogs | HttpLogs, metrics: GrpcMetrics | HttpMetrics) -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(spans))
    for number in range(100):
        with tracing.get_tracer("t").start_as_current_span(f"span-{number}") as span:
            span.set_attribute("n", number)
            span.add_event("half way")
    tracing.shutdown()
    logging_provider = LoggerProvider()
    logging_provider.add_log_record_processor(SimpleLogRecordProcessor(logs))
    logger = logging_provider.get_logger("l")
    for number in range(10):
        logger.emit(body=f"log-{number}", severity_text="INFO")
    logging_provider.shutdown()
    reader = PeriodicExportingMetricReader(metrics, export_interval_millis=60_000)
    measuring = MeterProvider(metric_readers=[reader])
    for number in range(10):
        measuring.get_meter("m").create_counter(f"metric-{number}").add(number)
    measuring.shutdown()


def expected(kind: str, count: int) -> set[str]:
    return {f"{kind}-{number}" for number in range(count)}


@pytest.mark.parametrize("handling", HANDLINGS)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_all_signals_of_the_sdk_arrive(tmp_path: Path, far_end: FarEnd, protocol: str, handling: str) -> None:
    with CollectorProcess(tmp_path, handling=handling, far_port=far_end.port) as collector:
        if protocol == "grpc":
            place = f"http://127.0.0.1:{collector.grpc_port}"
            send_all(GrpcSpans(place), GrpcLogs(place), GrpcMetrics(place))
        else:
            place = f"http://127.0.0.1:{collector.http_port}/v1"
            send_all(
                HttpSpans(f"{place}/traces", compression=Compression.Gzip),
                HttpLogs(f"{place}/logs"),
                HttpMetrics(f"{place}/metrics", compression=Compression.Deflate),
            )
        assert collector.stop() == 0, collector.log
        assert set(far_end.names(Signal.TRACES)) == expected("span", 100), "a stop delivers the stored data"
        assert set(far_end.names(Signal.LOGS)) == expected("log", 10)
        assert set(far_end.names(Signal.METRICS)) == expected("metric", 10)


class Producer:
    """Sends one span after another and records the names of accepted ones."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._tracing = TracerProvider()
        self._stop = threading.Event()
        self.taken: set[str] = set()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        tracer = self._tracing.get_tracer("t")
        number = 0
        while not self._stop.is_set():
            spans: list[ReadableSpan] = []
            for _ in range(20):
                span = tracer.start_span(f"span-{number}")
                span.end()
                assert isinstance(span, ReadableSpan)
                spans.append(span)
                number += 1
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                self.taken |= {span.name for span in spans}

    def __enter__(self) -> Producer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._exporter.shutdown()

    def wait_for_more(self, count: int) -> None:
        goal = len(self.taken) + count
        deadline = time.monotonic() + 30
        while len(self.taken) < goal:
            assert time.monotonic() < deadline, "no more data is accepted"
            time.sleep(0.01)


@pytest.mark.parametrize("handling", HANDLINGS)
def test_no_accepted_data_is_lost_when_the_collector_is_killed(
    tmp_path: Path, far_end: FarEnd, handling: str
) -> None:
    with CollectorProcess(tmp_path, handling=handling, far_port=far_end.port) as collector:
        with Producer(GrpcSpans(f"http://127.0.0.1:{collector.grpc_port}", timeout=20)) as producer:
            for _ in range(2):
                producer.wait_for_more(200)
                collector.kill()
                collector.start()
            producer.wait_for_more(100)
            assert collector.stop() == 0
            collector.start()
            producer.wait_for_more(100)
        far_end.wait_for(Signal.TRACES, producer.taken)


def test_data_survives_an_outage_of_the_destination_and_a_restart(tmp_path: Path) -> None:
    far_end = FarEnd()
    collector = CollectorProcess(tmp_path, far_port=far_end.port)
    with collector, Producer(GrpcSpans(f"http://127.0.0.1:{collector.grpc_port}")) as producer:
        producer.wait_for_more(400)
        assert collector.stop() == 0, (
            "a destination that is down does not prevent the collector from stopping"
        )
        collector.start()
        producer.wait_for_more(400)
        with far_end:
            far_end.wait_for(Signal.TRACES, set(producer.taken))
    assert "unreachable" in collector.log


def test_each_destination_is_served_at_its_own_speed(tmp_path: Path, far_end: FarEnd) -> None:
    text = FILE.replace("destinations: [out]", "destinations: [out, other]").replace(
        "dead_letters:",
        "  other:\n    kind: exporter\n    plugin_urn: urn:otel:otlp:exporter\n"
        '    config: {grpc_endpoint: "127.0.0.1:{{other_port}}", probe: {max: 200ms, initial: 100ms}}\n'
        "dead_letters:",
    )
    other = FarEnd()
    collector = CollectorProcess(tmp_path, text, far_port=far_end.port, other_port=other.port)
    with collector, Producer(GrpcSpans(f"http://127.0.0.1:{collector.grpc_port}")) as producer:
        producer.wait_for_more(200)
        far_end.wait_for(Signal.TRACES, set(producer.taken))
        with other:
            other.wait_for(Signal.TRACES, set(producer.taken))


def test_refused_data_is_stored_and_the_rest_is_delivered(tmp_path: Path, far_end: FarEnd) -> None:
    def refuse_one(request: bytes, context: grpc.ServicerContext) -> None:
        if "span-25" in names_in(request, Signal.TRACES):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")

    far_end.answer = refuse_one
    with CollectorProcess(tmp_path, handling="pass_through", far_port=far_end.port) as collector:
        exporter = GrpcSpans(f"http://127.0.0.1:{collector.grpc_port}")
        with Producer(exporter) as producer:
            producer.wait_for_more(100)
        assert collector.stop() == 0
    [letter] = DeadLetters(str(tmp_path / "dead")).letters()
    assert "not this one" in letter.reason
    kept = set(names_in(Path(letter.path).read_bytes(), Signal.TRACES))
    assert len(kept) == 20
    assert kept | far_end.names(Signal.TRACES).keys() >= producer.taken


def test_the_collector_waits_for_the_delay_a_destination_requests(tmp_path: Path, far_end: FarEnd) -> None:
    def busy_once(request: bytes, context: grpc.ServicerContext) -> None:
        if len(far_end.at_s) == 1:
            context.set_trailing_metadata(retry_trailers("UNAVAILABLE", "busy", 3.0))
            context.abort(grpc.StatusCode.UNAVAILABLE, "busy")

    far_end.answer = busy_once
    with CollectorProcess(tmp_path, far_port=far_end.port) as collector:
        tracing = TracerProvider()
        tracing.add_span_processor(SimpleSpanProcessor(GrpcSpans(f"http://127.0.0.1:{collector.grpc_port}")))
        tracing.get_tracer("t").start_span("one").end()
        tracing.shutdown()
        far_end.wait_for(Signal.TRACES, {"one"})
    assert far_end.at_s[1] - far_end.at_s[0] >= 2.9


@pytest.fixture(autouse=True)
def quiet_sdk() -> Iterator[None]:
    """Ignore the warnings that the SDK emits indefinitelyy retry."""
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
