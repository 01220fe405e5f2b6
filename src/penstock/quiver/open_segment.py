"""What is accepted and not yet in a segment: one accumulator per stream, in memory.

The accumulators hold the batches they are given, not copies. They know nothing of threads: whoever owns them
holds one lock around every call, the same that orders the write-ahead log, so that nothing waits here that
is not in the log before it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import LimitExceeded
from penstock.quiver.model import Pending, Signal
from penstock.quiver.slots import signal_of

__all__ = ["BUNDLES_MAX", "STREAMS_MAX", "OpenSegments", "SealedSegment", "StreamKey", "Trigger"]

STREAMS_MAX: Final = 100_000
BUNDLES_MAX: Final = 10_000_000


class Trigger(enum.StrEnum):
    """Why a segment was finalized."""

    SIZE = "size"
    AGE = "age"
    STREAMS = "streams"
    WAL_CAP = "wal_cap"
    PRESSURE = "pressure"
    FLUSH = "flush"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, order=True)
class StreamKey:
    """One stream: all batches of a slot that have one schema."""

    slot: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SealedSegment:
    """The bundles of one segment, complete and on their way to disk. At least one part."""

    key: StreamKey
    parts: Sequence[Pending]
    byte_count: int
    trigger: Trigger

    @property
    def signal(self) -> Signal:
        return signal_of(self.key.slot)

    @property
    def wal_start(self) -> int:
        """The lowest log position that is needed until this segment is committed."""
        return min(part.wal_start for part in self.parts)


@dataclass(slots=True, eq=False)
class _Accumulator:
    opened_s: float
    wal_start: int
    parts: list[Pending] = field(default_factory=list)
    byte_count: int = 0


class OpenSegments:
    """The accumulators of all streams. The caller holds the lock."""

    def __init__(self) -> None:
        self._streams: dict[StreamKey, _Accumulator] = {}
        self._byte_count = 0

    @property
    def byte_count(self) -> int:
        """What waits, in bytes, over all streams."""
        return self._byte_count

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest accumulator got its first part, by the clock of `add`; None when nothing waits."""
        return min((stream.opened_s for stream in self._streams.values()), default=None)

    def lowest_wal_start(self) -> int | None:
        """The lowest log position of anything that waits; None when nothing does."""
        return min((stream.wal_start for stream in self._streams.values()), default=None)

    def add(self, part: Pending, now_s: float) -> None:
        """Let `part` wait in its stream. `now_s` is monotonic time.

        Raises `LimitExceeded` when it would open more streams than a directory may have.
        """
        key = StreamKey(part.slot, part.fingerprint)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                raise LimitExceeded(
                    f"more than {STREAMS_MAX} schemas are open at once; finalize before more come"
                )
            stream = self._streams[key] = _Accumulator(opened_s=now_s, wal_start=part.wal_start)
        stream.parts.append(part)
        stream.byte_count += part.byte_count
        stream.wal_start = min(stream.wal_start, part.wal_start)
        self._byte_count += part.byte_count

    def due(
        self, now_s: float, *, target_bytes: int, max_open_s: float, max_streams: int
    ) -> list[tuple[StreamKey, Trigger]]:
        """The streams to finalize now, each with the reason; nothing is changed.

        Size is that of all streams together, so that memory is bounded by it: the largest go first, and only
        as many as bring the rest below `target_bytes`. The same holds for too many streams.
        """
        due = self._by_age(now_s, max_open_s)
        bytes_left = self._byte_count - sum(self._streams[key].byte_count for key in due)
        count_left = len(self._streams) - len(due)
        for key in self.keys():
            if bytes_left < target_bytes and count_left <= max_streams:
                break
            if key not in due:
                due[key] = Trigger.SIZE if bytes_left >= target_bytes else Trigger.STREAMS
                bytes_left -= self._streams[key].byte_count
                count_left -= 1
        return list(due.items())

    def _by_age(self, now_s: float, max_open_s: float) -> dict[StreamKey, Trigger]:
        due: dict[StreamKey, Trigger] = {}
        for key, stream in self._streams.items():
            if now_s - stream.opened_s >= max_open_s:
                due[key] = Trigger.AGE
            elif len(stream.parts) >= BUNDLES_MAX:
                due[key] = Trigger.SIZE
        return due

    def keys(self) -> list[StreamKey]:
        """Every stream that has something, the largest first."""
        return sorted(self._streams, key=lambda key: (-self._streams[key].byte_count, key))

    def take(self, key: StreamKey, trigger: Trigger = Trigger.FLUSH) -> SealedSegment:
        """Seal one stream: what waited leaves, the next part starts anew. Raises `KeyError` if none waits.

        Hand the result to the finalizer under the same lock, so that the log is never cut in between.
        """
        stream = self._streams.pop(key)
        self._byte_count -= stream.byte_count
        return SealedSegment(key=key, parts=stream.parts, byte_count=stream.byte_count, trigger=trigger)
