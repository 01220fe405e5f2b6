"""Encoding columns to requests, as a whole and in parts."""

from __future__ import annotations

import pyarrow as pa
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from penstock.errors import InvalidInput
from penstock.otlp import Signal, count_items, decode, encode, response, schema_of, split
from penstock.otlp.columns import changes, same
from penstock.otlp.messages import messages_of, parse
from penstock.otlp.schema import ARRAY, INT, MAP, STR
from penstock.testing.otlp_kit import telemetry


@pytest.mark.parametrize("signal", list(Signal))
def test_rows_of_one_resource_share_it_when_encoded(signal: Signal) -> None:
    data = telemetry(signal, items=40, resources=4)
    once = decode(data, signal).batch
    twice = pa.Table.from_batches([once.slice(0, 10), once.slice(0, 10)]).combine_chunks().to_batches()[0]
    request = parse(encode(twice, signal), signal)
    (groups,) = (field for _, field in request.ListFields())
    assert len(groups) == 1
    assert count_items(request.SerializeToString(), signal) == 20


def test_a_batch_of_another_signal_is_refused_by_the_column_that_is_missing() -> None:
    batch = decode(telemetry(Signal.LOGS, items=1), Signal.LOGS).batch
    with pytest.raises(InvalidInput, match="the batch has no column parent_span_id"):
        encode(batch, Signal.TRACES)


def test_a_column_of_another_type_is_refused() -> None:
    batch = decode(telemetry(Signal.LOGS, items=1), Signal.LOGS).batch
    place = batch.schema.get_field_index("flags")
    changed = batch.set_column(place, "flags", pa.array(["x"]))
    with pytest.raises(InvalidInput, match="column flags is string, expected uint32"):
        encode(changed, Signal.LOGS)


def test_the_service_name_may_be_plain_text() -> None:
    batch = decode(telemetry(Signal.LOGS, items=3), Signal.LOGS).batch
    place = batch.schema.get_field_index("service_name")
    plain = batch.set_column(place, "service_name", batch.column(place).dictionary_decode())
    assert encode(plain, Signal.LOGS) == encode(batch, Signal.LOGS)


@pytest.mark.parametrize("signal", list(Signal))
def test_a_split_keeps_every_part_under_the_limit(signal: Signal) -> None:
    batch = decode(telemetry(signal, items=200), signal).batch
    whole = encode(batch, signal)
    assert split(batch, signal, len(whole)) == [whole]
    parts = split(batch, signal, len(whole) // 5)
    assert len(parts) >= 5
    assert all(len(part) <= len(whole) // 5 for part in parts)
    assert sum(count_items(part, signal) for part in parts) == 200


def test_an_item_over_the_limit_is_sent_alone() -> None:
    batch = decode(telemetry(Signal.LOGS, items=3, resources=1), Signal.LOGS).batch
    parts = split(batch, Signal.LOGS, 1)
    assert [count_items(part, Signal.LOGS) for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("signal", list(Signal))
def test_a_response_is_empty_when_everything_was_accepted(signal: Signal) -> None:
    assert response(signal, 0, "") == b""
    assert response(signal, json=True) == b"{}"


@pytest.mark.parametrize("signal", list(Signal))
def test_a_response_has_the_number_and_reason_of_refusals(signal: Signal) -> None:
    answer = messages_of(signal).response.FromString(response(signal, 3, "bad ids"))
    fields = {field.name: value for field, value in answer.partial_success.ListFields()}
    assert sorted(map(str, fields.values())) == ["3", "bad ids"]
    assert b'"3"' in response(signal, 3, "bad ids", json=True)


def test_a_warning_alone_refuses_nothing() -> None:
    answer = messages_of(Signal.LOGS).response.FromString(response(Signal.LOGS, 0, "slow down"))
    assert answer.partial_success.rejected_log_records == 0
    assert answer.partial_success.error_message == "slow down"


@pytest.mark.parametrize("signal", list(Signal))
def test_the_golden_schema_matches_decode(signal: Signal) -> None:
    assert decode(telemetry(signal, items=1), signal).batch.schema == schema_of(signal)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ([1.0], [1.0], True),
        ([float("nan")], [float("nan")], True),
        ([0.0], [-0.0], False),
        ([None, 1.0], [None, 1.0], True),
        ([None], [0.0], False),
        ([[1, None]], [[1, None]], True),
        ([[1]], [[1, 1]], False),
        ([[], [1]], [None, [1]], False),
        ([{"a": None}, {"a": 1}], [None, {"a": 1}], False),
        ([{"a": "x"}], [{"a": "x"}], True),
    ],
)
def test_rows_are_equal_when_no_value_differs(left: list[object], right: list[object], equal: bool) -> None:
    kind = pa.array([*left, *right]).type
    assert bool(same(pa.array(left, kind), pa.array(right, kind))[0]) is equal


def test_changes_are_found_row_by_row_even_in_a_slice() -> None:
    maps = pa.array([[("a", 1)], [("a", 1)], [("a", 2)], None, None, []], pa.map_(pa.string(), pa.int64()))
    assert changes([maps]).tolist() == [True, False, True, True, False, True]
    assert changes([maps.slice(1)]).tolist() == [True, True, True, False, True]


def with_value(**cells: object) -> pa.RecordBatch:
    """Return a log record with one attribute whose value has these cells."""
    batch = decode(telemetry(Signal.LOGS, items=1), Signal.LOGS).batch
    attributes = pa.array([[("k", cells)]], schema_of(Signal.LOGS).field("attributes").type)
    return batch.set_column(batch.schema.get_field_index("attributes"), "attributes", attributes)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"type": STR}, "a value has the type 1, but its column str is null"),
        ({"type": ARRAY, "ser": b"\xff"}, "the column ser of a value is not an AnyValue"),
        ({"type": MAP, "ser": AnyValue(int_value=1).SerializeToString()}, "contains a int_value"),
    ],
)
def test_a_value_that_contradicts_its_type_is_refused(cells: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        encode(with_value(**cells), Signal.LOGS)


def test_cells_of_other_types_than_the_value_are_ignored() -> None:
    request = parse(encode(with_value(type=INT, int=5, str="x"), Signal.LOGS), Signal.LOGS)
    (pair,) = request.resource_logs[0].scope_logs[0].log_records[0].attributes
    assert pair.value == AnyValue(int_value=5)


def test_values_of_null_rows_are_not_encoded() -> None:
    batch = decode(telemetry(Signal.LOGS, items=2), Signal.LOGS).batch
    place = batch.schema.get_field_index("attributes")
    column = batch.column(place)
    masked = pa.MapArray.from_arrays(
        column.offsets, column.keys, column.items, type=column.type, mask=pa.array([True, False])
    )
    request = parse(encode(batch.set_column(place, "attributes", masked), Signal.LOGS), Signal.LOGS)
    first, second = (
        record
        for resource in request.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    )
    assert (len(first.attributes), bool(second.attributes)) == (0, True)


def test_a_metric_of_an_unknown_type_is_refused() -> None:
    batch = decode(telemetry(Signal.METRICS, items=1), Signal.METRICS).batch
    changed = batch.set_column(batch.schema.get_field_index("type"), "type", pa.array(["trend"]))
    with pytest.raises(InvalidInput, match="a metric cannot be of type 'trend'; expected one of gauge, sum"):
        encode(changed, Signal.METRICS)
