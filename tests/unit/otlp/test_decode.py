"""Decoding requests to columns."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from penstock.errors import InvalidInput, LimitExceeded, Unsupported
from penstock.otlp import Decoded, Signal, check_installed, count_items, decode, encode, schema_of, split
from penstock.otlp.messages import handler_of, messages_of, parse
from penstock.otlp.schema import ARRAY, BOOL, BYTES, DOUBLE, EMPTY, INT, MAP, OTHER, STR
from penstock.protowire import varint
from penstock.testing.otlp_kit import telemetry


def traces() -> tuple[ExportTraceServiceRequest, object]:
    request = ExportTraceServiceRequest()
    return request, request.resource_spans.add().scope_spans.add().spans.add()


def decoded(request: object, signal: Signal = Signal.TRACES) -> Decoded:
    return decode(request.SerializeToString(), signal)  # type: ignore[attr-defined]


def test_every_kind_of_value_has_its_column() -> None:
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add()
    values = {
        "text": AnyValue(string_value="x"),
        "flag": AnyValue(bool_value=True),
        "whole": AnyValue(int_value=-(2**63)),
        "real": AnyValue(double_value=0.5),
        "bytes": AnyValue(bytes_value=b"\x00\xff"),
        "array": AnyValue(array_value={"values": [{"int_value": 1}]}),
        "map": AnyValue(kvlist_value={"values": [{"key": "k", "value": {"bool_value": False}}]}),
        "nothing": AnyValue(),
    }
    for key, value in values.items():
        record.attributes.add(key=key).value.CopyFrom(value)
    record.attributes.add(key="alone")
    row = dict(decoded(request, Signal.LOGS).batch.column("attributes").to_pylist()[0])
    kinds = {key: None if value is None else value["type"] for key, value in row.items()}
    assert kinds == {
        "text": STR,
        "flag": BOOL,
        "whole": INT,
        "real": DOUBLE,
        "bytes": BYTES,
        "array": ARRAY,
        "map": MAP,
        "nothing": EMPTY,
        "alone": None,
    }
    assert (row["text"]["str"], row["flag"]["bool"], row["whole"]["int"]) == ("x", True, -(2**63))
    assert (row["real"]["double"], row["bytes"]["bytes"]) == (0.5, b"\x00\xff")
    assert AnyValue.FromString(row["array"]["ser"]) == values["array"]
    assert AnyValue.FromString(row["map"]["ser"]) == values["map"]


@pytest.mark.parametrize(
    ("field", "column"),
    [("bool_value", "bool"), ("int_value", "int"), ("double_value", "double"), ("string_value", "str")],
)
def test_an_explicit_zero_is_not_an_unset_value(field: str, column: str) -> None:
    request, span = traces()
    span.attributes.add(key="zero").value.MergeFrom(AnyValue(**{field: type(getattr(AnyValue(), field))()}))
    span.attributes.add(key="unset").value.SetInParent()
    (_, zero), (_, unset) = decoded(request).batch.column("attributes").to_pylist()[0]
    assert zero[column] is not None
    assert zero["type"] != EMPTY
    assert unset == dict.fromkeys(unset) | {"type": EMPTY}


def test_a_duplicate_key_is_kept_in_order() -> None:
    request, span = traces()
    for number in (2, 1):
        span.attributes.add(key="k").value.int_value = number
    row = decoded(request).batch.column("attributes").to_pylist()[0]
    assert [(key, value["int"]) for key, value in row] == [("k", 2), ("k", 1)]


def test_empty_ids_and_times_of_zero_are_null() -> None:
    request, _ = traces()
    row = decoded(request).batch.to_pylist()[0]
    names = ("trace_id", "span_id", "parent_span_id", "start_time", "end_time", "duration_ns")
    assert {row[name] for name in names} == {None}


def test_a_status_a_resource_and_a_scope_that_are_missing_differ_from_empty_ones() -> None:
    request, span = traces()
    names = ("status_code", "resource_dropped_attributes_count", "scope_name")
    row = decoded(request).batch.to_pylist()[0]
    assert [row[name] for name in names] == [None, None, None]
    span.status.SetInParent()
    request.resource_spans[0].resource.SetInParent()
    request.resource_spans[0].scope_spans[0].scope.SetInParent()
    row = decoded(request).batch.to_pylist()[0]
    assert [row[name] for name in names] == [0, 0, ""]


def test_the_service_name_is_extracted_from_the_resource() -> None:
    request = ExportTraceServiceRequest()
    for name in ("cart", None, "cart", 7):
        resource = request.resource_spans.add()
        resource.scope_spans.add().spans.add()
        resource.resource.attributes.add(key="host.name").value.string_value = "node"
        if isinstance(name, str):
            resource.resource.attributes.add(key="service.name").value.string_value = name
        elif name is not None:
            resource.resource.attributes.add(key="service.name").value.int_value = name
    column = decoded(request).batch.column("service_name")
    assert column.type == pa.dictionary(pa.int32(), pa.string())
    assert column.to_pylist() == ["cart", None, "cart", None]


def test_the_body_of_a_log_is_also_converted_to_text() -> None:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    records.add().body.string_value = "hello"
    records.add().body.int_value = 7
    records.add().body.bool_value = False
    records.add().body.array_value.values.add().string_value = "ü"
    pair = records.add().body.kvlist_value.values.add(key="k")
    pair.value.double_value = 0.5
    records.add().body.bytes_value = b"\x00"
    records.add().body.SetInParent()
    records.add()
    texts = decoded(request, Signal.LOGS).batch.column("body").to_pylist()
    assert texts == ["hello", "7", "false", '["ü"]', '{"k":0.5}', "AA==", None, None]


def test_metrics_have_a_row_for_every_point() -> None:
    request = ExportMetricsServiceRequest()
    metrics = request.resource_metrics.add().scope_metrics.add().metrics
    metrics.add(name="h").histogram.data_points.add(count=3, bucket_counts=[1, 2], explicit_bounds=[5.0])
    gauge = metrics.add(name="g").gauge
    gauge.data_points.add(as_int=0)
    gauge.data_points.add(as_double=0.0)
    gauge.data_points.add()
    metrics.add(name="s").sum.data_points.add(as_int=2**63 - 1)
    metrics[-1].sum.is_monotonic = True
    metrics.add(name="q").summary.data_points.add(count=1, quantile_values=[{"quantile": 0.5, "value": 2.0}])
    metrics.add(name="nothing")
    batch = decoded(request, Signal.METRICS).batch
    rows = batch.select(["name", "type", "value_int", "value_double", "count", "is_monotonic"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("h", "histogram", None, None, 3, None),
        ("g", "gauge", 0, None, None, None),
        ("g", "gauge", None, 0.0, None, None),
        ("g", "gauge", None, None, None, None),
        ("s", "sum", 2**63 - 1, None, None, True),
        ("q", "summary", None, None, 1, None),
    ]
    assert batch.column("bucket_counts").to_pylist() == [[1, 2], None, None, None, None, None]
    assert batch.column("quantiles").to_pylist()[-1] == [{"quantile": 0.5, "value": 2.0}]


def test_spans_with_ids_of_a_wrong_length_are_refused_and_the_others_kept() -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    spans.add(name="good", trace_id=bytes(16), span_id=bytes(8))
    spans.add(name="long", trace_id=bytes(17), span_id=bytes(8))
    spans.add(name="short", trace_id=bytes(16), span_id=bytes(7))
    spans.add(name="link").links.add(trace_id=bytes(24))
    spans.add(name="last")
    found = decoded(request)
    assert found.batch.column("name").to_pylist() == ["good", "last"]
    assert (found.items, found.rejected) == (2, 3)
    assert found.message == "3 spans refused: trace_id has 17 bytes, expected 16"


def test_points_with_a_wrong_id_in_an_exemplar_are_refused() -> None:
    request = ExportMetricsServiceRequest()
    points = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m").gauge.data_points
    points.add(as_int=1).exemplars.add(span_id=bytes(3))
    points.add(as_int=2).exemplars.add(span_id=bytes(8))
    found = decoded(request, Signal.METRICS)
    assert found.batch.column("value_int").to_pylist() == [2]
    assert found.message == "1 data points refused: span_id of an exemplar has 3 bytes, expected 8"


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("data", [b"", b"\n\x00", b"\n\x02\x12\x00"])
def test_a_request_without_items_is_an_empty_batch(signal: Signal, data: bytes) -> None:
    found = decode(data, signal)
    assert (found.batch.num_rows, found.rejected) == (0, 0)
    assert found.batch.schema == schema_of(signal)
    assert encode(found.batch, signal) == b""
    assert split(found.batch, signal, 10) == [b""]


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\n\x05ab", b"hello, world", b"\n\x04\x1a\x02\xff\xfe"])
def test_bytes_that_are_not_a_request_are_invalid_input(signal: Signal, data: bytes) -> None:
    with pytest.raises(InvalidInput, match="the body is not an Export"):
        decode(data, signal)


def test_values_nested_deeper_than_the_protocol_reads_are_invalid_input() -> None:
    value = AnyValue(int_value=1)
    for _ in range(120):
        outer = AnyValue()
        outer.array_value.values.add().CopyFrom(value)
        value = outer
    inner = value.SerializeToString()

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(data)) + data

    body = field(1, field(2, field(2, field(9, field(2, inner)))))
    with pytest.raises(InvalidInput):
        decode(body, Signal.TRACES)


def test_a_resource_repeated_beyond_a_bundle_is_refused_before_it_is_built() -> None:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="big").value.string_value = "x" * (1 << 20)
    spans = resource.scope_spans.add().spans
    for _ in range(300):
        spans.add()
    with pytest.raises(LimitExceeded, match="send fewer items"):
        decoded(request)


@pytest.mark.parametrize("signal", list(Signal))
def test_realistic_telemetry_is_the_same_after_a_round_trip(signal: Signal) -> None:
    data = telemetry(signal, items=50, resources=5)
    found = decode(data, signal)
    assert found.items == count_items(data, signal) == 50
    assert parse(encode(found.batch, signal), signal) == parse(data, signal)


def test_a_time_after_2262_survives_a_round_trip() -> None:
    request, span = traces()
    span.start_time_unix_nano, span.end_time_unix_nano = 2**64 - 1, 2**63
    batch = decoded(request).batch
    assert parse(encode(batch, Signal.TRACES), Signal.TRACES) == request


def test_threads_decode_and_encode_concurrently() -> None:
    def work(seed: int) -> bool:
        signal = list(Signal)[seed % 3]
        data = telemetry(signal, items=20, seed=seed)
        return parse(encode(decode(data, signal).batch, signal), signal) == parse(data, signal)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def negative_zeros() -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    metrics = request.resource_metrics.add().scope_metrics.add().metrics
    for zero in (0.0, -0.0):
        metrics.add().summary.data_points.add(sum=zero, quantile_values=[{"quantile": zero, "value": zero}])
        metrics.add().exponential_histogram.data_points.add(zero_threshold=zero, sum=zero, min=zero)
        metrics.add().gauge.data_points.add(as_double=zero)
    return request


def test_a_negative_zero_survives_a_round_trip() -> None:
    data = negative_zeros().SerializeToString()
    batch = decode(data, Signal.METRICS).batch
    assert encode(batch, Signal.METRICS) == data
    assert batch.column("zero_threshold").to_pylist() == [None, 0.0, None, None, 0.0, None]


def test_a_reference_to_a_string_is_kept_as_a_value_of_another_kind() -> None:
    request, span = traces()
    span.attributes.add(key="k").value.string_value_strindex = 7
    batch = decoded(request).batch
    ((_, value),) = batch.column("attributes").to_pylist()[0]
    assert (value["type"], AnyValue.FromString(value["ser"])) == (OTHER, AnyValue(string_value_strindex=7))
    assert parse(encode(batch, Signal.TRACES), Signal.TRACES) == request


def test_unknown_fields_do_not_confuse_a_request_with_refused_items() -> None:
    request, span = traces()
    span.trace_id = bytes(3)
    good = request.resource_spans[0].scope_spans[0].spans.add(name="good")
    good.ParseFromString(good.SerializeToString() + b"\xfa\x07\x03new")
    found = decoded(request)
    assert (found.batch.column("name").to_pylist(), found.rejected) == (["good"], 1)


@pytest.mark.parametrize("missing", ["ptars", "opentelemetry.proto.collector.logs.v1"])
def test_a_missing_extra_is_reported_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    handler_of.cache_clear()
    messages_of.cache_clear()
    with pytest.raises(Unsupported, match=rf"OTLP needs the package {missing}.*penstock\[collector\]"):
        check_installed()
