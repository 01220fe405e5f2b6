"""Remote write: the content of a body, and refused bodies."""

from __future__ import annotations

import struct

import cramjam
import numpy as np
import pytest

from penstock.errors import InvalidInput, LimitExceeded
from penstock.timeseries import Labels, MetricType
from penstock.timeseries.ingest import _LabelCache, decode_remote_write
from penstock.timeseries.model import STALE_BITS


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def nested(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def label(name: str, value: str) -> bytes:
    return nested(1, pair(name, value))


def pair(name: str, value: str) -> bytes:
    return nested(1, name.encode()) + nested(2, value.encode())


def sample(value: float, timestamp_ms: int, bits: int | None = None) -> bytes:
    packed = struct.pack("<d", value) if bits is None else struct.pack("<Q", bits)
    return nested(2, b"\x09" + packed + b"\x10" + varint(timestamp_ms))


def body(*series: bytes, more: bytes = b"") -> bytes:
    message = b"".join(nested(1, one) for one in series) + more
    return bytes(cramjam.snappy.compress_raw(message))


UP = label("job", "a") + label("__name__", "up")


def test_series_come_with_their_labels_sorted_and_their_samples_in_order() -> None:
    written = decode_remote_write(
        body(UP + sample(1.5, 1000) + sample(-2, -1), label("__name__", "x") + sample(0, 5))
    )
    first, second = written.series
    assert first.labels == Labels.of({"__name__": "up", "job": "a"})
    assert first.samples.timestamps.tolist() == [1000, -1]
    assert first.samples.values.tolist() == [1.5, -2]
    assert second.labels.metric == "x"


def test_a_stale_marker_keeps_its_bits() -> None:
    (series,) = decode_remote_write(body(UP + sample(0, 1, bits=STALE_BITS))).series
    assert series.samples.values.view(np.uint64).tolist() == [STALE_BITS]


def test_metadata_goes_with_its_metric() -> None:
    about = nested(3, b"\x08\x01" + nested(2, b"up") + nested(4, b"Help.") + nested(5, b"s"))
    written = decode_remote_write(body(UP + sample(1, 1), more=about))
    assert written.metadata["up"].description == "Help."
    assert written.series[0].metadata.metric_type is MetricType.SUM
    assert written.series[0].metadata.monotonic


def test_native_histograms_are_counted_and_series_without_samples_are_not_series() -> None:
    written = decode_remote_write(body(UP + nested(4, b"\x01\x02\x03"), UP + nested(3, b"") + sample(1, 1)))
    assert len(written.series) == 1
    assert written.histograms_skipped == 1


def test_fields_of_later_versions_are_skipped() -> None:
    assert len(decode_remote_write(body(UP + sample(1, 1), more=nested(9, b"new"))).series) == 1


def test_an_empty_request_is_none() -> None:
    assert decode_remote_write(body()).series == []


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xff\xff\xff",
        b"\x05\xff\xff",
        bytes(cramjam.snappy.compress_raw(b"\x0a\xff")),
        body(sample(1, 1)),
        body(label("job", "a") + sample(1, 1)),
        body(UP + label("job", "b") + sample(1, 1)),
        body(nested(1, nested(1, b"a") + nested(2, b"\xff\xfe")) + sample(1, 1)),
    ],
)
def test_a_malformed_body_is_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_remote_write(wrong)


def test_the_size_is_checked_before_anything_is_unpacked() -> None:
    claims_four_gigabytes = b"\xff\xff\xff\xff\x0f"
    with pytest.raises(LimitExceeded, match="4,294,967,295"):
        decode_remote_write(claims_four_gigabytes)
    with pytest.raises(LimitExceeded):
        decode_remote_write(body(UP + sample(1, 1)), bytes_max=10)


def test_remembered_labels_are_bounded_by_their_bytes() -> None:
    cache = _LabelCache(10_000)
    raws = [(pair("__name__", "up"), pair("n", f"{n:0500}")) for n in range(100)]
    for raw in raws:
        assert cache(raw).metric == "up"
        assert cache(raw) is cache(raw)
        assert sum(len(part) for key in cache._known for part in key) <= 10_000
    assert cache((pair("__name__", "x" * 20_000),)).metric == "x" * 20_000
    assert len(cache._known) < 20
