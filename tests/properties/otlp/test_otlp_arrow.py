"""OTLP to Arrow and back is lossless, and the columns equal those of the message-by-message oracle."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.mutations import Change, changes, mutated
from tests.properties.otlp.telemetry_items import items
from tests.unit.otlp.oracle.arrow_to_proto_py import arrow_to_proto_py
from tests.unit.otlp.oracle.proto_to_arrow_py import proto_to_arrow_py

from penstock.errors import InvalidInput, LimitExceeded
from penstock.otlp import Signal, count_items, decode, encode, from_json, split, to_json, view, view_schema
from penstock.otlp.columns import same
from penstock.otlp.messages import parse
from penstock.otlp.to_arrow import proto_to_arrow
from penstock.testing.otlp_kit import random_request, telemetry

SIGNALS = list(Signal)
CHANGES = changes(("flip", "set", "cut", "insert", "double", "u32"), (2**31, 2**32 - 1), most=4)
seeds = st.integers(0, 2**32 - 1)


def request_of(seed: int, signal: Signal, *, bad_ids: float = 0.0) -> bytes:
    return random_request(random.Random(seed), signal, size=3, bad_ids=bad_ids).SerializeToString()


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds)
@settings(max_examples=150)
def test_a_request_comes_back_as_it_went_in(signal: Signal, seed: int) -> None:
    data = request_of(seed, signal)
    decoded = decode(data, signal)
    decoded.batch.validate(full=True)
    assert (decoded.items, decoded.rejected, decoded.message) == (count_items(data, signal), 0, "")
    assert items(encode(decoded.batch, signal), signal) == items(data, signal)


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds)
@settings(max_examples=150)
def test_decoding_equals_the_oracle_in_every_column(signal: Signal, seed: int) -> None:
    data = request_of(seed, signal)
    decoded, expected = proto_to_arrow(data, signal), proto_to_arrow_py(parse(data, signal), signal).batch
    decoded.validate(full=True)
    assert decoded.schema == expected.schema
    assert_same_rows(decoded, expected)


def assert_same_rows(batch: pa.RecordBatch, expected: pa.RecordBatch) -> None:
    assert batch.num_rows == expected.num_rows
    for name in batch.schema.names:
        assert same(batch.column(name), expected.column(name)).all(), name


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, start=st.integers(0, 3))
@settings(max_examples=100)
def test_encoding_equals_the_oracle_byte_for_byte(signal: Signal, seed: int, start: int) -> None:
    batch = decode(request_of(seed, signal), signal).batch.slice(start)
    assert encode(batch, signal) == arrow_to_proto_py(batch, signal).SerializeToString()


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds)
@settings(max_examples=60)
def test_items_with_wrong_ids_are_refused_and_the_rest_is_kept(signal: Signal, seed: int) -> None:
    data = request_of(seed, signal, bad_ids=0.3)
    decoded = decode(data, signal)
    expected = proto_to_arrow_py(parse(data, signal), signal)
    assert_same_rows(decoded.batch, expected.batch)
    assert (decoded.rejected, decoded.message) == (expected.refusals.count, expected.refusals.message)
    assert decoded.items == decoded.batch.num_rows
    assert decoded.items + decoded.rejected == count_items(data, signal)
    assert bool(decoded.message) == bool(decoded.rejected)
    kept = items(encode(decoded.batch, signal), signal)
    sent = iter(items(data, signal))
    assert all(item in sent for item in kept), "what is kept is a part of what was sent, in its order"


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds)
@settings(max_examples=60)
def test_json_says_the_same_as_protobuf(signal: Signal, seed: int) -> None:
    data = request_of(seed, signal)
    assert items(from_json(to_json(data, signal), signal), signal) == items(data, signal)


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, limit=st.integers(1, 5000))
@settings(max_examples=40)
def test_the_parts_of_a_split_are_the_whole_in_order(signal: Signal, seed: int, limit: int) -> None:
    data = request_of(seed, signal)
    parts = split(decode(data, signal).batch, signal, limit)
    assert [item for part in parts for item in items(part, signal)] == items(data, signal)
    assert all(len(part) <= limit or count_items(part, signal) <= 1 for part in parts)


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, hex_ids=st.booleans(), start=st.integers(0, 5))
@settings(max_examples=60)
def test_a_view_has_its_schema_and_a_row_for_each(
    signal: Signal, seed: int, hex_ids: bool, start: int
) -> None:
    batch = decode(request_of(seed, signal), signal).batch
    shown = view(batch, hex_ids=hex_ids)
    shown.validate(full=True)
    assert shown.schema == view_schema(signal, hex_ids=hex_ids)
    part = view(batch.slice(start), hex_ids=hex_ids)
    part.validate(full=True)
    for name in shown.schema.names:
        assert same(part.column(name), shown.column(name).slice(start)).all(), name


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, start=st.integers(0, 5), length=st.integers(0, 5))
@settings(max_examples=40)
def test_a_part_of_a_batch_encodes_as_that_part(signal: Signal, seed: int, start: int, length: int) -> None:
    data = request_of(seed, signal)
    batch = decode(data, signal).batch
    assert items(encode(batch.slice(start, length), signal), signal) == items(data, signal)[start:][:length]


def everything_about(data: bytes, signal: Signal) -> None:
    decoded = decode(data, signal)
    decoded.batch.validate(full=True)
    assert decoded.items + decoded.rejected == count_items(data, signal)
    view(decoded.batch).validate(full=True)
    again = decode(encode(decoded.batch, signal), signal)
    for name in again.batch.schema.names:
        assert same(again.batch.column(name), decoded.batch.column(name)).all(), name


@pytest.mark.parametrize("signal", SIGNALS)
@given(data=st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_decode_or_are_invalid_input(signal: Signal, data: bytes) -> None:
    try:
        everything_about(data, signal)
    except InvalidInput:
        pass


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, change=CHANGES)
@settings(max_examples=300)
def test_changed_bytes_decode_or_are_invalid_input(signal: Signal, seed: int, change: list[Change]) -> None:
    try:
        everything_about(mutated(request_of(seed, signal), change), signal)
    except (InvalidInput, LimitExceeded):
        pass


@pytest.mark.parametrize("signal", SIGNALS)
@given(seed=seeds, change=CHANGES)
@settings(max_examples=150)
def test_changed_bytes_decode_as_the_oracle_decodes_them(
    signal: Signal, seed: int, change: list[Change]
) -> None:
    data = mutated(request_of(seed, signal), change)
    try:
        expected = proto_to_arrow_py(parse(data, signal), signal).batch
    except (InvalidInput, LimitExceeded):
        return
    assert_same_rows(decode(data, signal).batch, expected)


@pytest.mark.parametrize("signal", SIGNALS)
@given(data=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(max_examples=200)
def test_any_text_is_a_request_in_json_or_invalid_input(signal: Signal, data: bytes) -> None:
    try:
        parse(from_json(data, signal), signal)
    except InvalidInput:
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "traceId", "spanId", "attributes", "key", "value"]
                + [
                    "stringValue",
                    "intValue",
                    "arrayValue",
                    "values",
                    "kind",
                    "startTimeUnixNano",
                    "links",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(tree=json_values)
@settings(max_examples=300)
def test_any_json_is_a_request_or_invalid_input(tree: object) -> None:
    try:
        parse(from_json(json.dumps(tree).encode(), Signal.TRACES), Signal.TRACES)
    except InvalidInput:
        pass


@pytest.mark.parametrize("signal", SIGNALS)
def test_realistic_telemetry_comes_back_as_it_went_in(signal: Signal) -> None:
    data = telemetry(signal, items=300, seed=3)
    batch = decode(data, signal).batch
    assert items(encode(batch, signal), signal) == items(data, signal)
    assert arrow_to_proto_py(batch, signal) == parse(data, signal)
