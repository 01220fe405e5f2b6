"""Accepted bundles that are not yet on disk as a segment: one accumulator per stream, in memory.

The accumulators hold the original batches, not copies. One lock orders all changes: bundles are added in
the order of the log, and a sealed stream is passed to the segment writer in the same step. A bundle is
therefore always in exactly one state: only in the log, open, sealed, or committed. `needed` never passes a
bundle that is not committed:

1. A is appended to the log, then B. Both are added under this lock in that order.
2. B's stream is sealed and committed while A's is still open.
3. `needed` is the start of A. After a crash A is read again, and B is known to be committed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.clock import Clock
from penstock.errors import LimitExceeded
from penstock.quiver.config import SegmentConfig
from penstock.quiver.model import Pending, SealedSegment, StreamKey, Trigger
from penstock.quiver.segments.writer import SegmentWriter

STREAMS_MAX: Final = 100_000
BUNDLES_MAX: Final = 10_000_000


@dataclass(slots=True, eq=False)
class _Accumulator:
    opened_s: float
    wal_start: int
    parts: list[Pending] = field(default_factory=list)
    byte_count: int = 0


class ActiveSegments:
    """The accumulators of all streams. The caller holds the lock."""

    def __init__(self) -> None:
        self._streams: dict[StreamKey, _Accumulator] = {}
        self._byte_count = 0

    @property
    def byte_count(self) -> int:
        """The number of waiting bytes over all streams."""
        return self._byte_count

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest accumulator got its first part, by the clock of `add`, or None if there is none."""
        return min((stream.opened_s for stream in self._streams.values()), default=None)

    def lowest_wal_start(self) -> int | None:
        """Return the lowest log position of any waiting part, or None if there is none."""
        return min((stream.wal_start for stream in self._streams.values()), default=None)

    def add(self, part: Pending, now_s: float) -> None:
        """Add `part` to its stream. `now_s` is monotonic time.

        Raise `LimitExceeded` if it would open more streams than a directory may have.
        """
        key = StreamKey(part.slot, part.fingerprint)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX:
                raise LimitExceeded(f"more than {STREAMS_MAX} schemas are open; flush before adding more")
            stream = self._streams[key] = _Accumulator(opened_s=now_s, wal_start=part.wal_start)
        stream.parts.append(part)
        stream.byte_count += part.byte_count
        stream.wal_start = min(stream.wal_start, part.wal_start)
        self._byte_count += part.byte_count

    def due(
        self, now_s: float, *, target_bytes: int, max_open_s: float, max_streams: int
    ) -> list[tuple[StreamKey, Trigger]]:
        """Return the streams to seal now, each with the reason. Change nothing.

        The size limit applies to all streams together, so that memory is bounded. The largest streams are
        sealed first, and only until the rest is below `target_bytes`. Too many streams are handled the same
        way.
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
        """Return every open stream, the largest first."""
        return sorted(self._streams, key=lambda key: (-self._streams[key].byte_count, key))

    def take(self, key: StreamKey, trigger: Trigger = Trigger.FLUSH) -> SealedSegment:
        """Seal one stream and remove it. Its next part starts a new one. Raise `KeyError` if it is empty.

        Pass the result to the segment writer under the same lock, so that the log is never truncated in
        between.
        """
        stream = self._streams.pop(key)
        self._byte_count -= stream.byte_count
        return SealedSegment(key=key, parts=stream.parts, byte_count=stream.byte_count, trigger=trigger)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A snapshot of the data that is not on disk as a segment. Every accepted bundle is in it once."""

    end: int
    """The end of the log entries that were added."""
    expected_bytes: int
    """The bytes that are being written to the log."""
    open_bytes: int
    stream_count: int
    sealed: Sequence[tuple[int, int]]
    """The number and size of each segment that is not known to be on disk."""


class Memtable:
    """The open segments, and the hand-over of sealed ones to the segment writer. Thread-safe."""

    def __init__(
        self, segment_writer: SegmentWriter, config: SegmentConfig, *, end: int, clock: Clock
    ) -> None:
        self._segment_writer = segment_writer
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._open = ActiveSegments()
        self._end = end
        self._expected_bytes = 0

    def expect(self, byte_count: int) -> None:
        """Count bytes that are being written to the log until `add` reports them. A negative number undoes
        this.
        """
        with self._lock:
            self._expected_bytes += byte_count

    def add(self, parts: Iterable[Pending], *, end: int, arrived: int = 0) -> None:
        """Add the parts of the log entries up to the position `end`.

        `arrived` is the number of expected bytes that were written or failed.
        """
        now_s = self._clock.monotonic()
        with self._lock:
            for part in parts:
                self._open.add(part, now_s)
                # Check in between too, because one commit may open more streams than are allowed.
                if self._open.stream_count > self._config.max_stream_count:
                    self._seal_due(now_s)
            self._end = max(self._end, end)
            self._expected_bytes -= arrived
            if self._open.byte_count >= self._config.target_bytes:
                self._seal_due(now_s)

    def seal_due(self) -> None:
        """Seal the streams that are too old or too large."""
        now_s = self._clock.monotonic()
        with self._lock:
            self._seal_due(now_s)

    def seal_all(self, trigger: Trigger) -> None:
        """Seal every open stream."""
        with self._lock:
            keys = self._open.keys()
            for key in keys:
                self._segment_writer.submit(self._open.take(key, trigger))

    def _seal_due(self, now_s: float) -> None:
        due = self._open.due(
            now_s,
            target_bytes=self._config.target_bytes,
            max_open_s=self._config.max_open_s,
            max_streams=self._config.max_stream_count,
        )
        for key, trigger in due:
            self._segment_writer.submit(self._open.take(key, trigger))

    def needed(self) -> int:
        """Return the lowest log position that is still needed, or the end of the log if none is."""
        with self._lock:
            lowest = (self._open.lowest_wal_start(), self._segment_writer.lowest_wal_start())
            return min([start for start in lowest if start is not None], default=self._end)

    def waiting(self) -> Waiting:
        """Return a consistent snapshot of all data that is not on disk as a segment."""
        with self._lock:
            return Waiting(
                end=self._end,
                expected_bytes=self._expected_bytes,
                open_bytes=self._open.byte_count,
                stream_count=self._open.stream_count,
                sealed=self._segment_writer.waiting(),
            )

    @property
    def expected_bytes(self) -> int:
        """The bytes that were submitted to the log and are not yet written."""
        return self._expected_bytes

    @property
    def end(self) -> int:
        """The position after the last entry that was added."""
        return self._end

    @property
    def open_bytes(self) -> int:
        return self._open.byte_count

    @property
    def stream_count(self) -> int:
        return self._open.stream_count

    @property
    def memory_bytes(self) -> int:
        """The size of the data that waits in memory, open and sealed."""
        return self._open.byte_count + self._segment_writer.byte_count

    def age_s(self) -> float:
        """Return the age of the oldest bundle in an open segment."""
        with self._lock:
            oldest_s = self._open.oldest_s
        return 0.0 if oldest_s is None else max(0.0, self._clock.monotonic() - oldest_s)
