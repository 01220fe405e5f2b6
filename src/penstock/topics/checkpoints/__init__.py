"""The stored state of all topics: the data directory, snapshots, checkpoints, recovery and upkeep."""

from __future__ import annotations

__all__ = []
