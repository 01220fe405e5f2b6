"""Arbitrary bytes from a client or a destination produce an answer or a refusal, never another error."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.collector.batcher import check_framing
from penstock.collector.graph import parse_urn
from penstock.collector.outcome import Verdict, outcome_of_response
from penstock.collector.receiver_http import inflate
from penstock.collector.settings import parse_address, parse_endpoint
from penstock.collector.status import (
    DETAILS_TRAILER,
    RETRY_TRAILER,
    message_of,
    retry_after_of_trailers,
    retry_after_s,
)
from penstock.errors import ConfigError, InvalidInput, LimitExceeded
from penstock.otlp.messages import messages_of
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

PACK = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress, "identity": bytes}
REQUEST = telemetry(Signal.LOGS, items=3, resources=2)


@given(data=st.binary(max_size=2000), encoding=st.sampled_from(sorted(PACK)))
def test_any_body_is_unpacked_or_refused(data: bytes, encoding: str) -> None:
    try:
        assert len(inflate(data, encoding, 500)) <= 500
    except (InvalidInput, LimitExceeded):
        pass


@given(data=st.binary(max_size=5000), encoding=st.sampled_from(sorted(PACK)), limit=st.integers(0, 6000))
def test_what_was_packed_is_unpacked_up_to_the_cap(data: bytes, encoding: str, limit: int) -> None:
    packed = PACK[encoding](data)
    if len(data) <= limit:
        assert inflate(packed, encoding, limit) == data
    else:
        with pytest.raises(LimitExceeded):
            inflate(packed, encoding, limit)


@given(data=st.binary(max_size=300))
def test_framing_accepts_or_refuses(data: bytes) -> None:
    try:
        check_framing(data)
    except InvalidInput:
        pass


@given(place=st.integers(0, len(REQUEST) - 1), byte=st.integers(0, 255))
def test_framing_never_refuses_what_the_library_reads(place: int, byte: int) -> None:
    """The check of a request's outermost fields must not refuse a request that decodes completely."""
    changed = REQUEST[:place] + bytes([byte]) + REQUEST[place + 1 :]
    try:
        messages_of(Signal.LOGS).request.FromString(changed)
    except DecodeError:
        return
    try:
        check_framing(changed)
    except InvalidInput as error:
        # Groups are legal protobuf, but OTLP has none. It ignores a field 1 of another type.
        assert "wire type" in str(error) or "not a message" in str(error)  # noqa: PT017


@given(data=st.binary(max_size=200), key=st.sampled_from([DETAILS_TRAILER, RETRY_TRAILER, "other"]))
def test_any_trailer_is_a_hint_or_nothing(data: bytes, key: str) -> None:
    hint = retry_after_of_trailers([(key, data)])
    assert hint is None or 0 <= hint <= 3600


@given(text=st.text(max_size=60))
def test_any_retry_after_is_a_hint_or_nothing(text: str) -> None:
    hint = retry_after_s(text, 1_700_000_000_000)
    assert hint is None or 0 <= hint <= 3600


@given(data=st.binary(max_size=200), signal=st.sampled_from(Signal))
def test_any_answer_of_success_is_a_success(data: bytes, signal: Signal) -> None:
    assert outcome_of_response(data, signal).verdict is Verdict.ACK
    assert len(message_of(data)) <= 500


@given(text=st.text(max_size=60))
def test_any_text_in_a_file_is_read_or_refused(text: str) -> None:
    for parse in (parse_address, parse_endpoint, lambda found: parse_urn(found, "here")):
        try:
            parse(text)
        except ConfigError:
            pass
