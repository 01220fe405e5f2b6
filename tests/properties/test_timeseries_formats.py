"""Formats of the time series: values survive a round trip, and damage is never decoded as data."""

from __future__ import annotations

import contextlib
import struct

import cramjam
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Corrupt, InvalidInput, Rejected
from penstock.timeseries import Labels, Metadata, MetricType, Samples, Temporality
from penstock.timeseries.gorilla import decode, decode_many, encode, encode_many, merge_streams
from penstock.timeseries.ingest import decode_remote_write
from penstock.timeseries.keys import terminated, unterminated
from penstock.timeseries.promql import Engine
from penstock.timeseries.records import decode_forward, decode_series_ids, encode_forward

pytestmark = pytest.mark.properties

WORDS = st.one_of(
    st.sampled_from([0, 1, 0x7FF0000000000002, 0x7FF8000000000001, 2**63, 2**64 - 1]),
    st.floats().map(lambda value: int(struct.unpack("<Q", struct.pack("<d", value))[0])),
    st.integers(0, 2**64 - 1),
)
GAPS = st.one_of(st.integers(1, 300), st.sampled_from([64, 65, 256, 2048, 15_000]), st.integers(1, 2**31))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def some_samples(draw: st.DrawFn) -> Samples:
    rows = draw(st.lists(st.tuples(GAPS, WORDS), max_size=12))
    start = draw(st.integers(-(2**40), 2**42))
    times = start + np.cumsum([gap for gap, _ in rows], dtype=np.int64)
    return Samples(times, np.array([word for _, word in rows], np.uint64).view(np.float64))


def bits_of(samples: Samples) -> list[tuple[int, int]]:
    return list(zip(samples.timestamps.tolist(), samples.values.view(np.uint64).tolist(), strict=True))


@given(batch=st.lists(some_samples(), max_size=6))
def test_samples_survive_a_round_trip_alone_and_in_parallel(batch: list[Samples]) -> None:
    streams = encode_many(batch)
    expected = [bits_of(samples) for samples in batch]
    assert [bits_of(decode(stream)) for stream in streams] == expected
    assert [bits_of(samples) for samples in decode_many(streams * 30)] == expected * 30
    assert [encode(samples) for samples in batch] == streams


@given(parts=st.lists(some_samples(), min_size=2, max_size=4), cut=st.integers(1, 3))
def test_merging_is_associative_and_the_newest_wins(parts: list[Samples], cut: int) -> None:
    streams = [encode(part) for part in parts]
    newest = {}
    for part in parts:
        newest.update(dict(bits_of(part)))
    try:
        merged = merge_streams(streams)
        grouped = merge_streams([merge_streams(streams[:cut]), merge_streams(streams[cut:])])
    except InvalidInput:  # parts more than 24 days apart
        return
    assert bits_of(decode(merged)) == sorted(newest.items())
    assert grouped == merged


@settings(max_examples=200)
@given(samples=some_samples(), at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 40))
def test_both_decoders_agree_on_damage(samples: Samples, at: int, flip: int, cut: int) -> None:
    stream = bytearray(encode(samples))
    if stream:
        stream[at % len(stream)] ^= flip
    damaged = bytes(stream[: len(stream) - cut])
    alone: list[tuple[int, int]] | None = None
    abreast: list[tuple[int, int]] | None = None
    with contextlib.suppress(Corrupt):
        alone = bits_of(decode(damaged))
    with contextlib.suppress(Corrupt):
        abreast = bits_of(decode_many([damaged] * 30)[0])
    assert alone == abreast


@given(first=st.binary(max_size=6), second=st.binary(max_size=6), rest=st.binary(max_size=3))
def test_terminated_texts_come_back(first: bytes, second: bytes, rest: bytes) -> None:
    assert unterminated(terminated(first) + rest) == (first, rest)
    if first != second:
        assert not terminated(first).startswith(terminated(second))


@given(
    pairs=st.dictionaries(TEXTS.filter(bool), TEXTS),
    unit=TEXTS,
    kind=st.sampled_from(MetricType),
    temporality=st.sampled_from(Temporality),
    monotonic=st.booleans(),
)
def test_forward_records_come_back(
    pairs: dict[str, str], unit: str, kind: MetricType, temporality: Temporality, monotonic: bool
) -> None:
    labels = Labels.of(pairs)
    metadata = Metadata(unit=unit, metric_type=kind, temporality=temporality, monotonic=monotonic)
    assert decode_forward(encode_forward(labels, metadata)) == (labels, metadata)


@given(raw=st.binary(max_size=60))
def test_hostile_bytes_are_corrupt_or_refused_and_nothing_else(raw: bytes) -> None:
    for read in (decode, unterminated, decode_forward, decode_series_ids):
        with contextlib.suppress(Corrupt):
            read(raw)
    for body in (raw, bytes(cramjam.snappy.compress_raw(raw))):
        with contextlib.suppress(Rejected):
            decode_remote_write(body, bytes_max=1 << 20)


PIECES = st.sampled_from(
    [
        *'(){}[],+-*/%^@"',
        "x",
        "rate",
        "sum",
        "by",
        "on",
        "5m",
        "offset",
        "1",
        " ",
        "{a=",
        '"b"',
        "=~",
        "bool",
        "\n",
    ]
)


@settings(max_examples=300)
@given(query=st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=12)))
def test_any_text_is_a_query_or_refused_with_its_place(query: str) -> None:
    with contextlib.suppress(Rejected):
        Engine().instant(query, 0)
