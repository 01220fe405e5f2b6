"""Hourly buckets: ids and records are scoped to one, and retention drops one whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.errors import InvalidInput

__all__ = ["MINUTE_MS", "Bucket"]

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
        if not 0 <= timestamp_ms // MINUTE_MS <= _START_MAX:
            raise InvalidInput(f"{timestamp_ms} ms since 1970 is not a time from 1970 to 10135")
        return cls(timestamp_ms // MINUTE_MS // _HOUR_MINUTES * _HOUR_MINUTES)

    @property
    def start_text(self) -> str:
        """The start as people read it, in UTC: `2023-11-14T22:00Z`."""
        return f"{np.datetime64(self.start_minutes, 'm')}Z"

    @property
    def start_ms(self) -> int:
        return self.start_minutes * MINUTE_MS

    @property
    def end_ms(self) -> int:
        """The first millisecond after the bucket."""
        return self.start_ms + self.size_hours * _HOUR_MINUTES * MINUTE_MS
