"""Retention of hours. An expired hour stays expired, even if the retention becomes longer.

The storage expires records one by one, so an expired hour may still be partly present. Two values are
therefore stored: a floor, before which no hour is kept, and spans. A span is the retention under which hours
up to a certain one were written. Those hours expire by it. A longer retention applies only to later hours.

    09 retention    floor, minutes u32 | for each span: last hour, minutes u32 | retention, milliseconds u64

The current span ends at FFFFFFFF.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from penstock.coordinator import Put, StorageRead
from penstock.errors import Corrupt
from penstock.timeseries.keys import GLOBAL_PREFIX
from penstock.timeseries.model import MINUTE_MS, Bucket

RETENTION_KEY: Final = GLOBAL_PREFIX + b"\x09"
_HOUR_MINUTES: Final = 60
_OPEN: Final = 2**32 - 1
_FLOOR: Final = struct.Struct("<I")
_SPAN: Final = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Span:
    """Hours up to the one that starts at `last_minutes` expire `retention_ms` after they began."""

    last_minutes: int
    retention_ms: int

    def floor_minutes(self, now_ms: int) -> int:
        """Return the first hour that this span keeps."""
        return min(_hour(now_ms - self.retention_ms), self.last_minutes) + _HOUR_MINUTES


class Retention:
    """The floor and the spans. The floor never decreases, even if the clock goes back, except in
    `changed_to`."""

    def __init__(self, floor_minutes: int = 0, spans: Iterable[Span] = ()) -> None:
        self._floor_minutes = floor_minutes
        self._spans = tuple(spans)

    @property
    def longest_ms(self) -> int:
        """The longest retention of any span. Every hour with a span has expired at that age."""
        return max((span.retention_ms for span in self._spans), default=0)

    def changed_to(self, retention_ms: int | None, buckets: Collection[Bucket], now_ms: int) -> Retention:
        """Return the state for a new retention, or for none, that applies from now.

        `buckets` are the non-empty ones. Hours with data keep the shorter retention. A floor in the future,
        from a clock that was ahead, moves down to the next hour, but not to one with data.
        """
        last = max((bucket.start_minutes for bucket in buckets), default=-1)
        spans = {self._closed(span, last, retention_ms) for span in self._spans}
        if retention_ms is not None:
            spans.add(Span(_OPEN, retention_ms))
        floor_minutes = min(self.floor_minutes(now_ms), max(last, _hour(now_ms)) + _HOUR_MINUTES)
        kept = [one for one in spans if one.last_minutes >= floor_minutes and not _is_within(one, spans)]
        changed = Retention(floor_minutes, sorted(kept, key=lambda span: span.last_minutes))
        changed.floor_minutes(now_ms)
        return changed

    def _closed(self, span: Span, last_minutes: int, retention_ms: int | None) -> Span:
        still = span.last_minutes != _OPEN or span.retention_ms == retention_ms
        return span if still else Span(last_minutes, span.retention_ms)

    def floor_minutes(self, now_ms: int) -> int:
        """Return the start of the first hour that is kept."""
        reached = (span.floor_minutes(now_ms) for span in self._spans)
        self._floor_minutes = max(self._floor_minutes, *reached, 0)
        return self._floor_minutes

    def is_expired(self, bucket: Bucket, now_ms: int) -> bool:
        """Return whether an hour has expired permanently."""
        return bucket.start_minutes < self.floor_minutes(now_ms)

    def expiry_ms(self, bucket: Bucket) -> int | None:
        """Return the time when all records of an hour expire, or None."""
        lasting = [s.retention_ms for s in self._spans if s.last_minutes >= bucket.start_minutes]
        return bucket.start_ms + min(lasting) if lasting else None

    @property
    def expires(self) -> bool:
        """True if any hour expires."""
        return bool(self._spans)

    @property
    def earlier(self) -> Span | None:
        """The last span with an earlier retention, if any."""
        return next((span for span in reversed(self._spans) if span.last_minutes != _OPEN), None)

    def put(self) -> Put:
        """Return the operation that stores the retention."""
        return Put(RETENTION_KEY, self.encode())

    def encode(self) -> bytes:
        spans = (_SPAN.pack(span.last_minutes, span.retention_ms) for span in self._spans)
        return _FLOOR.pack(self._floor_minutes) + b"".join(spans)

    @classmethod
    def decode(cls, value: bytes) -> Retention:
        """Decode a stored retention. Raises `Corrupt`."""
        if len(value) < _FLOOR.size or (len(value) - _FLOOR.size) % _SPAN.size:
            raise Corrupt(f"a record of the retention has {len(value)} bytes")
        return cls(_FLOOR.unpack_from(value)[0], (Span(*one) for one in _SPAN.iter_unpack(value[4:])))


async def load_retention(read: StorageRead) -> Retention | None:
    """Return the stored retention, or None. Raises `Corrupt`."""
    value = await read.get(RETENTION_KEY)
    return None if value is None else Retention.decode(value)


def _hour(at_ms: int) -> int:
    """Return the start of the hour, in minutes."""
    return at_ms // MINUTE_MS // _HOUR_MINUTES * _HOUR_MINUTES


def _is_within(span: Span, others: Iterable[Span]) -> bool:
    """Return whether another span covers the same hours and expires them no later."""
    return any(
        one.last_minutes >= span.last_minutes and one.retention_ms <= span.retention_ms
        for one in others
        if one != span
    )
