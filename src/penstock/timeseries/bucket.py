"""Hourly buckets: ids and records are scoped to one, and retention drops one whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.errors import InvalidInput
from penstock.timeseries.model import Samples

__all__ = ["MINUTE_MS", "Bucket", "buckets_between", "split_by_bucket"]

MINUTE_MS: Final = 60_000
_HOUR_MINUTES: Final = 60
_START_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """`size_hours` hours from `start_minutes` (since the Unix epoch), the end not included.

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
        """The bucket of one hour that holds `timestamp_ms`. Raises `InvalidInput` outside 1970 to 10135."""
        return cls(timestamp_ms // MINUTE_MS // _HOUR_MINUTES * _HOUR_MINUTES)

    @property
    def start_ms(self) -> int:
        return self.start_minutes * MINUTE_MS

    @property
    def end_ms(self) -> int:
        """The first millisecond after the bucket."""
        return self.start_ms + self.size_hours * _HOUR_MINUTES * MINUTE_MS

    def holds(self, samples: Samples) -> bool:
        """Whether every timestamp lies within."""
        times = samples.timestamps
        return bool(np.all((times >= self.start_ms) & (times < self.end_ms)))


def buckets_between(start_ms: int, end_ms: int) -> Iterator[Bucket]:
    """The buckets that hold any of `[start_ms, end_ms]`, oldest first; times before 1970 hold nothing."""
    first = Bucket.at(max(start_ms, 0))
    for start in range(first.start_minutes, min(end_ms // MINUTE_MS, _START_MAX) + 1, _HOUR_MINUTES):
        yield Bucket(start)


def split_by_bucket(samples: Samples) -> dict[Bucket, Samples]:
    """Samples by the hour they belong to, their order kept.

    Raises `InvalidInput` before anything is returned if one is before 1970 or too far ahead.
    """
    if not len(samples):
        return {}
    hours = samples.timestamps // (MINUTE_MS * _HOUR_MINUTES)
    low, high = Bucket.at(int(samples.timestamps.min())), Bucket.at(int(samples.timestamps.max()))
    if low == high:
        return {low: samples}
    parts = {}
    for hour in np.unique(hours).tolist():
        chosen = hours == hour
        parts[Bucket(hour * _HOUR_MINUTES)] = Samples(samples.timestamps[chosen], samples.values[chosen])
    return parts
