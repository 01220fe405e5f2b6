"""How many writes are applied in one go."""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """Learns a batch size that keeps a turn short and does not shoot far over the flush threshold."""

    def __init__(self, *, writes_max: int, seconds_max: float) -> None:
        self._writes_max = writes_max
        self._seconds_max = seconds_max
        self._writes = writes_max
        self._mean_size = 0.0

    def limit(self, size_left: int) -> int:
        """Writes to take when the delta may still grow by `size_left`."""
        if self._mean_size <= 0:
            return self._writes
        return max(1, min(self._writes, int(size_left / self._mean_size) + 1))

    def learn(self, writes: int, seconds: float, growth: int) -> None:
        """Note what the last batch took."""
        self._mean_size = max(0, growth) / writes
        if seconds > self._seconds_max:
            self._writes = max(1, min(self._writes, writes) // 2)
        elif writes >= self._writes:
            self._writes = min(self._writes_max, self._writes * 2)
