"""Values of the records in storage: little-endian, texts and lists behind their 16-bit counts.

dictionary   series id u32
forward      unit text | metric type u8 | flags u8 | label count u16 | count u16 of (name text, value text)
             flags: bits 0-1 temporality, bit 2 monotonic; labels sorted by name
inverted     series ids as a roaring bitmap in the portable format
samples      see `gorilla`
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from pyroaring import BitMap

from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries.model import Labels, Metadata, MetricType, SeriesId, Temporality

__all__ = [
    "decode_forward",
    "decode_series_id",
    "decode_series_ids",
    "encode_forward",
    "encode_series_id",
    "encode_series_ids",
    "merge_series_ids",
]

_ID: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<H")
_COUNT_MAX: Final = 2**16 - 1
_TEMPORALITY_BITS: Final = 0b011
_MONOTONIC_BIT: Final = 0b100


def encode_series_id(series_id: SeriesId) -> bytes:
    """Raises `InvalidInput` if it does not fit four bytes."""
    try:
        return _ID.pack(series_id)
    except struct.error:
        raise InvalidInput(f"series id {series_id} does not fit four bytes") from None


def decode_series_id(value: bytes) -> SeriesId:
    """Raises `Corrupt` if it is not four bytes."""
    if len(value) != _ID.size:
        raise Corrupt(f"a series id is {_ID.size} bytes, not {len(value)}")
    return SeriesId(*_ID.unpack(value))


def encode_forward(labels: Labels, metadata: Metadata) -> bytes:
    """Labels and metadata of one series; the description is not kept with the series.

    Raises `InvalidInput` if a text is longer than 65,535 bytes.
    """
    flags = metadata.temporality | (_MONOTONIC_BIT if metadata.monotonic else 0)
    parts = [_text(metadata.unit.encode()), bytes((metadata.metric_type, flags))]
    count = _count(len(labels), "labels")
    parts += [count, count]
    for name, value in labels.encoded():
        parts += [_text(name), _text(value)]
    return b"".join(parts)


def decode_forward(value: bytes) -> tuple[Labels, Metadata]:
    """Raises `Corrupt` if the bytes break the format or the labels are not sorted."""
    try:
        unit, at = _read_text(value, 0)
        metric_type, flags = MetricType(value[at]), value[at + 1]
        label_count, pair_count = struct.unpack_from("<HH", value, at + 2)
        pairs, at = _read_pairs(value, at + 6, pair_count)
        metadata = Metadata(
            unit=unit,
            metric_type=metric_type,
            temporality=Temporality(flags & _TEMPORALITY_BITS),
            monotonic=bool(flags & _MONOTONIC_BIT),
        )
    except (IndexError, ValueError, struct.error) as error:
        raise Corrupt(f"a forward record breaks its format: {error}") from None
    names = [name for name, _ in pairs]
    if at != len(value) or label_count != pair_count or names != sorted(set(names)):
        raise Corrupt("a forward record breaks its format: its labels are not what it counts")
    return Labels(pairs), metadata


def encode_series_ids(ids: Iterable[SeriesId]) -> bytes:
    """A set of ids."""
    return BitMap(ids).serialize()


def decode_series_ids(value: bytes) -> BitMap:
    """Raises `Corrupt` if the bytes are no bitmap."""
    try:
        return BitMap.deserialize(value)
    except (IndexError, ValueError) as error:
        raise Corrupt(f"an inverted record is no bitmap: {error}") from None


def merge_series_ids(operands: Sequence[bytes]) -> bytes:
    """The union, whatever the order. Raises `Corrupt` if an operand is no bitmap."""
    if len(operands) == 1:
        return operands[0]
    return BitMap.union(BitMap(), *map(decode_series_ids, operands)).serialize()


def _text(text: bytes) -> bytes:
    return _count(len(text), "bytes of a text") + text


def _count(count: int, what: str) -> bytes:
    if count > _COUNT_MAX:
        raise InvalidInput(f"{count} {what} are more than {_COUNT_MAX}")
    return _COUNT.pack(count)


def _read_text(value: bytes, at: int) -> tuple[str, int]:
    (size,) = _COUNT.unpack_from(value, at)
    start = at + _COUNT.size
    if start + size > len(value):
        raise ValueError("a text is cut")
    return value[start : start + size].decode(), start + size


def _read_pairs(value: bytes, at: int, count: int) -> tuple[list[tuple[str, str]], int]:
    pairs = []
    for _ in range(count):
        name, at = _read_text(value, at)
        text, at = _read_text(value, at)
        pairs.append((name, text))
    return pairs, at
