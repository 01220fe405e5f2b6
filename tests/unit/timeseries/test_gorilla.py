"""The compressed stream of samples, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries import Samples
from penstock.timeseries.gorilla import decode, decode_many, encode, encode_many, merge_streams
from penstock.timeseries.model import STALE_BITS, STALE_MARKER

T = 1_700_000_000_000
CHECK = bytes.fromhex("0000018bcfe56800 00007fe000000000 0001e00007530609 5fffc000000000")


def bits_of(samples: Samples) -> list[tuple[int, int]]:
    return list(zip(samples.timestamps.tolist(), samples.values.view(np.uint64).tolist(), strict=True))


def test_the_check_vector_of_the_format() -> None:
    samples = Samples.of([(T, 1.0), (T + 15_000, 1.0), (T + 30_000, 2.0)])
    assert encode(samples) == CHECK
    assert bits_of(decode(CHECK)) == bits_of(samples)


def test_no_samples_are_no_bytes() -> None:
    assert encode(Samples.empty()) == b""
    assert len(decode(b"")) == 0
    assert encode_many([Samples.empty(), Samples.of([(T, 1.0)])])[0] == b""


EDGES = [1, 2, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, 100_000, 2**31 - 1]


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_width_of_a_change_comes_back(edge: int, sign: int) -> None:
    first = 1 if sign > 0 else 2**31
    times = [T, T + first, T + 2 * first + sign * edge]
    assert decode(encode(Samples.of((time, 1.0) for time in times))).timestamps.tolist() == times


@pytest.mark.parametrize(
    ("change", "bits"), [(0, 1), (64, 9), (65, 12), (256, 12), (257, 16), (2048, 16), (2049, 36)]
)
def test_a_change_takes_the_narrowest_code_that_holds_it(change: int, bits: int) -> None:
    distance = 10_000
    steady = encode(Samples.of((time, 1.0) for time in (T, T + distance, T + 2 * distance)))
    changed = encode(Samples.of((time, 1.0) for time in (T, T + distance, T + 2 * distance + change)))
    header = 64 + 15 + 64
    second = 36 + 1
    assert len(steady) == (header + second + 2 + 36 + 7) // 8
    assert len(changed) == (header + second + bits + 1 + 36 + 7) // 8


def test_samples_too_far_apart_are_refused() -> None:
    with pytest.raises(InvalidInput, match="24 days"):
        encode(Samples.of([(T, 1.0), (T + 2**31 + 1, 1.0)]))
    with pytest.raises(InvalidInput, match="24 days"):
        encode(Samples.of([(-(2**63), 1.0), (2**63 - 1, 1.0)]))


def test_any_float_comes_back_with_its_bits() -> None:
    words = [0, 1, STALE_BITS, 2**63, 2**64 - 1, 0x7FF8000000000001, 0x3FF0000000000000, 2**63 - 1, 1, 0]
    values = np.array(words, np.uint64).view(np.float64)
    samples = Samples(T + np.arange(len(words)), values)
    assert decode(encode(samples)).values.view(np.uint64).tolist() == words
    assert decode_many([encode(samples)] * 30)[29].values.view(np.uint64).tolist() == words


def test_samples_are_sorted_before_they_are_encoded() -> None:
    shuffled = Samples.of([(T + 2, 2.0), (T, 0.0), (T + 2, 3.0)])
    assert bits_of(decode(encode(shuffled))) == bits_of(Samples.of([(T, 0.0), (T + 2, 3.0)]))


def test_many_are_encoded_as_each_alone() -> None:
    rng = np.random.default_rng(7)
    batch = [
        Samples(T + np.cumsum(rng.integers(1, 5000, count)), rng.choice([1.0, 2.5, np.nan, 1e300], count))
        for count in rng.integers(0, 40, 60)
    ]
    streams = encode_many(batch)
    assert streams == [encode(samples) for samples in batch]
    for samples, abreast, alone in zip(batch, decode_many(streams), map(decode, streams), strict=True):
        assert bits_of(samples) == bits_of(abreast) == bits_of(alone)


def test_the_newest_operand_wins_a_timestamp() -> None:
    old, new = Samples.of([(T, 1.0), (T + 1, 1.0)]), Samples.of([(T + 1, 2.0), (T + 2, 2.0)])
    merged = decode(merge_streams([encode(old), b"", encode(new)]))
    assert merged.values.tolist() == [1, 2, 2]
    assert decode(merge_streams([encode(new), encode(old)])).values.tolist() == [1, 1, 2]


def test_a_stale_marker_survives_a_merge() -> None:
    stale = encode(Samples.of([(T + 1, float(STALE_MARKER))]))
    merged = decode(merge_streams([encode(Samples.of([(T, 1.0)])), stale]))
    assert merged.values.view(np.uint64)[1] == STALE_BITS


def test_merging_little_leaves_it_as_it_is() -> None:
    assert merge_streams([]) == b""
    assert merge_streams([b"", CHECK]) is CHECK


@pytest.mark.parametrize("cut", range(1, len(CHECK)))
def test_a_cut_stream_is_corrupt(cut: int) -> None:
    with pytest.raises(Corrupt):
        decode(CHECK[:cut])
    with pytest.raises(Corrupt):
        decode_many([CHECK] * 30 + [CHECK[:cut]])


def test_a_layout_of_another_kind_is_corrupt() -> None:
    damaged = CHECK[:8] + b"\x80" + CHECK[9:]
    with pytest.raises(Corrupt, match="unknown layout"):
        decode(damaged)
    with pytest.raises(Corrupt, match="unknown layout"):
        decode_many([CHECK] * 30 + [damaged])


def test_a_first_timestamp_beyond_64_bits_is_corrupt() -> None:
    damaged = b"\x7f" + b"\xff" * 7 + b"\x00\x02" + CHECK[10:]
    with pytest.raises(Corrupt, match="64 bits"):
        decode(damaged)
    with pytest.raises(Corrupt, match="64 bits"):
        decode_many([CHECK] * 30 + [damaged])


def test_the_first_of_all_timestamps_comes_back() -> None:
    stream = encode(Samples.of([(-(2**63), 1.0)]))
    assert decode(stream).timestamps.tolist() == [-(2**63)]
    assert decode_many([stream] * 30)[0].timestamps.tolist() == [-(2**63)]
