"""OTLP's JSON: ids in hexadecimal, numbers as text or number, unknown fields ignored."""

from __future__ import annotations

import json

import pytest

from penstock.errors import InvalidInput
from penstock.otlp import Signal, decode, from_json, to_json
from penstock.otlp.messages import parse
from penstock.testing.otlp_kit import telemetry

TRACE = "5B8EFFF798038103D269B633813FC60C"
SPAN = "EEE19B7EC3C1B174"


def spans(**span: object) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


def first_span(body: bytes) -> dict[str, object]:
    row: dict[str, object] = decode(from_json(body, Signal.TRACES), Signal.TRACES).batch.to_pylist()[0]
    return row


@pytest.mark.parametrize("trace", [TRACE, TRACE.lower()])
def test_ids_are_hexadecimal_in_any_case(trace: str) -> None:
    row = first_span(spans(traceId=trace, spanId=SPAN, parentSpanId=SPAN, links=[{"traceId": trace}]))
    assert row["trace_id"] == bytes.fromhex(TRACE)
    assert row["span_id"] == row["parent_span_id"] == bytes.fromhex(SPAN)
    assert row["links"][0]["trace_id"] == bytes.fromhex(TRACE)  # type: ignore[index]


def test_ids_of_logs_and_exemplars_are_hexadecimal_too() -> None:
    log = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"traceId": TRACE, "spanId": SPAN}]}]}]}
    rows = decode(from_json(json.dumps(log).encode(), Signal.LOGS), Signal.LOGS).batch.to_pylist()
    assert (rows[0]["trace_id"], rows[0]["span_id"]) == (bytes.fromhex(TRACE), bytes.fromhex(SPAN))
    point = {"asInt": "3", "exemplars": [{"traceId": TRACE, "spanId": SPAN}]}
    metric = {"name": "m", "gauge": {"dataPoints": [point]}}
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    rows = decode(from_json(json.dumps(metrics).encode(), Signal.METRICS), Signal.METRICS).batch.to_pylist()
    assert rows[0]["exemplars"][0]["trace_id"] == bytes.fromhex(TRACE)
    assert rows[0]["value_int"] == 3


def test_an_id_of_a_wrong_length_refuses_its_item_and_no_other() -> None:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "abcd"}, {"traceId": TRACE}]}]}]}
    found = decode(from_json(json.dumps(body).encode(), Signal.TRACES), Signal.TRACES)
    assert (found.items, found.rejected) == (1, 1)
    assert "trace_id has 2 bytes, expected 16" in found.message


def test_an_id_that_is_not_hexadecimal_is_invalid_input() -> None:
    with pytest.raises(InvalidInput, match="traceId: 'xyz' is not hexadecimal"):
        from_json(spans(traceId="xyz"), Signal.TRACES)


def test_an_attribute_named_like_an_id_is_unchanged() -> None:
    attribute = {"key": "traceId", "value": {"stringValue": "not hex at all"}}
    row = first_span(spans(attributes=[attribute]))
    assert row["attributes"][0][1]["str"] == "not hex at all"  # type: ignore[index]


def test_whole_numbers_come_as_text_or_as_numbers_and_enums_as_integers() -> None:
    row = first_span(
        spans(startTimeUnixNano="1544712660000000000", endTimeUnixNano=1544712661000000000, kind=2)
    )
    assert row["duration_ns"] == 10**9
    assert row["kind"] == 2


def test_unknown_fields_are_ignored() -> None:
    assert first_span(spans(name="x", brandNew={"deep": [1, 2]}))["name"] == "x"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"resourceSpans": 1}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"kind": {}}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": -1}]}]}]}',
        b"\xff\xfe",
    ],
)
def test_bytes_that_are_not_a_request_are_invalid_input(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"the body (is not|must be)"):
        from_json(body, Signal.TRACES)


@pytest.mark.parametrize("start", [b"", b'{"resourceSpans":'])
def test_a_body_that_is_nested_too_deeply_is_invalid_input(start: bytes) -> None:
    with pytest.raises(InvalidInput, match="nested more than 128 levels"):
        from_json(start + b"[" * 100_000, Signal.TRACES)


@pytest.mark.parametrize("signal", list(Signal))
def test_json_and_protobuf_convert_to_each_other(signal: Signal) -> None:
    data = telemetry(signal, items=20)
    assert parse(from_json(to_json(data, signal), signal), signal) == parse(data, signal)


def test_json_is_written_with_hexadecimal_ids_and_integer_enums() -> None:
    data = from_json(spans(traceId=TRACE, kind=3), Signal.TRACES)
    tree = json.loads(to_json(data, Signal.TRACES))
    span = tree["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert span == {"traceId": TRACE.lower(), "kind": 3}
