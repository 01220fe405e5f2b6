"""An independent encoder of remote write 1.0, written from its definition.

WriteRequest {TimeSeries 1, MetricMetadata 3}; TimeSeries {Label 1, Sample 2}; Label {name 1, value 2};
Sample {double value 1, int64 timestamp 2}; MetricMetadata {type 1, metric_family_name 2, help 4, unit 5}.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import cramjam

__all__ = ["HEADERS", "request"]

HEADERS = {
    "content-encoding": "snappy",
    "content-type": "application/x-protobuf",
    "x-prometheus-remote-write-version": "0.1.0",
    "user-agent": "Prometheus/3.0.0",
}


def request(
    *series: tuple[Mapping[str, str], Sequence[tuple[int, float]]],
    help_texts: Mapping[str, str] | None = None,
) -> bytes:
    """Return a body for POST /api/v1/write."""
    parts = [_field(1, _series(labels, samples)) for labels, samples in series]
    parts += [
        _field(3, b"\x08\x01" + _field(2, name.encode()) + _field(4, text.encode()))
        for name, text in (help_texts or {}).items()
    ]
    return bytes(cramjam.snappy.compress_raw(b"".join(parts)))


def _series(labels: Mapping[str, str], samples: Sequence[tuple[int, float]]) -> bytes:
    pairs = [
        _field(1, _field(1, name.encode()) + _field(2, labels[name].encode())) for name in sorted(labels)
    ]
    points = [
        _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(at & (2**64 - 1)))
        for at, value in samples
    ]
    return b"".join([*pairs, *points])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
