"""Telemetry in a queue, read as tables by a pipeline: requests, Arrow streams, and other records."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.spark.conftest import Plant
from tests.spark.test_pipeline import rows, run

from penstock.errors import ConfigError
from penstock.otlp import Signal, decode
from penstock.spark.pipeline.spec import DecodeSpec
from penstock.testing.otlp_kit import telemetry


def stream_of(data: bytes, signal: Signal) -> bytes:
    """Return the record that the collector's buffer exporter writes by default."""
    batch = decode(data, signal).batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(memoryview(sink.getvalue()))


def test_spans_arrive_whether_as_requests_or_as_arrow_and_the_rest_is_kept_with_a_reason(
    plant: Plant,
) -> None:
    wrong = ExportTraceServiceRequest()
    wrong.resource_spans.add().scope_spans.add().spans.add(trace_id=b"short")
    records = [
        telemetry(Signal.TRACES, items=30, seed=1),
        stream_of(telemetry(Signal.TRACES, items=20, seed=2), Signal.TRACES),
        b"",
        b"no telemetry",
        wrong.SerializeToString(),
        stream_of(telemetry(Signal.LOGS, items=5), Signal.LOGS),
    ]
    plant.produce([records])
    run(
        plant,
        decode={"format": "otlp", "signal": "traces", "schema": None},
        transform="SELECT service_name, name, start_time, duration_ns, trace_id, attributes_text, events, "
        "attributes_text['http.route'] AS route, _index FROM input",
    )
    table = rows(plant.root / "table")
    assert Counter(row["_index"] for row in table) == {0: 30, 1: 20}
    wanted = decode(records[0], Signal.TRACES).batch
    found = {str(row["trace_id"]): row for row in table}
    for span in wanted.to_pylist():
        row = found[span["trace_id"].hex()]
        assert row["duration_ns"] == span["duration_ns"]
        assert row["service_name"] == span["service_name"]
        assert row["route"] == dict(span["attributes"])["http.route"]["str"]
    letters = rows(plant.root / "table_dead_letters")
    reasons = sorted(str(letter["reason"]) for letter in letters)
    assert len(reasons) == 3
    assert reasons[0].startswith("1 spans refused: trace_id has 5 bytes, expected 16")
    assert reasons[1].startswith("the body is not an ExportTraceServiceRequest")
    assert reasons[2].startswith("the columns are not those of traces: there is no")


@pytest.mark.parametrize("signal", [Signal.METRICS, Signal.LOGS])
def test_metrics_and_logs_arrive_with_every_column(plant: Plant, signal: Signal) -> None:
    plant.produce([[telemetry(signal, items=25)]])
    run(plant, decode={"format": "otlp", "signal": signal.value, "schema": None})
    assert len(rows(plant.root / "table")) == 25


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"format": "otlp"}, "signal: expected traces, metrics or logs"),
        ({"format": "json", "signal": "logs"}, "only with format otlp"),
        ({"format": "otlp", "signal": "logs", "schema": "a int"}, "its columns follow from the signal"),
    ],
)
def test_a_decode_section_that_cannot_work_is_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DecodeSpec(**settings)  # type: ignore[arg-type]
