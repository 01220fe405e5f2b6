"""How far a write has come, and which epochs a flush covers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["Durability", "EpochRange"]


class Durability(IntEnum):
    """What a caller can wait for. Each level includes the ones before it."""

    APPLIED = 1
    """In the delta in memory, in its place in the order."""
    FLUSHED = 2
    """In the storage and in the snapshot that readers get. A crash may still lose it."""
    WRITTEN = 2
    DURABLE = 3
    """Persisted by the storage: it survives a crash."""


class EpochRange(NamedTuple):
    """The epochs behind `lo` up to and including `hi`."""

    lo: int
    hi: int

    def __str__(self) -> str:
        return f"({self.lo}, {self.hi}]"
