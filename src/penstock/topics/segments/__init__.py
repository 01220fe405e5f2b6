"""Segments: the long-term files of a topic, on fast and on cold storage."""

from __future__ import annotations

__all__ = []
