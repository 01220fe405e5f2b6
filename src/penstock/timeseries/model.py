"""Labels, samples and series: what is written and what is asked for.

A series is its labels. The metric's name is the label `__name__`; a label with an empty value is no
label at all. Samples are two arrays of one length: milliseconds since the Unix epoch, and floats. Of
samples with one timestamp the later one written counts.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NewType

import numpy as np

from penstock.errors import InvalidInput
from penstock.timeseries.arrays import Floats, Mask, Times

__all__ = [
    "LABEL_BYTES_MAX",
    "METRIC_NAME",
    "NO_LABELS",
    "SERIES_BYTES_MAX",
    "STALE_BITS",
    "STALE_MARKER",
    "Fingerprint",
    "Labels",
    "Metadata",
    "MetricType",
    "Samples",
    "Series",
    "SeriesId",
    "Temporality",
    "is_stale",
]

METRIC_NAME: Final = "__name__"
LABEL_BYTES_MAX: Final = 16 * 1024
"""Name and value of one label together: a key of the inverted index has to hold them, escaped."""
SERIES_BYTES_MAX: Final = 64 * 1024
"""All names and values of one series: it is in memory for as long as its hours are written to."""
STALE_BITS: Final = 0x7FF0000000000002
"""The NaN that says "this series has ended". Other NaNs are values, so only the bits tell it apart."""

Fingerprint = NewType("Fingerprint", bytes)
SeriesId = NewType("SeriesId", int)

STALE_MARKER: Final = np.array([STALE_BITS], np.uint64).view(np.float64)[0]
# Always copied as bits: arithmetic on a NaN may change its payload.


class MetricType(enum.IntEnum):
    """What a metric is, as it is stored."""

    UNKNOWN = 0
    GAUGE = 1
    SUM = 2
    HISTOGRAM = 3
    EXPONENTIAL_HISTOGRAM = 4
    SUMMARY = 5


class Temporality(enum.IntEnum):
    """Whether a value counts since the start or since the sample before."""

    UNSPECIFIED = 0
    CUMULATIVE = 1
    DELTA = 2


class Labels(tuple[tuple[str, str], ...]):
    """Pairs of name and value, sorted by name, without empty values and with each name once.

    Build one with `Labels.of`, which checks; the methods keep those rules.
    """

    __slots__ = ()

    @classmethod
    def of(cls, pairs: Mapping[str, str] | Iterable[tuple[str, str]]) -> Labels:
        """Checked labels. Raises `InvalidInput` for an empty name, one given twice, or text not UTF-8."""
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
        """The pairs as UTF-8. Raises `InvalidInput` if one has no such form (a lone surrogate)."""
        try:
            return [(name.encode(), value.encode()) for name, value in self]
        except UnicodeEncodeError as error:
            raise InvalidInput(f"a label is not text that UTF-8 can hold: {error}") from None

    def value(self, name: str) -> str:
        """The value of `name`, or the empty text."""
        for own, value in self:
            if own == name:
                return value
        return ""

    @property
    def metric(self) -> str:
        """The metric's name, or the empty text."""
        return self.value(METRIC_NAME)

    def keep(self, names: Iterable[str]) -> Labels:
        """Only the labels in `names`."""
        wanted = frozenset(names)
        return Labels(pair for pair in self if pair[0] in wanted)

    def drop(self, names: Iterable[str]) -> Labels:
        """All labels but those in `names`."""
        unwanted = frozenset(names)
        return Labels(pair for pair in self if pair[0] not in unwanted)

    def replace(self, name: str, value: str) -> Labels:
        """With `name` set to `value`, or without it if `value` is empty."""
        others = [pair for pair in self if pair[0] != name]
        return Labels(sorted([*others, (name, value)])) if value else Labels(others)

    @property
    def memory_bytes(self) -> int:
        """What the values take in memory, each counted in full even if series share one."""
        return sum(sys.getsizeof(value) for _, value in self)

    def without_name(self) -> Labels:
        """Without the metric's name."""
        return self.drop((METRIC_NAME,))

    def fingerprint(self) -> Fingerprint:
        """BLAKE2b-128 over the pairs, each text behind its length: no two lists feed the same bytes."""
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
    """What is known of a metric beyond its labels."""

    metric_type: MetricType = MetricType.UNKNOWN
    temporality: Temporality = Temporality.UNSPECIFIED
    monotonic: bool = False
    unit: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Timestamps and values side by side, in any order until `in_order` is asked for."""

    timestamps: Times
    values: Floats

    def __post_init__(self) -> None:
        if self.timestamps.dtype != np.int64 or self.values.dtype != np.float64:
            raise InvalidInput("samples are 64-bit whole milliseconds and 64-bit floats")
        if self.timestamps.shape != self.values.shape or self.timestamps.ndim != 1:
            raise InvalidInput("there must be one value for each timestamp")

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Samples:
        """Samples from pairs of (milliseconds, value)."""
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
        """All of them, one after the other, in the order of writing; copied, also if there is only one."""
        rows = list(parts)
        if not rows:
            return cls.empty()
        return cls(
            np.concatenate([row.timestamps for row in rows]), np.concatenate([row.values for row in rows])
        )

    def __len__(self) -> int:
        return len(self.timestamps)

    def in_order(self) -> Samples:
        """Sorted by time with one sample per timestamp: the one written last."""
        times = self.timestamps
        if len(times) < 2 or bool(np.all(times[1:] > times[:-1])):
            return self
        order = np.argsort(times, kind="stable")
        times = times[order]
        last = np.append(times[1:] != times[:-1], True)
        return Samples(times[last], self.values[order][last])

    def between(self, start_ms: int, end_ms: int) -> Samples:
        """Those with `start_ms <= timestamp <= end_ms`, of samples in order."""
        low, high = np.searchsorted(self.timestamps, [start_ms, end_ms + 1])
        return Samples(self.timestamps[low:high], self.values[low:high])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """One series of a write: its labels, its samples, and what is known of its metric."""

    labels: Labels
    samples: Samples
    metadata: Metadata = field(default_factory=Metadata)


def is_stale(values: Floats) -> Mask:
    """Where `values` holds the stale marker, compared by its bits."""
    bits = np.ascontiguousarray(values).view(np.uint64)
    stale: Mask = bits == np.uint64(STALE_BITS)
    return stale
