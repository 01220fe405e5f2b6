"""Labels, samples and series: the data types of writes and queries.

Labels identify a series. The metric's name is the label `__name__`. A label with an empty value counts as
absent. Samples are two arrays of equal length: milliseconds since the Unix epoch, and floats. Of samples with
the same timestamp, the one written last wins.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInput

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.intp]
Mask: TypeAlias = npt.NDArray[np.bool_]
Times: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]


MINUTE_MS: Final = 60_000
_HOUR_MINUTES: Final = 60
_START_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A time range of `size_hours` from `start_minutes` (since the Unix epoch), excluding its end.

    Raises `InvalidInput` if the start is not on the hour or does not fit four bytes.
    """

    start_minutes: int
    size_hours: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start_minutes <= _START_MAX or self.start_minutes % _HOUR_MINUTES:
            raise InvalidInput(f"{self.start_minutes} is not the minute at which an hour starts")
        if not 1 <= self.size_hours <= 255:
            raise InvalidInput(f"a bucket of {self.size_hours} hours does not fit one byte")

    @classmethod
    def at(cls, timestamp_ms: int) -> Bucket:
        """Return the one-hour bucket that contains `timestamp_ms`.

        Raises `InvalidInput` outside 1970 to 10135.
        """
        if not 0 <= timestamp_ms // MINUTE_MS <= _START_MAX:
            raise InvalidInput(f"{timestamp_ms} ms since 1970 is not a time from 1970 to 10135")
        return cls(timestamp_ms // MINUTE_MS // _HOUR_MINUTES * _HOUR_MINUTES)

    @property
    def start_text(self) -> str:
        """The start in readable form, in UTC: `2023-11-14T22:00Z`."""
        return f"{np.datetime64(self.start_minutes, 'm')}Z"

    @property
    def start_ms(self) -> int:
        return self.start_minutes * MINUTE_MS

    @property
    def end_ms(self) -> int:
        """The first millisecond after the bucket."""
        return self.start_ms + self.size_hours * _HOUR_MINUTES * MINUTE_MS


_BEYOND: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


def plain_text(value: float) -> str:
    """Format a float without an exponent, for use as a label's value."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    return _without_exponent(text) if "e" in text else text.removesuffix(".0")


def json_texts(values: Floats) -> list[str]:
    """Format sample values for a response, with an exponent below 1e-6 and from 1e21."""
    return [_json_text(text) for text in map(repr, values.tolist())]


def _json_text(text: str) -> str:
    if text.endswith(".0"):
        return text[:-2]
    if "e" in text:
        value = abs(float(text))
        return text if value < 1e-6 or value >= 1e21 else _without_exponent(text)
    return _BEYOND.get(text, text)


def _without_exponent(text: str) -> str:
    """Write `1.5e-07` as `0.00000015`, `1.5e+22` as `15000000000000000000000`."""
    mantissa, _, exponent = text.partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    point = len(whole) + int(exponent)
    digits = whole + fraction
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if point >= len(digits):
        return sign + digits.ljust(point, "0")
    return f"{sign}{digits[:point]}.{digits[point:]}"


METRIC_NAME: Final = "__name__"
LABEL_BYTES_MAX: Final = 16 * 1024
"""Limit of one label's name and value together. A key of the inverted index must hold them, escaped."""
SERIES_BYTES_MAX: Final = 64 * 1024
"""Limit of all names and values of one series, which stays in memory while its hours receive writes."""
STALE_BITS: Final = 0x7FF0000000000002
"""Bits of the NaN that marks the end of a series. Other NaNs are values, so only the bits distinguish it."""

Fingerprint = NewType("Fingerprint", bytes)
SeriesId = NewType("SeriesId", int)

STALE_MARKER: Final = np.array([STALE_BITS], np.uint64).view(np.float64)[0]
# Always copy it as bits, because arithmetic on a NaN may change its payload.


class MetricType(enum.IntEnum):
    """The kind of a metric, as stored."""

    UNKNOWN = 0
    GAUGE = 1
    SUM = 2
    HISTOGRAM = 3
    EXPONENTIAL_HISTOGRAM = 4
    SUMMARY = 5


class Temporality(enum.IntEnum):
    """Whether a value counts from the start or from the previous sample."""

    UNSPECIFIED = 0
    CUMULATIVE = 1
    DELTA = 2


class Labels(tuple[tuple[str, str], ...]):
    """Name-value pairs, sorted by name, without empty values or duplicate names.

    Build labels with `Labels.of`, which checks these rules. All methods preserve them.
    """

    __slots__ = ()

    @classmethod
    def of(cls, pairs: Mapping[str, str] | Iterable[tuple[str, str]]) -> Labels:
        """Check and sort labels.

        Raises `InvalidInput` for an empty name, a duplicate name, or text that UTF-8 cannot encode.
        """
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        kept = sorted((name, value) for name, value in items if value)
        for position, (name, value) in enumerate(kept):
            if not name:
                raise InvalidInput(f"a label with the value {value!r} has no name")
            if position and kept[position - 1][0] == name:
                raise InvalidInput(f"label {name!r} is given twice")
        labels = cls(kept)
        labels.encoded()
        return labels

    def encoded(self) -> list[tuple[bytes, bytes]]:
        """Return the pairs as UTF-8. Raises `InvalidInput` for text that cannot be encoded (a lone
        surrogate)."""
        try:
            return [(name.encode(), value.encode()) for name, value in self]
        except UnicodeEncodeError as error:
            raise InvalidInput(f"a label is not text that UTF-8 can encode: {error}") from None

    def value(self, name: str) -> str:
        """Return the value of `name`, or the empty string."""
        for own, value in self:
            if own == name:
                return value
        return ""

    @property
    def metric(self) -> str:
        """The metric's name, or the empty string."""
        return self.value(METRIC_NAME)

    def keep(self, names: Iterable[str]) -> Labels:
        """Return only the labels in `names`."""
        wanted = frozenset(names)
        return Labels(pair for pair in self if pair[0] in wanted)

    def drop(self, names: Iterable[str]) -> Labels:
        """Return all labels except those in `names`."""
        unwanted = frozenset(names)
        return Labels(pair for pair in self if pair[0] not in unwanted)

    def replace(self, name: str, value: str) -> Labels:
        """Return the labels with `name` set to `value`, or without it if `value` is empty."""
        others = [pair for pair in self if pair[0] != name]
        return Labels(sorted([*others, (name, value)])) if value else Labels(others)

    @property
    def memory_bytes(self) -> int:
        """Memory of the values. Each is counted in full, even if several series share it."""
        return sum(sys.getsizeof(value) for _, value in self)

    def without_name(self) -> Labels:
        """Return the labels without the metric's name."""
        return self.drop((METRIC_NAME,))

    def fingerprint(self) -> Fingerprint:
        """Return BLAKE2b-128 over the pairs. Each text follows its length, so different pairs never look
        alike."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in self.encoded():
            digest.update(struct.pack("<II", len(name), len(value)) + name + value)
        return Fingerprint(digest.digest())

    def __str__(self) -> str:
        inner = ", ".join(f'{name}="{value}"' for name, value in self if name != METRIC_NAME)
        return f"{self.metric}{{{inner}}}"


NO_LABELS: Final = Labels()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Metadata of a metric beyond its labels."""

    metric_type: MetricType = MetricType.UNKNOWN
    temporality: Temporality = Temporality.UNSPECIFIED
    monotonic: bool = False
    unit: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Parallel arrays of timestamps and values, in any order unless `in_order` returned them."""

    timestamps: Times
    values: Floats

    def __post_init__(self) -> None:
        if self.timestamps.dtype != np.int64 or self.values.dtype != np.float64:
            raise InvalidInput("samples must be 64-bit integer milliseconds and 64-bit floats")
        if self.timestamps.shape != self.values.shape or self.timestamps.ndim != 1:
            raise InvalidInput("there must be one value for each timestamp")

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Samples:
        """Create samples from pairs of (milliseconds, value)."""
        rows = list(pairs)
        return cls(
            np.fromiter((row[0] for row in rows), np.int64, len(rows)),
            np.fromiter((row[1] for row in rows), np.float64, len(rows)),
        )

    @classmethod
    def empty(cls) -> Samples:
        return cls(np.empty(0, np.int64), np.empty(0, np.float64))

    @classmethod
    def joined(cls, parts: Iterable[Samples]) -> Samples:
        """Concatenate samples in the order of writing. The result is always a copy."""
        rows = list(parts)
        if not rows:
            return cls.empty()
        return cls(
            np.concatenate([row.timestamps for row in rows]), np.concatenate([row.values for row in rows])
        )

    def __len__(self) -> int:
        return len(self.timestamps)

    def in_order(self) -> Samples:
        """Return samples sorted by time. Of samples with the same timestamp, keep the one written last."""
        times = self.timestamps
        if len(times) < 2 or bool(np.all(times[1:] > times[:-1])):
            return self
        order = np.argsort(times, kind="stable")
        times = times[order]
        last = np.append(times[1:] != times[:-1], True)
        return Samples(times[last], self.values[order][last])

    def between(self, start_ms: int, end_ms: int) -> Samples:
        """Return the samples with `start_ms <= timestamp <= end_ms`. They must be in order."""
        low, high = np.searchsorted(self.timestamps, [start_ms, end_ms + 1])
        return Samples(self.timestamps[low:high], self.values[low:high])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One series of a write: its labels, its samples, and the metadata of its metric."""

    labels: Labels
    samples: Samples
    metadata: Metadata = field(default_factory=Metadata)


def is_stale(values: Floats) -> Mask:
    """Return a mask of the stale markers in `values`, compared by bits."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    stale: Mask = bits == np.uint64(STALE_BITS)
    return stale
