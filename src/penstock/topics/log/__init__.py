"""The write-ahead log: frames, commits, checkpoints and recovery."""

from __future__ import annotations

__all__ = []
