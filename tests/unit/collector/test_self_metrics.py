"""The collector's own metrics as OTLP."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from tests.collector_doubles import GrpcBackend
from tests.unit.collector.test_collector import collector, plan_of, send

from penstock.collector.telemetry import metrics_request
from penstock.metrics import Registry
from penstock.otlp.schema import Signal


def test_a_registry_becomes_sums_gauges_and_histograms() -> None:
    registry = Registry()
    registry.counter("a.count", "", ("k",)).inc(3, k="v")
    registry.gauge("a.level", "").set(-2.5)
    seconds = registry.histogram("a.seconds", "", buckets=(0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 9.0):
        seconds.observe(value)
    data = metrics_request(registry.snapshot(), registry.kinds(), start_ns=1, now_ns=2, core_id=3)
    [group] = ExportMetricsServiceRequest.FromString(data).resource_metrics
    assert {pair.value.string_value for pair in group.resource.attributes} == {"penstock-collector", "core-3"}
    count, level, histogram = group.scope_metrics[0].metrics
    assert (count.name, count.sum.is_monotonic, count.sum.data_points[0].as_double) == ("a.count", True, 3)
    assert count.sum.data_points[0].attributes[0].value.string_value == "v"
    assert level.gauge.data_points[0].as_double == -2.5
    point = histogram.histogram.data_points[0]
    assert (list(point.explicit_bounds), list(point.bucket_counts), point.count) == ([0.1, 1.0], [1, 2, 1], 4)


async def test_a_collector_sends_its_own_metrics_and_a_final_state(tmp_path: Path) -> None:
    async with GrpcBackend() as backend:
        loaded = plan_of(tmp_path, ["out"], {}, out={"plugin": "noop"})
        loaded["telemetry"] = {"otlp": {"grpc_endpoint": f"127.0.0.1:{backend.port}"}, "interval": "1h"}
        async with collector(loaded) as made:
            await send(made, Signal.LOGS, 2)
        [(signal, data)] = backend.requests
    assert signal is Signal.METRICS
    [group] = ExportMetricsServiceRequest.FromString(data).resource_metrics
    points = {metric.name: metric for metric in group.scope_metrics[0].metrics}
    assert sum(point.as_double for point in points["collector.receiver.requests"].sum.data_points) == 2
    assert "quiver.core.bytes" in points


async def test_metrics_without_a_destination_do_not_delay_a_stop(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, ["out"], {}, out={"plugin": "noop"})
    loaded["telemetry"] = {"otlp": {"grpc_endpoint": "127.0.0.1:1"}}
    async with collector(loaded) as made:
        await send(made, Signal.LOGS, 1)
