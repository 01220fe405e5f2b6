"""The limit for tiny parts: two bytes can be an attribute, a link or an event, hundreds when decoded."""

from __future__ import annotations

import pytest

from penstock import otlp
from penstock.errors import LimitExceeded
from penstock.otlp.limits import SMALL_PARTS_MAX, check_density
from penstock.otlp.schema import Signal
from penstock.protowire import varint
from penstock.testing.otlp_kit import telemetry


def field(tag: bytes, inner: bytes) -> bytes:
    return tag + varint(len(inner)) + inner


def span_of(part: bytes, count: int) -> bytes:
    return field(b"\x0a", field(b"\x12", field(b"\x12", part * count)))


@pytest.mark.parametrize(
    "part",
    [b"\x4a\x00", b"\x5a\x00", b"\x6a\x00", b"\xca\x00\x80\x00", b"\x4a\x80\x00", b"\x4a\x03\x0a\x01a"],
    ids=["attribute", "event", "link", "padded", "padded length", "one letter"],
)
def test_many_tiny_parts_are_refused_in_every_encoding(part: bytes) -> None:
    check_density(span_of(part, 900), most=2000)
    with pytest.raises(LimitExceeded, match="very small parts"):
        check_density(span_of(part, 2100), most=2000)


@pytest.mark.parametrize("signal", Signal)
def test_a_real_request_of_the_largest_size_is_far_from_the_cap(signal: Signal) -> None:
    data = telemetry(signal, items=500)
    check_density(data, most=SMALL_PARTS_MAX * len(data) // (64 << 20))


def test_a_hostile_request_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(LimitExceeded, match="very small parts"):
        otlp.decode(span_of(b"\x6a\x00", SMALL_PARTS_MAX + 100), Signal.TRACES)


def test_json_of_very_many_values_is_refused_before_it_is_parsed() -> None:
    body = b'{"x":[' + b"{}," * (SMALL_PARTS_MAX + 10) + b"{}]}"
    with pytest.raises(LimitExceeded, match="very small parts"):
        otlp.from_json(body, Signal.TRACES)
