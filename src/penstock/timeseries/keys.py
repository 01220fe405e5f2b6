"""Keys of the records in storage, big-endian, so that bytes sort in the order of the values.

    01 02 | bucket start, minutes u32 | bucket size, hours u8 | type u8 | suffix

    02 dictionary   fingerprint, 16 bytes
    03 forward      series id u32
    04 inverted     terminated(label name), then the label value unchanged
    05 samples      terminated(metric name), series id u32

The bucket comes before the type, so that one prefix covers a whole bucket. Terminated bytes escape 00, 01 and
FF and end with 00, so that no text is a prefix of another and texts keep their order.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries.model import Bucket, Fingerprint, SeriesId

SUBSYSTEM_PREFIX: Final = b"\x01\x02"
GLOBAL_PREFIX: Final = SUBSYSTEM_PREFIX + b"\xff\xff\xff\xff\x00"
"""The prefix of records of the whole database. Its bucket start is not a valid hour."""
FAMILY_PREFIX: Final = GLOBAL_PREFIX + b"\x07"
FINGERPRINT_BYTES: Final = 16
_BUCKET: Final = struct.Struct(">IB")
_ID: Final = struct.Struct(">I")
_ESCAPES: Final = {0x00: b"\x01\x01", 0x01: b"\x01\x02", 0xFF: b"\x01\x03"}
_UNESCAPES: Final = {0x01: 0x00, 0x02: 0x01, 0x03: 0xFF}
_SERIES_ID_MAX: Final = 2**32 - 1


class RecordType(enum.IntEnum):
    """The type of a record: the byte after the bucket."""

    DICTIONARY = 2
    FORWARD = 3
    INVERTED = 4
    SAMPLES = 5


@dataclass(frozen=True, slots=True)
class DictionaryKey:
    """Key of a record that maps a fingerprint to its series id."""

    bucket: Bucket
    fingerprint: Fingerprint

    def encode(self) -> bytes:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise InvalidInput(f"a fingerprint is {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")
        return record_prefix(self.bucket, RecordType.DICTIONARY) + self.fingerprint


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """Key of a record that maps a series id to its labels."""

    bucket: Bucket
    series_id: SeriesId

    def encode(self) -> bytes:
        return record_prefix(self.bucket, RecordType.FORWARD) + _series_id(self.series_id)


@dataclass(frozen=True, slots=True)
class InvertedKey:
    """Key of a record that maps a label to the series that carry it."""

    bucket: Bucket
    label: str
    value: str

    def encode(self) -> bytes:
        return inverted_prefix(self.bucket, self.label) + self.value.encode()


@dataclass(frozen=True, slots=True)
class SamplesKey:
    """Key of a record that maps a metric and a series id to the samples."""

    bucket: Bucket
    metric: str
    series_id: SeriesId

    def encode(self) -> bytes:
        prefix = record_prefix(self.bucket, RecordType.SAMPLES)
        return prefix + terminated(self.metric.encode()) + _series_id(self.series_id)


def bucket_prefix(bucket: Bucket) -> bytes:
    """Return the prefix of every key of the bucket."""
    return SUBSYSTEM_PREFIX + _BUCKET.pack(bucket.start_minutes, bucket.size_hours)


def record_prefix(bucket: Bucket, record_type: RecordType) -> bytes:
    """Return the prefix of every key of one type in the bucket."""
    return bucket_prefix(bucket) + bytes((record_type,))


def inverted_prefix(bucket: Bucket, label: str) -> bytes:
    """Return the common prefix of the keys of all values of `label`."""
    return record_prefix(bucket, RecordType.INVERTED) + terminated(label.encode())


def terminated(text: bytes) -> bytes:
    """Return `text` with 00, 01 and FF escaped, followed by 00."""
    if not any(byte in text for byte in _ESCAPES):
        return text + b"\0"
    return b"".join(_ESCAPES.get(byte, bytes((byte,))) for byte in text) + b"\0"


def unterminated(data: bytes) -> tuple[bytes, bytes]:
    """Return the text at the start of `data`, and the rest. Raises `Corrupt` if the text has no end."""
    end = data.find(b"\0")
    if end < 0:
        raise Corrupt("a text in a key has no end")
    escaped, rest = data[:end], data[end + 1 :]
    if b"\x01" not in escaped:
        return escaped, rest
    text = bytearray()
    codes = iter(escaped)
    for code in codes:
        if code == 0x01:
            plain = _UNESCAPES.get(next(codes, -1))
            if plain is None:
                raise Corrupt("a text in a key contains an unknown escape")
            code = plain
        text.append(code)
    return bytes(text), rest


def _series_id(series_id: SeriesId) -> bytes:
    if not 0 <= series_id <= _SERIES_ID_MAX:
        raise InvalidInput(f"series id {series_id} does not fit four bytes")
    return _ID.pack(series_id)
