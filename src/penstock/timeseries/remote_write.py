"""Remote write 1.0: a snappy block that holds a protobuf message of series.

The size that a block claims is checked before it is unpacked, so that a small body cannot fill memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, Protocol, cast

import cramjam
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from penstock.errors import InvalidInput, LimitExceeded
from penstock.timeseries.model import METRIC_NAME, Labels, Metadata, MetricType, Samples, Series, Temporality

__all__ = ["BODY_BYTES_MAX", "RemoteWrite", "decode_remote_write", "unpacked_size"]

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Senders pack some thousand samples, about a megabyte; this leaves room for long labels."""

_REMEMBERED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Labels that need not be read again, as they were sent; with what they became about three times as much."""
_REMEMBERED_COST: Final = 200
"""What an entry takes besides its bytes."""
_STRING: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_DOUBLE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
_INT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_INT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
# Message: (field, number, type or message, whether it is a list). A histogram is not looked into; labels are
# taken as they are first, because most of them were seen before.
_MESSAGES: Final[dict[str, tuple[tuple[str, int, int | str, bool], ...]]] = {
    "Label": (("name", 1, _STRING, False), ("value", 2, _STRING, False)),
    "Sample": (("value", 1, _DOUBLE, False), ("timestamp", 2, _INT64, False)),
    "TimeSeries": (
        ("labels", 1, _BYTES, True),
        ("samples", 2, "Sample", True),
        ("histograms", 4, _BYTES, True),
    ),
    "MetricMetadata": (
        ("type", 1, _INT32, False),
        ("metric_family_name", 2, _STRING, False),
        ("help", 4, _STRING, False),
        ("unit", 5, _STRING, False),
    ),
    "WriteRequest": (("timeseries", 1, "TimeSeries", True), ("metadata", 3, "MetricMetadata", True)),
}
_COUNTER: Final = 1
_METRIC_TYPES: Final = {
    _COUNTER: MetricType.SUM,
    2: MetricType.GAUGE,
    3: MetricType.HISTOGRAM,
    4: MetricType.HISTOGRAM,
    5: MetricType.SUMMARY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWrite:
    """What a request held. Native histograms are counted but not kept."""

    series: list[Series]
    metadata: dict[str, Metadata]
    histograms_skipped: int


class _Label(Protocol):
    name: str
    value: str


class _Sample(Protocol):
    value: float
    timestamp: int


class _TimeSeries(Protocol):
    labels: list[bytes]
    samples: list[_Sample]
    histograms: list[bytes]


class _Metadata(Protocol):
    type: int
    metric_family_name: str
    help: str
    unit: str


class _WriteRequest(Protocol):
    timeseries: list[_TimeSeries]
    metadata: list[_Metadata]


def decode_remote_write(body: bytes, *, bytes_max: int = BODY_BYTES_MAX) -> RemoteWrite:
    """The series of a request's body, in the order in which they stand there.

    Raises `InvalidInput` if it is malformed, and `LimitExceeded` if it unpacks to more than `bytes_max`.
    """
    request = _message(_unpacked(body, bytes_max))
    metadata = {one.metric_family_name: _metadata(one) for one in request.metadata}
    filled = [one for one in request.timeseries if len(one.samples)]
    return RemoteWrite(
        series=_series(filled, metadata),
        metadata=metadata,
        histograms_skipped=sum(len(one.histograms) for one in request.timeseries),
    )


def unpacked_size(body: bytes, *, bytes_max: int = BODY_BYTES_MAX) -> int:
    """How many bytes a body unpacks to: it says so. Raises `InvalidInput`, `LimitExceeded`."""
    try:
        claimed: int = cramjam.snappy.decompress_raw_len(body)
    except cramjam.DecompressionError as error:
        raise InvalidInput(f"the body is not a snappy block: {error}") from None
    if claimed > bytes_max:
        raise LimitExceeded(f"the body unpacks to {claimed:,} bytes, more than {bytes_max:,}")
    return claimed


def _unpacked(body: bytes, bytes_max: int) -> bytes:
    unpacked_size(body, bytes_max=bytes_max)
    try:
        return bytes(cramjam.snappy.decompress_raw(body))
    except cramjam.DecompressionError as error:
        raise InvalidInput(f"the body is not a snappy block: {error}") from None


def _message(data: bytes) -> _WriteRequest:
    request = _message_class("WriteRequest")()
    try:
        request.ParseFromString(data)
    except DecodeError as error:
        raise InvalidInput(f"the body is not a remote-write request: {error}") from None
    return cast(_WriteRequest, request)


def _series(members: list[_TimeSeries], metadata: dict[str, Metadata]) -> list[Series]:
    """All samples in two arrays, of which each series has its slice: most series bring one sample."""
    labels = [_labels(tuple(one.labels)) for one in members]
    timestamps = np.array([sample.timestamp for one in members for sample in one.samples], np.int64)
    values = np.array([sample.value for one in members for sample in one.samples], np.float64)
    bounds = [0, *accumulate(len(one.samples) for one in members)]
    return [
        Series(
            labels=own,
            samples=Samples(timestamps[low:high], values[low:high]),
            metadata=metadata.get(own.metric, _NO_METADATA) if metadata else _NO_METADATA,
        )
        for own, (low, high) in zip(labels, pairwise(bounds), strict=True)
    ]


class _Remembered:
    """Labels by their messages: senders send the same series over and over. Any thread may use it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._known: dict[tuple[bytes, ...], Labels] = {}
        self._bytes = 0

    def __call__(self, raw: tuple[bytes, ...]) -> Labels:
        """Raises `InvalidInput`."""
        known = self._known.get(raw)
        if known is None:
            known = _read_labels(raw)
            self._keep(raw, known)
        return known

    def _keep(self, raw: tuple[bytes, ...], labels: Labels) -> None:
        size = _REMEMBERED_COST + sum(map(len, raw))
        if self._bytes + size > self._bytes_max:
            # All of it: what is still sent is read again once.
            self._known, self._bytes = {}, 0
        if size <= self._bytes_max:
            self._known[raw] = labels
            self._bytes += size


def _read_labels(raw: tuple[bytes, ...]) -> Labels:
    pairs = [_label(one) for one in raw]
    labels = Labels.of((one.name, one.value) for one in pairs)
    if not labels.metric:
        raise InvalidInput(f"series {labels} has no {METRIC_NAME}")
    return labels


def _label(data: bytes) -> _Label:
    label = _message_class("Label")()
    try:
        label.ParseFromString(data)
    except DecodeError as error:
        raise InvalidInput(f"the body is not a remote-write request: {error}") from None
    return cast(_Label, label)


def _metadata(one: _Metadata) -> Metadata:
    counter = one.type == _COUNTER
    return Metadata(
        metric_type=_METRIC_TYPES.get(one.type, MetricType.UNKNOWN),
        temporality=Temporality.CUMULATIVE if counter else Temporality.UNSPECIFIED,
        monotonic=counter,
        unit=one.unit,
        description=one.help,
    )


_NO_METADATA: Final = Metadata()
_labels: Final = _Remembered(_REMEMBERED_BYTES_MAX)


@cache
def _message_class(name: str) -> type[Message]:
    described = message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"penstock.remote.{name}"))
    return cast(type[Message], described)


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """The messages described here, so that no generated code and no `protoc` is needed."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock/remote_write.proto", package="penstock.remote")
    file.syntax = "proto3"
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            described = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                described.type, described.type_name = 11, f".penstock.remote.{kind}"
            else:
                described.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
