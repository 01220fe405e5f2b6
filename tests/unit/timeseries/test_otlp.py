"""OTLP metrics as series."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as m

from penstock.timeseries import MetricType, Temporality
from penstock.timeseries.ingest import OtlpSeries, series_of_metrics
from penstock.timeseries.model import STALE_BITS

AT_NS = 1_700_000_000_123_456_789
AT_MS = 1_700_000_000_123


def pair(key: str, value: AnyValue | str) -> KeyValue:
    return KeyValue(key=key, value=value if isinstance(value, AnyValue) else AnyValue(string_value=value))


def number(value: float | int, **attributes: str) -> m.NumberDataPoint:
    point = m.NumberDataPoint(
        time_unix_nano=AT_NS, attributes=[pair(key, text) for key, text in attributes.items()]
    )
    if isinstance(value, int):
        point.as_int = value
    else:
        point.as_double = value
    return point


def mapped(
    *metrics: m.Metric, resource: list[KeyValue] | None = None, keep: list[str] | None = None
) -> OtlpSeries:
    request = ExportMetricsServiceRequest()
    one = request.resource_metrics.add()
    one.resource.attributes.extend(resource or [])
    one.scope_metrics.add().metrics.extend(metrics)
    return series_of_metrics(request, resource_labels=keep)


def values(found: OtlpSeries) -> dict[str, list[float]]:
    return {str(series.labels): series.samples.values.tolist() for series in found.series}


def test_a_gauge_keeps_its_name() -> None:
    found = mapped(
        m.Metric(name="system.load", unit="1", gauge=m.Gauge(data_points=[number(0.5), number(2)]))
    )
    assert values(found) == {"system_load{}": [0.5, 2]}
    (series,) = found.series
    assert series.samples.timestamps.tolist() == [AT_MS, AT_MS]
    assert (series.metadata.metric_type, series.metadata.unit) == (MetricType.GAUGE, "1")


@pytest.mark.parametrize(
    ("monotonic", "temporality", "name", "expected"),
    [
        (True, m.AGGREGATION_TEMPORALITY_CUMULATIVE, "req", "req_total"),
        (True, m.AGGREGATION_TEMPORALITY_CUMULATIVE, "req_total", "req_total"),
        (False, m.AGGREGATION_TEMPORALITY_CUMULATIVE, "req", "req"),
        (True, m.AGGREGATION_TEMPORALITY_DELTA, "req", "req"),
    ],
)
def test_a_monotonic_cumulative_sum_is_a_total(
    monotonic: bool, temporality: m.AggregationTemporality, name: str, expected: str
) -> None:
    data = m.Sum(is_monotonic=monotonic, aggregation_temporality=temporality, data_points=[number(3)])
    (series,) = mapped(m.Metric(name=name, sum=data)).series
    assert series.labels.metric == expected
    assert series.metadata.monotonic is monotonic


def test_a_histogram_becomes_buckets_that_count_up_a_sum_and_a_count() -> None:
    point = m.HistogramDataPoint(
        time_unix_nano=AT_NS, count=6, sum=9.5, explicit_bounds=[0.1, 1], bucket_counts=[1, 2, 3]
    )
    data = m.Histogram(data_points=[point], aggregation_temporality=m.AGGREGATION_TEMPORALITY_CUMULATIVE)
    found = mapped(m.Metric(name="latency", histogram=data))
    assert values(found) == {
        'latency_bucket{le="0.1"}': [1],
        'latency_bucket{le="1"}': [3],
        'latency_bucket{le="+Inf"}': [6],
        "latency_count{}": [6],
        "latency_sum{}": [9.5],
    }
    assert found.series[0].metadata.temporality is Temporality.CUMULATIVE


def test_a_histogram_without_buckets_or_sum_has_the_last_bucket_only() -> None:
    data = m.Histogram(data_points=[m.HistogramDataPoint(time_unix_nano=AT_NS, count=6)])
    assert values(mapped(m.Metric(name="h", histogram=data))) == {
        'h_bucket{le="+Inf"}': [6],
        "h_count{}": [6],
    }


def test_a_summary_becomes_quantiles_a_sum_and_a_count() -> None:
    point = m.SummaryDataPoint(time_unix_nano=AT_NS, count=4, sum=8)
    point.quantile_values.add(quantile=0.99, value=3)
    found = mapped(m.Metric(name="s", summary=m.Summary(data_points=[point])))
    assert values(found) == {'s{quantile="0.99"}': [3], "s_count{}": [4], "s_sum{}": [8]}


def test_the_resource_makes_labels_and_job_and_instance() -> None:
    resource = [
        pair("service.name", "shop"),
        pair("service.namespace", "eu"),
        pair("service.instance.id", "i-1"),
        pair("host.name", "h1"),
    ]
    metric = m.Metric(name="g", gauge=m.Gauge(data_points=[number(1.0, **{"http.method": "GET"})]))
    (series,) = mapped(metric, resource=resource).series
    assert dict(series.labels) == {
        "__name__": "g",
        "host_name": "h1",
        "http_method": "GET",
        "instance": "i-1",
        "job": "eu/shop",
        "service_instance_id": "i-1",
        "service_name": "shop",
        "service_namespace": "eu",
    }
    (series,) = mapped(metric, resource=resource, keep=["host.name"]).series
    assert set(dict(series.labels)) == {"__name__", "host_name", "http_method", "instance", "job"}


def test_resources_that_name_their_own_job_and_instance_stay_apart() -> None:
    request = ExportMetricsServiceRequest()
    for instance in "ab":
        one = request.resource_metrics.add()
        one.resource.attributes.extend([pair("job", "own"), pair("instance", instance)])
        metric = m.Metric(name="g", gauge=m.Gauge(data_points=[number(1.0)]))
        one.scope_metrics.add().metrics.append(metric)
    assert set(values(series_of_metrics(request))) == {
        'g{instance="a", job="own"}',
        'g{instance="b", job="own"}',
    }


def test_labels_of_the_resource_the_points_and_the_service_are_all_kept() -> None:
    resource = [pair("service.name", "shop"), pair("job", "own"), pair("zone", "eu")]
    points = [number(1.0), number(2.0, zone="us"), number(3.0, job="me", zone="", otel_scope_name="s")]
    found = mapped(
        m.Metric(name="g", gauge=m.Gauge(data_points=points)), resource=resource, keep=["job", "zone"]
    )
    assert values(found) == {
        'g{exported_job="own", job="shop", zone="eu"}': [1],
        'g{exported_job="own", exported_zone="eu", job="shop", zone="us"}': [2],
        'g{exported_exported_job="shop", exported_job="own", job="me", otel_scope_name="s", zone="eu"}': [3],
    }


def test_a_bound_does_not_replace_an_attribute_of_its_name() -> None:
    point = m.HistogramDataPoint(time_unix_nano=AT_NS, count=1, attributes=[pair("le", "mine")])
    found = mapped(m.Metric(name="h", histogram=m.Histogram(data_points=[point])))
    assert set(values(found)) == {'h_bucket{exported_le="mine", le="+Inf"}', 'h_count{le="mine"}'}


def test_names_that_become_one_share_their_values() -> None:
    point = number(1.0, **{"a.b": "1", "a_b": "2", "1x": "3"})
    (series,) = mapped(m.Metric(name="1.g", gauge=m.Gauge(data_points=[point]))).series
    assert dict(series.labels) == {"__name__": "_1_g", "a_b": "1;2", "key_1x": "3"}


def test_attributes_of_any_kind_have_a_text() -> None:
    point = m.NumberDataPoint(time_unix_nano=AT_NS, as_int=1)
    point.attributes.extend(
        [
            pair("b", AnyValue(bool_value=True)),
            pair("i", AnyValue(int_value=-3)),
            pair("d", AnyValue(double_value=2.0)),
            pair("y", AnyValue(bytes_value=b"\x00\xff")),
            pair(
                "l",
                AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="a"), AnyValue(int_value=1)])),
            ),
            pair("n", AnyValue()),
        ]
    )
    (series,) = mapped(m.Metric(name="g", gauge=m.Gauge(data_points=[point]))).series
    labels = dict(series.labels)
    assert (labels["b"], labels["i"], labels["d"], labels["y"], labels["l"]) == (
        "true",
        "-3",
        "2",
        "AP8=",
        '["a",1]',
    )
    assert "n" not in labels


def test_a_point_without_a_value_is_a_stale_marker() -> None:
    point = number(0.0)
    point.flags = m.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    (series,) = mapped(m.Metric(name="g", gauge=m.Gauge(data_points=[point]))).series
    assert series.samples.values.view(np.uint64).tolist() == [STALE_BITS]


def test_what_has_no_series_is_counted_and_the_rest_is_kept() -> None:
    exponential = m.ExponentialHistogram(
        data_points=[m.ExponentialHistogramDataPoint(time_unix_nano=AT_NS)] * 2
    )
    crooked = m.HistogramDataPoint(time_unix_nano=AT_NS, explicit_bounds=[1], bucket_counts=[1])
    timeless = m.NumberDataPoint(as_int=1)
    found = mapped(
        m.Metric(name="e", exponential_histogram=exponential),
        m.Metric(name="h", histogram=m.Histogram(data_points=[crooked])),
        m.Metric(name="t", gauge=m.Gauge(data_points=[timeless, number(1)])),
        m.Metric(gauge=m.Gauge(data_points=[number(1)])),
        m.Metric(name="nothing"),
    )
    assert values(found) == {"t{}": [1]}
    assert found.rejected_points == 5
    assert any("exponential histogram" in reason for reason in found.reasons)
