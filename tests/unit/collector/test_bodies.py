"""Requests and addresses: framing, compression, listening addresses and endpoints."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

from penstock.collector.batcher import check_framing
from penstock.collector.receiver_http import inflate
from penstock.collector.settings import Address, is_loopback, parse_address, parse_endpoint
from penstock.errors import ConfigError, InvalidInput, LimitExceeded, Unsupported
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

DATA = b"penstock " * 10_000
PACKED = {
    "gzip": gzip.compress(DATA),
    "deflate": zlib.compress(DATA),
    "zstd": zstandard.compress(DATA),
    "identity": DATA,
    "": DATA,
}


@pytest.mark.parametrize("signal", Signal)
def test_a_real_request_has_a_field_for_each_resource(signal: Signal) -> None:
    assert check_framing(telemetry(signal, items=30, resources=3)) == 3


def test_an_empty_request_has_none() -> None:
    assert check_framing(b"") == 0


def test_a_truncated_request_is_refused() -> None:
    data = telemetry(Signal.LOGS, items=2, resources=1)
    for end in range(1, len(data)):
        with pytest.raises(InvalidInput):
            check_framing(data[:end])


@pytest.mark.parametrize("data", [b"\x00", b"\x0b\x00", b"hello world", b"\x08\x01", b"\xff" * 40, b"{}"])
def test_garbage_is_not_a_request(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        check_framing(data)


@pytest.mark.parametrize("encoding", PACKED)
def test_every_encoding_is_decoded(encoding: str) -> None:
    assert inflate(PACKED[encoding], encoding, len(DATA)) == DATA


@pytest.mark.parametrize("encoding", PACKED)
def test_one_byte_above_the_cap_is_too_much(encoding: str) -> None:
    with pytest.raises(LimitExceeded):
        inflate(PACKED[encoding], encoding, len(DATA) - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_a_truncated_body_is_refused(encoding: str, cut: int) -> None:
    with pytest.raises(InvalidInput):
        inflate(PACKED[encoding][:cut], encoding, len(DATA))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_garbage_after_a_body_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidInput):
        inflate(PACKED[encoding] + b"garbage", encoding, 10 * len(DATA))


def test_two_gzip_members_are_one_body() -> None:
    assert inflate(PACKED["gzip"] * 2, "gzip", 2 * len(DATA)) == DATA * 2


def test_a_bomb_stops_at_the_cap() -> None:
    bomb = gzip.compress(bytes(200_000_000), 9)
    with pytest.raises(LimitExceeded):
        inflate(bomb, "gzip", 1_000_000)


def test_an_unknown_encoding_names_those_that_are_known() -> None:
    with pytest.raises(Unsupported, match="deflate, gzip, identity, zstd"):
        inflate(b"", "br", 10)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:4317", Address("127.0.0.1", 4317)), ("[::1]:1", Address("::1", 1))],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["4317", ":4317", "host", "host:99999", "host:x"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["ftp://x", "http://user:pw@host", "http://host?q", "http://host:x"])
def test_invalid_endpoints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)
    assert "pw" not in str(caught.value)


def test_an_endpoint_may_have_a_path_and_a_default_port() -> None:
    assert str(parse_endpoint("https://host/otlp/", 4318)) == "https://host:4318/otlp"
    assert parse_endpoint("host:1").target == "host:1"


@pytest.mark.parametrize(
    ("listening", "endpoint", "loops"),
    [
        ("127.0.0.1:4318", "http://127.0.0.1:4318", True),
        ("127.0.0.1:4318", "http://localhost:4318", True),
        ("0.0.0.0:4318", "http://127.0.0.1:4318", True),
        ("127.0.0.1:4318", "http://127.0.0.1:4317", False),
        ("127.0.0.1:4318", "http://192.0.2.1:4318", False),
    ],
)
def test_an_endpoint_that_reaches_our_own_address_is_recognised(
    listening: str, endpoint: str, loops: bool
) -> None:
    assert parse_address(listening).is_reached_by(parse_endpoint(endpoint)) is loops


def test_loopback() -> None:
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
