"""The write-ahead log: frames, their payloads, and the commits of its shards."""

from __future__ import annotations

__all__ = []
