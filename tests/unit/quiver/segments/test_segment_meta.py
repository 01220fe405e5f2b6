"""Sidecars and schema metadata agree, and damage to a sidecar is always detected."""

from __future__ import annotations

import dataclasses
import json

import pytest

from penstock.errors import Corrupt, Unsupported
from penstock.quiver.model import SegmentInfo, Signal
from penstock.quiver.segments.metadata import (
    arrow_name,
    decode_meta,
    encode_meta,
    info_of,
    meta_name,
    schema_metadata,
    seq_of,
    user_metadata,
)

pytestmark = pytest.mark.unit

INFO = SegmentInfo(
    seq=120,
    signal=Signal.LOGS,
    slot=51,
    schema_hash="ab" * 32,
    bundle_count=3,
    item_count=17,
    ingest_ns_min=1_700_000_000_000_000_000,
    ingest_ns_max=1_700_000_000_500_000_000,
    event_ns_min=None,
    event_ns_max=None,
    wal_start=100,
    wal_end=900,
    wal_seq_min=7,
    wal_seq_max=9,
    core_id=2,
    file_size=12345,
    xxh3="0123456789abcdef",
    created_by="penstock 1.0",
)


def test_a_sidecar_is_decoded_unchanged() -> None:
    assert decode_meta(encode_meta(INFO), "meta") == INFO


def test_a_sidecar_is_plain_json() -> None:
    decoded = json.loads(encode_meta(INFO))
    assert decoded["format"] == "quiver-segment/1"
    assert (decoded["segment_seq"], decoded["signal"], decoded["xxh3"]) == (120, "logs", "0123456789abcdef")


def test_every_flipped_bit_of_a_sidecar_is_detected() -> None:
    data = encode_meta(INFO)
    for place in range(len(data) - 1):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                decoded = decode_meta(bytes(flipped), "meta")
            except Corrupt:
                continue
            assert decoded == INFO, (place, bit)


def test_every_truncation_of_a_sidecar_is_detected() -> None:
    data = encode_meta(INFO)
    for size in range(len(data) - 1):
        with pytest.raises(Corrupt):
            decode_meta(data[:size], "meta")


def test_a_later_format_is_refused_and_not_reported_as_damage() -> None:
    from xxhash import xxh3_64_hexdigest

    body = b'{"format":"quiver-segment/2","anything":[1]'
    data = body + b',"meta_xxh3":"' + xxh3_64_hexdigest(body).encode() + b'"}'
    with pytest.raises(Unsupported, match="quiver-segment/2"):
        decode_meta(data, "meta")


def test_the_schema_has_all_metadata_known_before_writing() -> None:
    again = info_of(
        schema_metadata(INFO), "file", file_size=12345, xxh3="0123456789abcdef", created_by="penstock 1.0"
    )
    assert again == INFO
    timed = dataclasses.replace(INFO, event_ns_min=-5, event_ns_max=8)
    assert (
        info_of(schema_metadata(timed), "file", file_size=1, xxh3="0" * 16, created_by="").event_ns_min == -5
    )


@pytest.mark.parametrize("lost", ["quiver.segment_seq", "quiver.slot", "quiver.wal_end"])
def test_a_schema_with_missing_metadata_is_corrupt(lost: str) -> None:
    metadata = schema_metadata(INFO)
    del metadata[lost.encode()]
    with pytest.raises(Corrupt):
        info_of(metadata, "file", file_size=1, xxh3="0" * 16, created_by="")


@pytest.mark.parametrize(
    "change",
    [
        {"bundle_count": 0},
        {"item_count": -1},
        {"wal_start": 901},
        {"wal_seq_min": 10},
        {"ingest_ns_min": INFO.ingest_ns_max + 1},
        {"xxh3": "nonsense"},
        {"slot": 50},
    ],
)
def test_impossible_metadata_is_corrupt(change: dict[str, int]) -> None:
    with pytest.raises(Corrupt):
        decode_meta(encode_meta(dataclasses.replace(INFO, **change)), "meta")


def test_metadata_of_the_user_is_kept_separate() -> None:
    mixed = {b"pandas": b"{}"} | schema_metadata(INFO)
    assert user_metadata(mixed) == {b"pandas": b"{}"}
    assert user_metadata(schema_metadata(INFO)) is None


def test_numbers_are_parsed_from_names() -> None:
    assert (arrow_name(7), meta_name(7)) == ("seg-0000000000000007.arrow", "seg-0000000000000007.meta.json")
    for name in (
        "seg-0000000000000007.arrow",
        "seg-0000000000000007.meta.json.tmp",
        "seg-0000000000000007.2.arrow",
    ):
        assert seq_of(name) == 7
    for name in ("seg-7.arrow", "seg-0000000000000007.txt", "x", "seg-000000000000000x.arrow"):
        assert seq_of(name) is None
