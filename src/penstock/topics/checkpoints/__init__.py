"""The stored state of all topics: data directory, snapshots, checkpoints, recovery and maintenance."""

from __future__ import annotations

__all__ = []
