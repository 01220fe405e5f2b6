"""Copies that are in memory only, until a checkpoint puts them into segments: how much all of them may take.

As long as checkpoints succeed that is little more than what they let come together. When they fail, routers
wait: what is not copied yet stays in the source, where it is bounded by the source's caps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.topics.topic import Topic

__all__ = ["COPIES_BYTES_MIN", "CopyMemory"]

COPIES_BYTES_MIN: Final = 8 * 1024**2
_RECOUNT_EVERY_S: Final = 0.05


class CopyMemory:
    """The bytes of the destinations of one engine. Time is passed in, in seconds."""

    def __init__(self, checkpoint_bytes: int) -> None:
        self._bound = max(2 * checkpoint_bytes, COPIES_BYTES_MIN)
        self._sizes: dict[Topic, int] = {}
        self._total = 0
        """Of these, and of copies that are on their way."""
        self._recounted_s = 0.0

    def look(self, dest: Topic) -> None:
        """Copies came into a destination. Those of an ephemeral one are in memory for good, and not meant."""
        size = 0 if dest.gone or dest.is_ephemeral else dest.chunk_bytes
        self._total += size - self._sizes.pop(dest, 0)
        if size:
            self._sizes[dest] = size

    @contextmanager
    def coming(self, dest: Topic, size: int) -> Iterator[None]:
        """A time in which copies of this size are on their way into a destination; they count already."""
        self._total += size
        try:
            yield
        finally:
            self._total -= size
            self.look(dest)

    def has_room(self, now_s: float) -> bool:
        """Whether more copies may come."""
        if self._total >= self._bound and now_s - self._recounted_s >= _RECOUNT_EVERY_S:
            # A checkpoint let go of them meanwhile, or a cap.
            self._recounted_s = now_s
            for dest in list(self._sizes):
                self.look(dest)
        return self._total < self._bound
