"""Keys and values of the records in storage."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries import Bucket, Labels, Metadata, MetricType, Temporality
from penstock.timeseries.keys import (
    DictionaryKey,
    ForwardKey,
    InvertedKey,
    RecordType,
    SamplesKey,
    bucket_prefix,
    inverted_prefix,
    record_prefix,
    terminated,
    unterminated,
)
from penstock.timeseries.model import Fingerprint, SeriesId
from penstock.timeseries.records import (
    decode_forward,
    decode_series_id,
    decode_series_ids,
    encode_forward,
    encode_series_id,
    merge_series_ids,
)

BUCKET = Bucket(0x01020300 // 60 * 60)
LABELS = Labels.of({"__name__": "up", "job": "é"})


def test_a_key_puts_the_bucket_before_the_type() -> None:
    start = BUCKET.start_minutes.to_bytes(4, "big")
    assert bucket_prefix(BUCKET) == b"\x01\x02" + start + b"\x01"
    assert ForwardKey(BUCKET, SeriesId(7)).encode() == b"\x01\x02" + start + b"\x01\x03\0\0\0\x07"
    assert InvertedKey(BUCKET, "job", "a\0").encode() == b"\x01\x02" + start + b"\x01\x04job\0a\0"
    assert SamplesKey(BUCKET, "up", SeriesId(1)).encode() == b"\x01\x02" + start + b"\x01\x05up\0\0\0\0\x01"


def test_prefixes_name_what_they_hold() -> None:
    key = InvertedKey(BUCKET, "job", "a").encode()
    assert key.startswith(inverted_prefix(BUCKET, "job"))
    assert key.startswith(record_prefix(BUCKET, RecordType.INVERTED))
    assert not InvertedKey(BUCKET, "jobs", "a").encode().startswith(inverted_prefix(BUCKET, "job"))


def test_terminated_texts_sort_as_they_are_and_none_is_a_prefix_of_another() -> None:
    texts = [b"", b"\0", b"\0\0", b"\x01", b"\x02", b"a", b"a\0", b"a\x01", b"ab", b"b"]
    encoded = [terminated(text) for text in texts]
    assert encoded == sorted(encoded)
    assert all(
        unterminated(one + b"rest") == (text, b"rest") for one, text in zip(encoded, texts, strict=True)
    )
    assert terminated(b"\0\x01\xff") == b"\x01\x01\x01\x02\x01\x03\0"


@pytest.mark.parametrize("data", [b"", b"no end", b"\x01\x09\0", b"\x01\0"])
def test_a_text_in_a_key_that_breaks_its_format_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unterminated(data)


def test_ids_that_do_not_fit_are_refused() -> None:
    for wrong in (-1, 2**32):
        with pytest.raises(InvalidInput):
            ForwardKey(BUCKET, SeriesId(wrong)).encode()
        with pytest.raises(InvalidInput):
            encode_series_id(SeriesId(wrong))
    with pytest.raises(InvalidInput):
        DictionaryKey(BUCKET, Fingerprint(b"short")).encode()


def test_a_dictionary_value_is_a_little_endian_id() -> None:
    assert encode_series_id(SeriesId(258)) == b"\x02\x01\0\0"
    assert decode_series_id(b"\x02\x01\0\0") == 258
    with pytest.raises(Corrupt):
        decode_series_id(b"\0\0\0")


def test_a_forward_value_as_the_format_has_it() -> None:
    metadata = Metadata(
        unit="s", metric_type=MetricType.SUM, temporality=Temporality.CUMULATIVE, monotonic=True
    )
    value = encode_forward(LABELS, metadata)
    assert value == (
        b"\x01\0s\x02\x05\x02\0\x02\0" + b"\x08\0__name__\x02\0up" + b"\x03\0job\x02\0" + "é".encode()
    )
    assert decode_forward(value) == (LABELS, metadata)


def test_a_damaged_forward_value_is_corrupt() -> None:
    value = encode_forward(LABELS, Metadata())
    for cut in range(len(value)):
        with pytest.raises(Corrupt):
            decode_forward(value[:cut])
    with pytest.raises(Corrupt):
        decode_forward(value + b"\0")
    with pytest.raises(Corrupt):
        decode_forward(b"\0\0\x09" + value[3:])


def test_a_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput):
        encode_forward(Labels.of({"a": "x" * 65_536}), Metadata())


def test_an_inverted_value_is_a_portable_bitmap_and_merges_to_the_union() -> None:
    value = BitMap([1, 2]).serialize()
    # A cookie for arrays, one container, key 0, two values less one, its offset, the values.
    assert value == b":0\0\0\x01\0\0\0\0\0\x01\0\x10\0\0\0\x01\0\x02\0"
    merged = merge_series_ids([value, BitMap([2, 70_000]).serialize(), value])
    assert list(decode_series_ids(merged)) == [1, 2, 70_000]
    assert merge_series_ids([value]) is value
    with pytest.raises(Corrupt):
        decode_series_ids(b"nonsense")
