"""What is accepted and not yet on disk as a segment, and how much of the log that needs.

One lock orders everything here: a bundle is added in the order of the log, and a stream that is sealed goes
to the finalizer in the same step. So at every moment a bundle is in the log alone, or open, or sealed, or
committed, and `needed` never passes one that is not committed:

1. A is appended to the log, then B; both are added under this lock in that order.
2. B's stream is sealed and committed while A's is still open.
3. `needed` is where A starts; after a crash A is read again, and B is known to be committed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.quiver.config import SegmentConfig
from penstock.quiver.finalize import Finalizer
from penstock.quiver.model import Pending
from penstock.quiver.open_segment import OpenSegments, Trigger

__all__ = ["OpenBuffer", "Waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What is not on disk as a segment, at one moment: every bundle that was accepted is in it once."""

    end: int
    """Where the log ends, as far as it is here."""
    expected_bytes: int
    """What is on its way through the log."""
    open_bytes: int
    stream_count: int
    sealed: Sequence[tuple[int, int]]
    """The number and the bytes of each segment that is not known to be on disk."""


class OpenBuffer:
    """The open segments and the way of sealed ones to the disk. Any thread may call any method."""

    def __init__(self, finalizer: Finalizer, config: SegmentConfig, *, end: int, clock: Clock) -> None:
        self._finalizer = finalizer
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._open = OpenSegments()
        self._end = end
        self._expected_bytes = 0

    def expect(self, byte_count: int) -> None:
        """Count what goes into the log, until `add` says that it arrived; less than nothing takes it back."""
        with self._lock:
            self._expected_bytes += byte_count

    def add(self, parts: Iterable[Pending], *, end: int, arrived: int = 0) -> None:
        """Take the parts of the entries that the log has up to the position `end`.

        `arrived` is how much of what was expected is here, or failed.
        """
        now_s = self._clock.monotonic()
        with self._lock:
            for part in parts:
                self._open.add(part, now_s)
                # In between too: one commit may bring more streams than there may ever be.
                if self._open.stream_count > self._config.max_stream_count:
                    self._seal_due(now_s)
            self._end = max(self._end, end)
            self._expected_bytes -= arrived
            if self._open.byte_count >= self._config.target_bytes:
                self._seal_due(now_s)

    def seal_due(self) -> None:
        """Seal what is open for too long, or is too much."""
        now_s = self._clock.monotonic()
        with self._lock:
            self._seal_due(now_s)

    def seal_all(self, trigger: Trigger) -> None:
        """Seal everything that is open."""
        with self._lock:
            everything = self._open.keys()
            for key in everything:
                self._finalizer.submit(self._open.take(key, trigger))

    def _seal_due(self, now_s: float) -> None:
        due = self._open.due(
            now_s,
            target_bytes=self._config.target_bytes,
            max_open_s=self._config.max_open_s,
            max_streams=self._config.max_stream_count,
        )
        for key, trigger in due:
            self._finalizer.submit(self._open.take(key, trigger))

    def needed(self) -> int:
        """The lowest position of the log that is still needed; its end here if nothing is."""
        with self._lock:
            lowest = (self._open.lowest_wal_start(), self._finalizer.lowest_wal_start())
            return min([start for start in lowest if start is not None], default=self._end)

    def waiting(self) -> Waiting:
        """Everything that is not on disk as a segment, at one moment."""
        with self._lock:
            return Waiting(
                end=self._end,
                expected_bytes=self._expected_bytes,
                open_bytes=self._open.byte_count,
                stream_count=self._open.stream_count,
                sealed=self._finalizer.waiting(),
            )

    @property
    def expected_bytes(self) -> int:
        """What was submitted to the log and is not yet answered."""
        return self._expected_bytes

    @property
    def end(self) -> int:
        """The position behind the last entry that was added."""
        return self._end

    @property
    def open_bytes(self) -> int:
        return self._open.byte_count

    @property
    def stream_count(self) -> int:
        return self._open.stream_count

    @property
    def memory_bytes(self) -> int:
        """What waits in memory, open and sealed."""
        return self._open.byte_count + self._finalizer.byte_count

    def age_s(self) -> float:
        """How long the oldest bundle has been waiting in an open segment."""
        with self._lock:
            oldest_s = self._open.oldest_s
        return 0.0 if oldest_s is None else max(0.0, self._clock.monotonic() - oldest_s)
