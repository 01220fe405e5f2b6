"""A few bytes can encode many items, which is detected before they are parsed."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.errors import InvalidInput, LimitExceeded
from penstock.otlp import Signal, count_items, decode
from penstock.otlp.limits import ITEMS_MAX, check_item_count
from penstock.protowire import varint
from penstock.testing.otlp_kit import telemetry


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def empty_items(count: int) -> bytes:
    """Return `count` spans or log records of two bytes each."""
    return field(1, field(2, b"\x12\x00" * count))


@pytest.mark.parametrize("signal", [Signal.TRACES, Signal.LOGS])
def test_a_request_of_nothing_but_empty_items_is_refused_unparsed(signal: Signal) -> None:
    with pytest.raises(LimitExceeded, match="more than 1000000 items"):
        decode(empty_items(ITEMS_MAX + 1), signal)


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("items", [1, 7, 60])
def test_the_cap_counts_exactly(signal: Signal, items: int) -> None:
    data = telemetry(signal, items=items, resources=3)
    check_item_count(data, signal, items)
    with pytest.raises(LimitExceeded):
        check_item_count(data, signal, items - 1)


def test_points_of_one_metric_count_one_by_one() -> None:
    request = ExportMetricsServiceRequest()
    points = request.resource_metrics.add().scope_metrics.add().metrics.add().summary.data_points
    for _ in range(20):
        points.add()
    with pytest.raises(LimitExceeded):
        check_item_count(request.SerializeToString(), Signal.METRICS, 19)


@pytest.mark.parametrize("data", [b"\x12" * 50, b"\x0a\xff\xff", b"\x0a" + b"\xff" * 40, b"\x0b\x12\x12\x12"])
def test_bytes_that_are_not_a_message_are_left_to_the_parser(data: bytes) -> None:
    check_item_count(data, Signal.TRACES, 1)
    with pytest.raises(InvalidInput):
        count_items(data, Signal.TRACES)
