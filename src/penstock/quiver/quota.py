"""The disk quota of one core: its limit, its usage, and the space that a bundle takes.

Bytes are charged before they are written and released after their file is gone, so the count is never below
the real usage. The cap does not see other users of the device, so too little free space counts as exceeding
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ConfigError, PenstockError
from penstock.storage import FileSystem
from penstock.units import format_size

FRAME_BYTES: Final = 2048
"""The approximate overhead of a segment: schema, footer and sidecar."""
_ACK_LOG_SHARE: Final = 16
"""The divisor of the cap that gives the space for the offset log, which is never empty."""
_LOOK_EVERY_S: Final = 1.0


def min_quota(*, wal_bytes: int, target_bytes: int) -> int:
    """Return the minimum for one core: its log, the segment being written and one more."""
    return wal_bytes + 2 * target_bytes


def min_core_quota(cap_bytes: int, cores: int) -> int:
    """Return the bytes that each of several cores may always use: half of its share."""
    return cap_bytes // cores // 2


def max_core_quota(cap_bytes: int, cores: int, target_bytes: int) -> int:
    """Return the bytes that one core may use when the others use nothing."""
    if cores == 1:
        return cap_bytes
    minimum = min_core_quota(cap_bytes, cores)
    return max(minimum, cap_bytes - target_bytes * cores - minimum * (cores - 1))


def footprint(byte_count: int, *, has_wal: bool) -> int:
    """Return the disk space for a bundle, which is still in the log while its segment is written."""
    return FRAME_BYTES + (2 * byte_count if has_wal else byte_count)


def largest_bundle(most_bytes: int, *, target_bytes: int, has_wal: bool) -> int:
    """Return the size of the largest bundle that fits below the soft cap when all removable data is gone."""
    below = most_bytes - target_bytes
    room = below - below // _ACK_LOG_SHARE - FRAME_BYTES
    return room // 2 if has_wal else room


class Quota:
    """The bytes of one core, by kind. Safe to use from any thread.

    `hard_bytes` is this core's share of the cap. Writers wait one segment below it, so that open segments can
    still be written. `limit` returns the quota that other cores leave, which replaces the share.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        *,
        hard_bytes: int,
        target_bytes: int,
        wal_bytes: int = 0,
        min_free_bytes: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        limit: Callable[[], int] | None = None,
    ) -> None:
        minimum = min_quota(wal_bytes=wal_bytes, target_bytes=target_bytes)
        if hard_bytes < minimum:
            raise ConfigError(
                f"the cap of {format_size(hard_bytes)} per core is too small: the log and two segments "
                f"need {format_size(minimum)}"
            )
        self._fs = fs
        self._directory = directory
        self._hard_bytes = hard_bytes
        self._target_bytes = target_bytes
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._looked_s: float | None = None
        self._lacking = 0

    @property
    def used(self) -> int:
        with self._lock:
            return sum(self._bytes.values())

    @property
    def hard_bytes(self) -> int:
        """The bytes that this core may use at present."""
        return self._hard_bytes if self._limit is None else self._limit()

    @property
    def target_bytes(self) -> int:
        """The size of one segment."""
        return self._target_bytes

    @property
    def soft_bytes(self) -> int:
        """The bytes above which writers wait."""
        return self.hard_bytes - self._target_bytes

    @property
    def fraction(self) -> float:
        """The used fraction of the cap."""
        return self.used / self.hard_bytes

    def put(self, **byte_counts: int) -> None:
        """Set the bytes of each kind."""
        with self._lock:
            self._bytes.update(byte_counts)

    def charge(self, kind: str, byte_count: int) -> None:
        """Count bytes that are about to be written."""
        with self._lock:
            self._bytes[kind] = self._bytes.get(kind, 0) + byte_count

    def release(self, kind: str, byte_count: int) -> None:
        """Stop counting bytes whose file was removed, or that were not written."""
        with self._lock:
            self._bytes[kind] = max(0, self._bytes.get(kind, 0) - byte_count)

    def excess(self, more_bytes: int = 0) -> int:
        """Return by how much the use plus `more_bytes` exceeds the soft cap or the free space, or 0."""
        over = self.used + more_bytes - self.soft_bytes
        return max(0, over, self._lacking_bytes(more_bytes))

    def _lacking_bytes(self, more_bytes: int) -> int:
        now_s = self._clock.monotonic()
        if not self._min_free_bytes:
            return 0
        if self._looked_s is None or now_s - self._looked_s >= _LOOK_EVERY_S or self._lacking > 0:
            try:
                self._lacking = self._min_free_bytes - self._fs.free_bytes(self._directory)
            except PenstockError:
                self._lacking = 0  # a real problem will fail the next write
            self._looked_s = now_s
        return self._lacking + more_bytes
