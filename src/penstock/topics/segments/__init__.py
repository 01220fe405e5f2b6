"""Segments: the long-term files of a topic, in hot and cold storage."""

from __future__ import annotations

__all__ = []
