"""The rules of labels, samples and buckets."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from penstock.errors import InvalidInput
from penstock.timeseries import Bucket, Labels, Samples
from penstock.timeseries.model import STALE_BITS, STALE_MARKER, is_stale

HOUR_MS = 3_600_000


def test_labels_are_sorted_and_empty_values_are_none() -> None:
    labels = Labels.of({"b": "2", "a": "1", "c": "", "__name__": "up"})
    assert list(labels) == [("__name__", "up"), ("a", "1"), ("b", "2")]
    assert labels.metric == "up"
    assert labels.value("c") == ""
    assert str(labels) == 'up{a="1", b="2"}'


@pytest.mark.parametrize(
    "pairs", [[("a", "1"), ("a", "2")], [("", "1")], [("a", "\ud800")], [("\ud800", "a")]]
)
def test_labels_that_cannot_be_are_refused(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidInput):
        Labels.of(pairs)


def test_labels_change_into_others() -> None:
    labels = Labels.of({"__name__": "up", "a": "1", "b": "2"})
    assert labels.keep(["a", "x"]) == Labels.of({"a": "1"})
    assert labels.drop(["a"]) == Labels.of({"__name__": "up", "b": "2"})
    assert labels.replace("a", "9").value("a") == "9"
    assert labels.replace("a", "") == labels.drop(["a"])
    assert labels.without_name() == Labels.of({"a": "1", "b": "2"})


def test_a_fingerprint_tells_apart_what_only_joins_to_the_same_text() -> None:
    assert Labels.of({"a": "bc"}).fingerprint() != Labels.of({"ab": "c"}).fingerprint()
    assert Labels.of({"a": "b", "c": "d"}).fingerprint() == Labels.of({"c": "d", "a": "b"}).fingerprint()


def test_a_fingerprint_is_blake2b_over_length_prefixed_pairs() -> None:
    content = struct.pack("<II", 1, 2) + "xé".encode()
    assert Labels.of({"x": "é"}).fingerprint() == hashlib.blake2b(content, digest_size=16).digest()


def test_of_one_timestamp_the_sample_written_last_counts() -> None:
    samples = Samples.of([(30, 3.0), (10, 1.0), (30, 4.0), (20, 2.0), (10, 5.0)]).in_order()
    assert samples.timestamps.tolist() == [10, 20, 30]
    assert samples.values.tolist() == [5, 2, 4]


def test_samples_are_cut_at_both_edges_inclusive() -> None:
    assert Samples.of([(1, 1.0), (2, 2.0), (3, 3.0)]).between(2, 3).timestamps.tolist() == [2, 3]


def test_samples_have_a_value_for_each_timestamp() -> None:
    with pytest.raises(InvalidInput):
        Samples(np.zeros(2, np.int64), np.zeros(3))
    with pytest.raises(InvalidInput):
        Samples(np.zeros(2, np.int32), np.zeros(2))  # type: ignore[arg-type]


def test_only_the_bits_tell_a_stale_marker_from_another_nan() -> None:
    values = np.array([1.0, np.nan, STALE_MARKER, np.inf])
    assert is_stale(values).tolist() == [False, False, True, False]
    assert values.view(np.uint64)[2] == STALE_BITS


def test_a_bucket_is_an_hour_from_the_hour() -> None:
    bucket = Bucket.at(1_700_000_000_000)
    assert bucket.start_ms <= 1_700_000_000_000 < bucket.end_ms
    assert bucket.end_ms - bucket.start_ms == HOUR_MS
    assert bucket.start_ms % HOUR_MS == 0


@pytest.mark.parametrize("wrong", [(1, 1), (-60, 1), (2**32, 1), (0, 0), (0, 256)])
def test_a_bucket_that_cannot_be_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput):
        Bucket(*wrong)


@pytest.mark.parametrize("at_ms", [-1, 2**32 * 60_000, 2**62])
def test_a_time_that_is_in_no_bucket_is_refused(at_ms: int) -> None:
    with pytest.raises(InvalidInput, match=f"{at_ms} ms since 1970 is not a time from 1970 to 10135"):
        Bucket.at(at_ms)
