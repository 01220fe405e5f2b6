"""The rows as read by other engines."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.otlp import Signal, decode, view, view_schema
from penstock.testing.otlp_kit import telemetry


def span_view(*, hex_ids: bool = True) -> dict[str, object]:
    request = ExportTraceServiceRequest()
    span = (
        request.resource_spans.add()
        .scope_spans.add()
        .spans.add(trace_id=bytes(range(16)), start_time_unix_nano=1_000_001_999, flags=2**32 - 1)
    )
    span.attributes.add(key="n").value.int_value = 5
    span.attributes.add(key="list").value.array_value.values.add().int_value = 1
    span.events.add(name="e").attributes.add(key="ok").value.bool_value = True
    batch = decode(request.SerializeToString(), Signal.TRACES).batch
    row: dict[str, object] = view(batch, hex_ids=hex_ids).to_pylist()[0]
    return row


def test_attributes_become_text_under_a_new_name() -> None:
    row = span_view()
    assert row["attributes_text"] == [("n", "5"), ("list", "[1]")]
    assert row["events"][0]["attributes_text"] == [("ok", "true")]  # type: ignore[index]
    assert "attributes" not in row


def test_ids_are_hexadecimal_or_binary_and_null_when_missing() -> None:
    assert span_view()["trace_id"] == bytes(range(16)).hex()
    assert span_view(hex_ids=False)["trace_id"] == bytes(range(16))
    assert span_view()["span_id"] is None


def test_times_are_truncated_to_microseconds_and_unsigned_numbers_become_signed() -> None:
    row = span_view()
    assert row["start_time"] == datetime.datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=datetime.UTC)
    assert row["flags"] == 2**32 - 1
    assert view_schema(Signal.TRACES).field("flags").type == pa.int64()


def test_a_count_beyond_int64_becomes_its_largest_value() -> None:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add()
    metric.histogram.data_points.add(count=2**64 - 1, bucket_counts=[2**63, 1])
    row = view(decode(request.SerializeToString(), Signal.METRICS).batch).to_pylist()[0]
    assert row["count"] == 2**63 - 1
    assert row["bucket_counts"] == [2**63 - 1, 1]


@pytest.mark.parametrize("signal", list(Signal))
def test_the_view_of_a_slice_is_the_slice_of_the_view(signal: Signal) -> None:
    batch = decode(telemetry(signal, items=30), signal).batch
    assert view(batch.slice(7, 11)).to_pylist() == view(batch).to_pylist()[7:18]


@pytest.mark.parametrize("signal", list(Signal))
def test_parquet_and_duckdb_read_a_view(signal: Signal, tmp_path: object) -> None:
    import duckdb
    import pyarrow.parquet as pq

    table = pa.Table.from_batches([view(decode(telemetry(signal, items=30), signal).batch)])
    path = f"{tmp_path}/{signal}.parquet"
    pq.write_table(table, path)
    assert pq.read_table(path).num_rows == 30
    query = f"select attributes_text['sampled'] as sampled, count(*) from '{path}' group by all order by all"
    assert duckdb.sql(query).fetchall() == [("false", 15), ("true", 15)]
