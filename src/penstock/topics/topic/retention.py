"""The ages of a topic's records, independent of steps of the wall clock.

A record's timestamp is wall time and never decreases within a topic. The wall clock may be set while the
process runs, or between two starts. `Ages` therefore stores, by sequence number, how far the timestamps were
ahead of the steady time of the process when they were made:

- a clock that is set forward does not make earlier records older;
- a clock that is set back does not keep records longer, although timestamps stand still until it catches up;
- after a start, a timestamp in the future counts as the time of the start, so a record never outlives its TTL
  counted from the start.

While the clock is not set, there is one difference near 0, and nothing is stored per record.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.topics.topic.index import NOTHING, Removed, TopicIndex

_SLACK_MS: Final = 20
"""The difference between two clock readings that rounding and clock slewing can cause."""
_SHARE: Final = 64
"""The resolution of ages while timestamps stand still, as a fraction of the records' lifetime."""
_LIFE_MS: Final = 3_600_000
"""The lifetime assumed for records of a topic without a TTL."""
_PARTS_MAX: Final = 256
_ALL_MS: Final = 2**63


class _Part(NamedTuple):
    """Records up to `end_seq`, at least `ahead_ms` ahead of steady time, written by `closed_ms`."""

    end_seq: int
    ahead_ms: int
    closed_ms: int


class Ages:
    """The difference between timestamps and steady time for each part of a topic, oldest part first."""

    __slots__ = ("_high_ms", "_low_ms", "_parts")

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._low_ms = self._high_ms = 0
        """The range of the difference for all records after the parts."""

    def start(self, head_seq: int, now_ms: int) -> None:
        """Treat all recovered records as written before now, whatever their timestamps."""
        self._parts = [_Part(head_seq, 0, now_ms)] if head_seq else []
        self._low_ms = self._high_ms = 0

    def stamped(self, first_seq: int, ts_ms: int, steady_ms: int, ttl_ms: int) -> None:
        """Record that writes from `first_seq` on have this timestamp.

        Sequence numbers may be assigned again.
        """
        ahead_ms = ts_ms - steady_ms
        while self._parts and self._parts[-1].end_seq >= first_seq:
            end = self._parts.pop()
            if not self._parts or self._parts[-1].end_seq < first_seq - 1:
                self._parts.append(end._replace(end_seq=first_seq - 1))
        low, high = min(self._low_ms, ahead_ms), max(self._high_ms, ahead_ms)
        if high - low <= _SLACK_MS + (ttl_ms or _LIFE_MS) // _SHARE:
            self._low_ms, self._high_ms = low, high
            return
        self._parts.append(_Part(first_seq - 1, self._low_ms, steady_ms))
        self._low_ms = self._high_ms = ahead_ms
        if len(self._parts) > _PARTS_MAX:
            first, second = self._parts[:2]
            self._parts[:2] = [second._replace(ahead_ms=min(first.ahead_ms, second.ahead_ms))]

    def expire(self, index: TopicIndex, steady_ms: int, ttl_ms: int) -> Removed:
        """Remove records older than `ttl_ms`: never early, and late by a small fraction of it at most."""
        count = size = end_seq = 0
        while index.live:
            part = self._parts[0] if self._parts else None
            removed = self._expire_part(index, part, steady_ms, ttl_ms)
            if removed.records:
                count, size, end_seq = count + removed.records, size + removed.bytes, removed.end_seq
            if part is None or index.earliest_seq <= part.end_seq:
                break
            del self._parts[0]
        return Removed(count, size, end_seq) if count else NOTHING

    def _expire_part(self, index: TopicIndex, part: _Part | None, steady_ms: int, ttl_ms: int) -> Removed:
        if part is None:
            return index.expire(steady_ms + self._low_ms, ttl_ms)
        if steady_ms - ttl_ms > part.closed_ms:
            return index.expire(_ALL_MS, ttl_ms, part.end_seq)
        return index.expire(steady_ms + part.ahead_ms, ttl_ms, part.end_seq)

    def now_ms(self, steady_ms: int) -> int:
        """Return a time at which no record's timestamp makes it look older than it is."""
        return steady_ms + min([self._low_ms, *(part.ahead_ms for part in self._parts)])
