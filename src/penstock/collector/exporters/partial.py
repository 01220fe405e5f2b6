"""What an OTLP response says about items that were refused. Pure."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from penstock.collector.outcome import Outcome, delivered
from penstock.otlp.schema import Signal

__all__ = ["outcome_of_response"]

_TAKEN = delivered()


def outcome_of_response(data: bytes, signal: Signal) -> Outcome:
    """An answer of success, with or without refusals. One that cannot be read is still a success."""
    if not data:
        return _TAKEN
    try:
        rejected, message = _partial(data, signal)
    except DecodeError:
        return _TAKEN
    return delivered(rejected_items=rejected, message=message) if rejected or message else _TAKEN


def _partial(data: bytes, signal: Signal) -> tuple[int, str]:
    if signal is Signal.TRACES:
        spans = ExportTraceServiceResponse.FromString(data).partial_success
        return spans.rejected_spans, spans.error_message
    if signal is Signal.METRICS:
        points = ExportMetricsServiceResponse.FromString(data).partial_success
        return points.rejected_data_points, points.error_message
    records = ExportLogsServiceResponse.FromString(data).partial_success
    return records.rejected_log_records, records.error_message
